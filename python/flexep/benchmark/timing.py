"""Clocks: every call starts behind a gate that all ranks pass together, and chains run without one.

CPU: the gate is a barrier, a call's time is that of the clock on the wall. CUDA: the gate is a small all-reduce
enqueued behind a sleep of the device that lasts twice as long as the host takes to enqueue the call, so that all of it
is there when the gate opens; a call's time is that between two events, and the host's own time is a column of its own
(in exact mode a call waits for its sizes, so there it holds the gate's time too).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist

Call = Callable[[], object]
CYCLES_PER_US = 2_000  # of a clock no faster than 2 GHz
GATE_US = 300.0  # the least sleep before a gate
MAX_GATE_US = 20_000.0  # the longest, for calls that wait for the device themselves


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


def gate_us(host_us: float) -> float:
    """How long the device sleeps before the gate of a call that the host takes `host_us` to enqueue."""
    return min(MAX_GATE_US, max(GATE_US, 2 * host_us))


def gate(device: torch.device, sleep_us: float = GATE_US) -> None:
    """Enqueues a gate that all ranks pass together, behind a sleep. Collective; the host waits for nothing."""
    torch.cuda._sleep(int(sleep_us * CYCLES_PER_US))
    dist.all_reduce(torch.zeros(1, device=device))


def _gated_cuda(call: Call, count: int, device: torch.device) -> Times:
    times, host = [], []
    sleep_us = gate_us(_host_us(call, device))
    for _ in range(count):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        gate(device, sleep_us)
        start.record()
        began = time.perf_counter()
        result = call()
        host.append(1e6 * (time.perf_counter() - began))
        end.record()
        torch.cuda.synchronize(device)
        times.append(1e3 * start.elapsed_time(end))
        del result
    return Times(times, host)


def _host_us(call: Call, device: torch.device) -> float:
    """Microseconds that the host spends in a call with an idle device before it; the longer of two."""
    longest = 0.0
    for _ in range(2):
        torch.cuda.synchronize(device)
        dist.barrier()
        began = time.perf_counter()
        call()
        longest = max(longest, 1e6 * (time.perf_counter() - began))
    return longest


def _chained_cuda(pair: Call, count: int, device: torch.device) -> list[float]:
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda.synchronize(device)
    gate(device)
    events[0].record()
    for event in events[1:]:
        pair()
        event.record()
    torch.cuda.synchronize(device)
    return [1e3 * a.elapsed_time(b) for a, b in pairwise(events)]
