"""With a capacity a plan reads nothing on the host: on a GPU that would be a wait, and no graph could hold it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import flexep
from flexep._native import arrivals
from flexep.dispatchers.backend import Published
from tests.mutants.planting import replace_function

SHAPE = {"num_experts": 9, "hidden": 64, "top_k": 3, "max_tokens": 40}
# What copies to the host, or has a size that only the values know.
WAITS = {
    "__bool__", "__contains__", "__float__", "__index__", "__int__", "bincount", "cpu", "equal", "item",
    "masked_select", "nonzero", "numpy", "repeat_interleave", "tolist", "unique",
}  # fmt: skip


class NoHostReads(TorchFunctionMode):
    """Refuses what would make the host wait, were the tensors on a GPU."""

    allowed = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        masks = name in ("__getitem__", "__setitem__") and isinstance(args[1], torch.Tensor)
        if not self.allowed and (name in WAITS or (masks and args[1].dtype == torch.bool)):
            raise AssertionError(f"the host reads: {name}")
        return func(*args, **(kwargs or {}))

    @contextmanager
    def lifted(self) -> Any:
        self.allowed = True
        yield
        self.allowed = False


def plan_guarded(ep: flexep.Dispatcher) -> None:
    """From now on this dispatcher's plans read nothing on the host; the operations of a CPU's windows may."""
    back_end, guard = ep._alive().backend, NoHostReads()
    plan, collectives = back_end.plan, back_end.collectives

    def lifting(call: Callable[..., Any]) -> Callable[..., Any]:
        def lifted(*args: Any, **kwargs: Any) -> Any:
            with guard.lifted():
                return call(*args, **kwargs)

        return lifted

    def guarded(counted: Any, weights: Any, published: Published) -> Any:
        with guard:  # all that a static call on a GPU has
            return plan(counted, weights, Published(published.ints, None, None, None))

    back_end.plan = guarded
    movers = [collectives, *([back_end.window] if hasattr(back_end, "window") else [])]
    for mover in movers:
        for name in ("all_gather", "all_to_all", "publish", "exchange_records", "plan"):
            if hasattr(mover, name):
                setattr(mover, name, lifting(getattr(mover, name)))


def dispatched(ep: flexep.Dispatcher, ranks: int) -> list[flexep.DispatchResult]:
    generator = torch.Generator().manual_seed(0)
    tokens = [0 if rank == 1 else 30 + rank for rank in range(ranks)]
    x = [torch.randn(t, 64, generator=generator).bfloat16() for t in tokens]
    idx = [torch.randint(-1, 9, (t, 3), generator=generator) for t in tokens]
    return ep.dispatch(x, idx, [torch.rand(t, 3, generator=generator) for t in tokens])


CASES = [
    ("allgather", 4, None), ("alltoall", 4, None), ("deepep", 4, None), ("deepep", 6, 3), ("hybridep", 4, None),
    ("hybridep", 4, 2), ("hybridep", 6, 2), ("hybridep", 6, 3),
]  # fmt: skip


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize(("backend", "ranks", "domain_size"), CASES)
def test_nothing_is_read(backend: str, ranks: int, domain_size: int | None, layout: str) -> None:
    how = {"layout": layout, "domain_size": domain_size, "alignment": 1, "overflow": "drop", **SHAPE}
    group = flexep.Group.local(ranks)
    for capacity in (0.3, 3.0):  # rows are dropped, or none
        ep = flexep.Dispatcher(group, backend=backend, capacity=capacity, **how)
        want = dispatched(ep, ranks)
        assert any(bool(one.dropped.any()) for one in want) == (capacity < 1)
        plan_guarded(ep)
        for a, b in zip(dispatched(ep, ranks), want, strict=True):
            assert torch.equal(a.x, b.x)
            assert torch.equal(a.weights, b.weights)
        ep.destroy()


def test_a_read_would_be_noticed() -> None:
    relay = arrivals.relay_records

    def reads(rail: torch.Tensor, top_k: int, used: torch.Tensor, *rest: Any) -> Any:
        return relay(rail[: int(used)], top_k, used, *rest)

    ep = flexep.Dispatcher(
        flexep.Group.local(4), backend="hybridep", domain_size=2, capacity=2.0, overflow="drop", **SHAPE
    )
    plan_guarded(ep)
    undo = replace_function(relay, reads)
    try:
        with pytest.raises(AssertionError, match="the host reads: __int__"):
            dispatched(ep, 4)
    finally:
        undo()
