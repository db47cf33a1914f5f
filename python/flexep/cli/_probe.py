"""What `flexep doctor` finds out about a machine. Nothing is assumed: what is called usable was just used.

Every finding is plain data for JSON. A usable thing is {"usable": True, "why_not": None}; others say why.
"""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from typing import Any

Finding = dict[str, Any]

WINDOW_BYTES = 32 << 20  # what a one-sided dispatcher asks for by default, and a little less
WINDOW_SECONDS = 30.0
COMPILERS = {"c++": ("c++", "g++", "clang++"), "cmake": ("cmake",), "nvcc": ("nvcc",)}


def usable(check: Callable[[], object]) -> Finding:
    """Runs the check; whatever it raises is the reason why not."""
    try:
        check()
    except Exception as error:  # a probe reports every failure, of libraries too, and never ends the report
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return {"usable": False, "why_not": lines[0]}
    return {"usable": True, "why_not": None}


def python() -> Finding:
    return {"version": platform.python_version(), "executable": sys.executable}


def torch_version() -> Finding:
    """version and cuda (the CUDA it was built for, None in a CPU build); why_not if it does not import."""
    try:
        import torch
    except ImportError as error:
        return {"version": None, "cuda": None, "why_not": str(error)}
    return {"version": torch.__version__, "cuda": torch.version.cuda, "why_not": None}


def compilers() -> dict[str, Finding | None]:
    """{"c++" | "cmake" | "nvcc": path and version, or None when it is not on PATH}."""
    found: dict[str, Finding | None] = {}
    for name, commands in COMPILERS.items():
        path = next(filter(None, map(shutil.which, commands)), None)
        found[name] = None if path is None else {"path": path, "version": _version(path)}
    return found


def _version(path: str) -> str | None:
    """The last dotted number of the first line of --version that has one (nvcc's comes after a few lines)."""
    done = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    for line in done.stdout.splitlines():
        if numbers := re.findall(r"\d+(?:\.\d+)+", line):
            return str(numbers[-1])
    return None


def built() -> Finding:
    """cuda_archs and nvshmem of the compiled module; why_not if it does not load."""
    try:
        from flexep.build_info import build_info

        info = build_info()
    except (ImportError, RuntimeError) as error:
        return {"cuda_archs": [], "nvshmem": False, "why_not": str(error)}
    return {"cuda_archs": list(info.cuda_archs), "nvshmem": info.nvshmem, "why_not": None}


def gpus() -> list[Finding]:
    """Name, compute capability and memory (bytes) of every GPU that torch sees."""
    import torch

    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        capability = f"{properties.major}.{properties.minor}"
        found.append({"name": properties.name, "capability": capability, "memory": properties.total_memory})
    return found


def peer_access() -> list[list[bool]]:
    """[i][j]: whether GPU i can reach GPU j's memory; a GPU reaches its own."""
    import torch

    count = torch.cuda.device_count()
    return [[i == j or torch.cuda.can_device_access_peer(i, j) for j in range(count)] for i in range(count)]


def transports() -> dict[str, Finding]:
    return {
        "process_group:gloo": usable(_use_gloo),
        "process_group:nccl": usable(_use_nccl),
        "local": usable(_use_local),
        "windows:shm": usable(partial(_share_windows, "cpu")),
        "windows:local": usable(partial(_use_local_windows, "cpu")),
        "windows:peer": usable(partial(_share_windows, "cuda")),
        "windows:gpu": usable(partial(_use_local_windows, "cuda")),
    }


def mps() -> Finding:
    """Whether an MPS daemon answers, so that processes that share a GPU run at the same time."""
    from flexep.testing.mps import ask_control

    return usable(lambda: ask_control({}, said="get_server_list\n"))


def dispatchers() -> dict[str, Finding]:
    """Every back end of the package, tried on two ranks of this process."""
    from flexep.dispatchers import BACKENDS

    return {name: usable(partial(_use_dispatcher, name)) for name in BACKENDS}


def _use_gloo() -> None:
    import torch

    dist: Any = torch.distributed  # its annotations lack the process groups' own methods
    if not (dist.is_available() and dist.is_gloo_available()):
        raise RuntimeError("this torch was built without gloo")
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=30))
    group.allreduce([torch.ones(1)]).wait()


def _use_nccl() -> None:
    import torch

    dist: Any = torch.distributed
    if not (dist.is_available() and dist.is_nccl_available()):
        raise RuntimeError("this torch was built without NCCL")
    if not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA GPU")
    group = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, dist.ProcessGroupNCCL.Options())
    group.allreduce([torch.ones(1, device="cuda")]).wait()
    torch.cuda.synchronize()
    group.shutdown()


def _use_local() -> None:
    from flexep import Group

    group = Group.local(2)
    group.close()


def _use_local_windows(device: str) -> None:
    from flexep import Group
    from flexep.transport.window_memory import open_windows

    open_windows(Group.local(2, device), WINDOW_BYTES, WINDOW_SECONDS).close()


def _share_windows(device: str) -> None:
    """Two ranks, here threads, swap windows as processes do: anonymous memory reserved, its descriptors sent over
    sockets and mapped, under this process's limits of memory and descriptors. What one writes the other reads; ranks
    with GPUs, the first and the last that is visible, look at that themselves."""
    import torch
    from torch.distributed import HashStore

    from flexep import Group
    from flexep.transport.window_memory import WindowMemory, open_windows

    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("torch finds no CUDA GPU")
    places = [device, device] if device == "cpu" else ["cuda:0", f"cuda:{torch.cuda.device_count() - 1}"]
    store = HashStore()

    def open_as(rank: int) -> WindowMemory:
        group = Group.from_store(store, rank, 2, device=places[rank])
        return open_windows(group, WINDOW_BYTES, WINDOW_SECONDS)

    with ThreadPoolExecutor(2) as ranks:
        asked = [ranks.submit(open_as, rank) for rank in range(2)]
        errors = [error for one in asked if (error := one.exception()) is not None]
        if errors:  # of two ranks one may only know that the other failed
            raise min(errors, key=lambda error: type(error).__name__ == "PeerRefused")
        opened = [one.result() for one in asked]
    for writer, reader in ((0, 1), (1, 0)) if device == "cpu" else ():
        opened[writer].view(reader)[-1] = 1 + writer
        if opened[reader].view(reader)[-1] != 1 + writer:
            raise RuntimeError("what one rank wrote into a window the other did not read")
    for windows in opened:
        windows.close()


def _use_dispatcher(name: str) -> None:
    import torch

    from flexep import Dispatcher, Group

    ranks, tokens, hidden = 2, 3, 8
    x_RTH = [torch.full((tokens, hidden), float(rank + 1), dtype=torch.bfloat16) for rank in range(ranks)]
    topk_RTK = [torch.tensor([[0], [1], [0]]) for _ in range(ranks)]
    group = Group.local(ranks)
    with Dispatcher(
        group, num_experts=ranks, hidden=hidden, top_k=1, max_tokens=tokens, backend=name
    ) as dispatcher:
        arrived = dispatcher.dispatch(x_RTH, topk_RTK)
        z_RTH = dispatcher.combine([r.x for r in arrived], [r.handle for r in arrived])
    group.close()
    if not all(torch.equal(z_TH, x_TH) for z_TH, x_TH in zip(z_RTH, x_RTH, strict=True)):
        raise RuntimeError("rows sent to an expert and back came back changed")
