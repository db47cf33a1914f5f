"""Clocks: every call starts behind a gate that all ranks pass together, and chains run without one.

CPU: the gate is a barrier, a call's time is that of the clock on the wall. CUDA: the gate is a small all-reduce
enqueued behind a short sleep of the device, so that the host has enqueued the call when the gate opens; a call's time
is that between two events, and the host's own time is a column of its own (in exact mode a call waits for its sizes, so
there it holds the gate's time too).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

Call = Callable[[], object]
GATE_CYCLES = 500_000  # about 300 us of device time: longer than it takes to enqueue a call


@dataclass(frozen=True)
class Times:
    """Microseconds of each call on this rank; `host` is None on the CPU, where both are the same."""

    device: list[float]
    host: list[float] | None


def gated(call: Call, count: int, device: torch.device) -> Times:
    """Times `count` calls, each behind a gate. Collective."""
    return _gated_cuda(call, count, device) if device.type == "cuda" else _gated_cpu(call, count)


def chained(pair: Call, count: int, device: torch.device) -> list[float]:
    """Times `count` calls back to back behind one gate: microseconds from each one's end to the next one's."""
    if device.type == "cuda":
        return _chained_cuda(pair, count, device)
    dist.barrier()
    stamps = [time.perf_counter()]
    for _ in range(count):
        pair()
        stamps.append(time.perf_counter())
    return [1e6 * (b - a) for a, b in pairwise(stamps)]


def _gated_cpu(call: Call, count: int) -> Times:
    times = []
    for _ in range(count):
        dist.barrier()
        start = time.perf_counter()
        result = call()
        times.append(1e6 * (time.perf_counter() - start))
        del result  # freed outside the clock, before the next call
    return Times(times, None)


def _gate_cuda(flag: torch.Tensor) -> None:
    torch.cuda._sleep(GATE_CYCLES)
    dist.all_reduce(flag)


def _gated_cuda(call: Call, count: int, device: torch.device) -> Times:
    flag, times, host = torch.zeros(1, device=device), [], []
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        _gate_cuda(flag)
        start.record()
        began = time.perf_counter()
        result = call()
        host.append(1e6 * (time.perf_counter() - began))
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * start.elapsed_time(end))
        del result
    return Times(times, host)


def _chained_cuda(pair: Call, count: int, device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize(device)
    _gate_cuda(torch.zeros(1, device=device))
    events[0].record()
    for event in events[1:]:
        pair()
        event.record()
    torch.cuda.synchronize(device)
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]
