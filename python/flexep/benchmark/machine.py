"""The machine beneath the numbers: its copy bandwidth, measured in the same run, and what is installed."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import flexep

COPY_BYTES = 256 << 20  # a thread
COPY_ROUNDS = 7


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0))


def copier(threads: int, size: int = COPY_BYTES) -> Callable[[], None]:
    """A call that copies `size` bytes in each of `threads` threads by memcpy, all memory touched beforehand."""
    memcpy = ctypes.CDLL(None).memcpy  # a foreign call gives up the interpreter lock while it runs
    memcpy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
    pairs = [tuple(torch.ones(size, dtype=torch.uint8) for _ in range(2)) for _ in range(threads)]

    def copy() -> None:
        started = [
            threading.Thread(target=memcpy, args=(to.data_ptr(), source.data_ptr(), size))
            for to, source in pairs
        ]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    return copy


def cpu_copy_rate(size: int = COPY_BYTES) -> float:
    """Bytes copied per second (each counted once), one thread a core, the best of COPY_ROUNDS."""
    threads = cores()
    copy = copier(threads, size)
    copy()
    return threads * size / min(_seconds(copy) for _ in range(COPY_ROUNDS))


def cuda_copy_rate(source: int, to: int, size: int = COPY_BYTES) -> float:
    """Bytes per second (each counted once) of a copy between two GPUs, or inside one, by its stream's clock; best of
    COPY_ROUNDS."""
    there = torch.empty(size, dtype=torch.uint8, device=f"cuda:{to}")
    with torch.cuda.device(source):
        here = torch.ones(size, dtype=torch.uint8, device="cuda")
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

        def seconds() -> float:
            start.record()
            there.copy_(here, non_blocking=True)
            end.record()
            end.synchronize()
            return start.elapsed_time(end) / 1e3

        seconds()
        return size / min(seconds() for _ in range(COPY_ROUNDS))


def copy_facts(device: str, size: int = COPY_BYTES) -> dict[str, Any]:
    """C and how it was measured; and the rate inside one GPU, None on the CPU, where all ranks share one memory."""
    if device == "cpu":
        rate, inside, threads = cpu_copy_rate(size), None, cores()
        how = "memcpy of the C library, one thread a core"
    else:
        peer = 1 % torch.cuda.device_count()
        rate, inside, threads = cuda_copy_rate(0, peer, size), cuda_copy_rate(0, 0, size), 1
        how = f"copy engine, GPU 0 to GPU {peer}"
        torch.cuda.empty_cache()  # the ranks are other processes and want the memory
    return {
        "bytes_per_second": rate, "method": how, "threads": threads, "bytes_each": size, "best_of": COPY_ROUNDS,
        "inside_bytes_per_second": inside,
    }  # fmt: skip


def machine_facts(device: str) -> dict[str, Any]:
    """Processor, cores, memory, GPUs in use."""
    cpu = next(
        (line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")),
        platform.machine(),
    )
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    gpus = (
        [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    )
    return {"cores": cores(), "cpu": cpu, "memory_bytes": memory, "system": platform.platform(), "gpus": gpus}


def versions() -> dict[str, str]:
    """What ran."""
    found = {"flexep": flexep.__version__, "torch": torch.__version__, "python": platform.python_version()}
    if torch.version.cuda is not None and torch.cuda.is_available():
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def load() -> float:
    """Runnable processes, averaged over the last minute: well above the ranks' own share, and numbers are noise."""
    return os.getloadavg()[0]


def _seconds(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _lines(path: str) -> list[str]:
    file = Path(path)
    return file.read_text().splitlines() if file.exists() else []
