"""How the benchmarks of one GPU take time: CUDA graphs between events, medians, and the copy of the same bytes.

Inputs that fit the L2 cache make a bench of the cache: hand over calls that rotate among sets of inputs which together
are several times as large.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from itertools import cycle, pairwise
from statistics import median

import torch

REPLAY_US = 200.0  # a replay lasts at least this long, so that the host is always ahead of the device
MOST_CALLS = 64  # of one graph
COPIED_BYTES = 1 << 29  # written by the rotating copies before the first one's memory is used again

Call = Callable[[], object]


def median_us(fn: Call | Sequence[Call], repeats: int = 50) -> float:
    """Microseconds of one call: the median of `repeats` replays of a graph of calls.

    Args:
        fn: what is timed, or several such calls, which take turns. What cannot be captured is timed call by call.
    """
    calls = [fn] if callable(fn) else list(fn)
    for call in calls:
        call()
    torch.cuda.synchronize()
    once = median(_between_events([(lambda c=call: c()) for call in calls], 3))
    rounds = min(max(1, round(REPLAY_US / max(once * len(calls), 1.0))), max(1, MOST_CALLS // len(calls)))
    graph = _captured(calls * rounds)
    if graph is None:
        return median(_between_events(calls, repeats))
    return median(_between_events([graph.replay], repeats)) / (len(calls) * rounds)


def _captured(calls: Sequence[Call]) -> torch.cuda.CUDAGraph | None:
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for call in calls:
                call()
    except RuntimeError:  # it waits for the device, or allocates elsewhere
        torch.cuda.synchronize()
        return None
    graph.replay()
    torch.cuda.synchronize()
    return graph


def _between_events(calls: Sequence[Call], repeats: int) -> list[float]:
    """Microseconds of each of `repeats` calls, which take turns."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    marks[0].record()
    for call, mark in zip(cycle(calls), marks[1:], strict=False):
        call()
        mark.record()
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in pairwise(marks)]


@cache
def copy_us(nbytes_total: int) -> float:
    """Microseconds of a device-to-device copy that reads and writes `nbytes_total` together: the faster of copies
    enqueued one by one and copies in a graph."""
    half = max(1, nbytes_total // 2)
    pairs = [
        (
            torch.randint(0, 255, (half,), dtype=torch.uint8, device="cuda"),
            torch.empty(half, dtype=torch.uint8, device="cuda"),
        )
        for _ in range(min(32, 1 + COPIED_BYTES // half))
    ]
    calls = [lambda to=to, source=source: to.copy_(source) for source, to in pairs]
    in_graph = median_us(calls)
    _between_events(calls, 20)
    return min(in_graph, median(_between_events(calls, 100)))


def emit(**fields: object) -> None:
    """One JSON line."""
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in fields.items()}), flush=True)
