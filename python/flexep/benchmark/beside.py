"""What matrix products lose to a dispatcher beside them, which takes multiprocessors and bandwidth from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from flexep.benchmark.timing import gate

SIDE = 8192  # rows and columns of the bf16 matrices: a product of theirs fills the GPU
PRODUCTS = 8  # of a chain
COVERED = 0.95  # the share of the chain that operations must have run beside
ATTEMPTS = 3


@dataclass(frozen=True)
class Beside:
    """Microseconds of a chain of products alone and beside operations; `covered`: the share of the second during which
    operations ran."""

    alone_us: float
    beside_us: float
    covered: float

    @property
    def ratio(self) -> float:
        """Times as long as alone while operations ran: 1 is nothing lost. The rest went as fast as alone."""
        covered_us = self.covered * self.beside_us
        return covered_us / (self.alone_us - (self.beside_us - covered_us))


def calls_to_cover(chain_us: float, call_us: float) -> int:
    """Operations that outlast a chain which they slow to up to twice its time."""
    return max(1, math.ceil(2 * chain_us / call_us))


def slowest(results: list[Beside]) -> Beside:
    """The rank that loses most."""
    return max(results, key=lambda one: one.ratio)


def run_beside(call: Callable[[], object], device: torch.device) -> Beside:
    """Times the chain alone, then with `call` again and again on the stream that ranks use. Collective: all ranks make
    the same number of calls, those that the slowest asks for."""
    a, b = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
    side = torch.cuda.Stream(device)
    _chain(a, b, side, device)  # the first call of a product chooses its kernel
    alone_us = _chain(a, b, side, device)[0]
    count = _agreed(calls_to_cover(alone_us, _period(call, device)), device)
    for _ in range(ATTEMPTS):
        beside_us, calls_us = _chain(a, b, side, device, call, count)
        found = Beside(alone_us, beside_us, min(1.0, calls_us / beside_us))
        if _agreed(int(found.covered < COVERED), device) == 0:
            break
        count *= 2
    return found


def _chain(
    a: torch.Tensor,
    b: torch.Tensor,
    side: torch.cuda.Stream,
    device: torch.device,
    call: Callable[[], object] | None = None,
    count: int = 0,
) -> tuple[float, float]:
    """Microseconds of the products on `side`, and of `count` calls on the current stream, both from one gate."""
    main = torch.cuda.current_stream(device)
    start, products, calls = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    out = torch.empty_like(a)
    torch.cuda.synchronize(device)
    gate(device)
    start.record()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=out)
        products.record()
    for _ in range(count):
        assert call is not None
        call()
    calls.record()
    torch.cuda.synchronize(device)
    return 1e3 * start.elapsed_time(products), 1e3 * start.elapsed_time(calls)


def _period(call: Callable[[], object], device: torch.device, count: int = 8) -> float:
    """Microseconds from call to call."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    call()
    gate(device)
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize(device)
    return 1e3 * start.elapsed_time(end) / count


def _agreed(value: int, device: torch.device) -> int:
    """The largest value of any rank."""
    import torch.distributed as dist

    found: Any = torch.tensor(value, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return int(found)
