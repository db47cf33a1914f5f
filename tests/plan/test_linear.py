"""A plan costs T*K + E*R: elements that its tensor operations touch, counted; time, on demand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench.plan_time import DOMAINS, EXECUTED, PLANNED, Shape, measure, plan_of_all

VIEWS = {
    "view",
    "slice",
    "select",
    "t",
    "permute",
    "expand",
    "unsqueeze",
    "split",
    "alias",
    "as_strided",
    "detach",
}
GROWTH = 1.25  # of elements for each of T*K + E*R, over a plan of eight ranks whose slots are most of it
TIMES = (
    4.0  # of nanoseconds for each; a plan that went with R, or with E * R * D, would take ten times and more
)


class Touched(TorchDispatchMode):
    """Counts operations, and the elements that they read and write; views touch none."""

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        if func._schema.name.split("::")[1] not in VIEWS:
            tensors = [one for one in tree_leaves((args, kwargs, out)) if isinstance(one, torch.Tensor)]
            self.elements += sum(one.numel() for one in tensors)
        return out


def touched(backend: str, shape: Shape) -> tuple[float, float]:
    """A rank's operations, and its elements for each of T*K + E*R."""
    ep, plan = plan_of_all(backend, shape)
    with ep, torch.no_grad():
        plan()
        with Touched() as count:
            plan()
    return count.operations / shape.ranks, count.elements / shape.ranks / shape.work


@pytest.mark.parametrize("backend", ["alltoall", "deepep"])
def test_elements_follow_slots_and_counts(backend: str) -> None:
    """Four times the tokens, four times the experts, nine times the ranks, and both."""
    operations, each = touched(backend, Shape(8, 8, 72))
    for shape in (
        Shape(8, 8, 72, tokens=2048), Shape(8, 8, 288, tokens=64), Shape(72, 72, 72, tokens=64),
        Shape(72, 72, 288, tokens=64),
    ):  # fmt: skip
        more, wide = touched(backend, shape)
        assert more <= 1.1 * operations, shape
        assert wide <= GROWTH * each, shape


def test_elements_do_not_follow_domains() -> None:
    """Neither the number of domains nor that of their ranks counts; a token's records do, at most K of them."""
    operations, each = touched("hybridep", Shape(8, 4, 72))
    for shape in (
        Shape(8, 4, 72, tokens=1024), Shape(8, 2, 72, tokens=64), Shape(72, 8, 72, tokens=64),
        Shape(72, 2, 72, tokens=64),
    ):  # fmt: skip
        more, wide = touched("hybridep", shape)
        assert more <= 1.1 * operations, shape
        assert wide <= GROWTH * each, shape


def test_a_plan_that_is_not_linear_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass over all tokens for each rank, planted into the plan of deepep."""
    from flexep.dispatchers.deepep import DeepEP

    original: Callable[..., Any] = DeepEP.plan

    def plan(self: Any, counted: Any, *rest: Any) -> Any:
        for one in counted:
            for rank in range(self.config.num_ranks):
                (one.topk_idx == rank).any(1).nonzero()
        return original(self, counted, *rest)

    monkeypatch.setattr(DeepEP, "plan", plan)
    operations, each = touched("deepep", Shape(8, 8, 72))
    more, wide = touched("deepep", Shape(72, 72, 72, tokens=512))
    assert more > 1.1 * operations
    assert wide > GROWTH * each


@pytest.mark.parametrize(
    ("what", "shape"),
    [("deepep", Shape(3, 3, 5, 7, 2)), ("hybridep", Shape(4, 2, 5, 7, 2)), ("planned", PLANNED[-1])],
)
def test_the_bench_runs(what: str, shape: Shape) -> None:
    row = measure(what, shape, rounds=1)
    assert row.us > 0
    assert row.ns_each == pytest.approx(row.us * 1e3 / shape.work)


@pytest.mark.speed
@pytest.mark.parametrize(
    ("what", "shapes"),
    [("alltoall", EXECUTED), ("deepep", EXECUTED), ("hybridep", DOMAINS), ("planned", PLANNED)],
)
def test_time_is_linear(what: str, shapes: list[Shape]) -> None:
    """Fixed costs make the smallest plan the dearest for its size: no larger one may be far above it."""
    torch.set_num_threads(1)
    first, *others = [measure(what, shape, rounds=9) for shape in shapes]
    for row in others:
        assert row.ns_each <= TIMES * first.ns_each, (row, first)
