"""Bugs to plant: in the plan's steps, in the row functors, and in each dispatcher.

A plant replaces one function everywhere it was imported to (a wrapper here, never a switch in the source).
`planted(name)` does it for a while; `PLANTS` are also callable for good, as the set-up of a rank process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import flexep.dispatchers.dispatcher  # noqa: F401  (so that everything to patch is loaded)
from flexep._native import arrivals, plan
from flexep.dispatchers.allgather import AllGather
from flexep.dispatchers.alltoall import AllToAll
from flexep.dispatchers.deepep import DeepEP
from flexep.dispatchers.hybridep import HybridEP
from flexep.ops import rows
from tests.mutants.planting import (
    Undo,
    first_lost,
    own,
    replace_function,
    replace_method,
    routes_changed,
    swapped,
)
from tests.mutants.window_plants import WINDOW_PLANTS


def wrong_row(invert: Callable) -> Undo:
    return replace_function(plan.invert_rows, lambda *a, **k: swapped(invert(*a, **k)))


def plan_dropped_row(assign: Callable) -> Undo:
    def changed(*args: Any, **kwargs: Any) -> Any:
        assigned = assign(*args, **kwargs)
        return replace(assigned, slot_row=first_lost(assigned.slot_row, -1))

    return replace_function(plan.assign_rows, changed)


def received_wrong_row(receive: Callable) -> Undo:
    def changed(*args: Any, **kwargs: Any) -> Any:
        received = receive(*args, **kwargs)
        return replace(received, rows=swapped(received.rows), row_src=swapped(received.row_src))

    return replace_function(arrivals.receive_rows, changed)


def received_weight_lost(receive: Callable) -> Undo:
    def changed(*args: Any, **kwargs: Any) -> Any:
        received = receive(*args, **kwargs)
        if received.weights is None:
            return received
        return replace(received, weights=first_lost(received.weights, 0.0))

    return replace_function(arrivals.receive_rows, changed)


def plan_swapped_expert(resolve: Callable) -> Undo:
    def changed(*args: Any, **kwargs: Any) -> Any:
        resolved = resolve(*args, **kwargs)
        return replace(resolved, kept_E=swapped(resolved.kept_E), start_E=swapped(resolved.start_E))

    return replace_function(plan.resolve, changed)


def plan_wrong_padding(resolve: Callable) -> Undo:
    return replace_function(
        plan.resolve, lambda counts, table, alignment, rest: resolve(counts, table, 1, rest)
    )


def plan_one_too_few(resolve: Callable) -> Undo:
    def changed(counts: Any, table: Any, alignment: Any, capacity: int | None) -> Any:
        return resolve(counts, table, alignment, None if capacity is None else capacity - alignment)

    return replace_function(plan.resolve, changed)


def rows_swapped(gather: Callable) -> Undo:
    return replace_function(rows.gather_rows, lambda *a, **k: swapped(gather(*a, **k)))


def rows_padding_not_zero(gather: Callable) -> Undo:
    def changed(src: Any, idx: Any, *rest: Any) -> Any:
        out = gather(src, idx, *rest)
        return torch.where(idx[:, None] < 0, torch.ones_like(out), out)

    return replace_function(rows.gather_rows, changed)


def rows_weight_forgotten(gather: Callable) -> Undo:
    return replace_function(rows.gather_rows, lambda src, idx, *weights: gather(src, idx))


def rows_dropped_term(reduce: Callable) -> Undo:
    def changed(src: Any, idx: Any, *rest: Any, **more: Any) -> Any:
        return reduce(src, first_lost(idx, -1), *rest, **more)

    return replace_function(rows.reduce_rows, changed)


def rows_other_order(reduce: Callable) -> Undo:
    def changed(src: Any, idx: Any, weights: Any, dtype: Any, sort: bool, *rest: Any) -> Any:
        flipped = None if weights is None else weights.flip(1).contiguous()
        return reduce(src, idx.sort(1, descending=True).values if weights is None else idx.flip(1).contiguous(),
                      flipped, dtype, False, *rest)  # fmt: skip

    return replace_function(rows.reduce_rows, changed)


def rows_no_weight_gradient(dot: Callable) -> Undo:
    return replace_function(rows.dot_rows, lambda *a: torch.zeros_like(dot(*a)))


def back_end_wrong_row(owner: type) -> Undo:
    return replace_method(owner, "deliver", lambda out: out._replace(rows=[swapped(t) for t in out.rows]))


def back_end_dropped_row(owner: type) -> Undo:
    def lose(out: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([t[:1] * 0, t[1:]]) for t in out]

    return replace_method(owner, "collect", lose)


def buffer_swapped_expert(owner: type) -> Undo:
    return routes_changed(
        owner, lambda r: replace(r, row_buffer=swapped(r.row_buffer), row_src=swapped(r.row_src))
    )


def buffer_wrong_padding(owner: type) -> Undo:
    return routes_changed(owner, lambda r: replace(r, row_buffer=r.row_buffer.clamp(min=0)))


def back_end_lost_weight_gradient(owner: type) -> Undo:
    return replace_method(owner, "collect_slots", lambda out: [torch.zeros_like(t) for t in out])


def back_end_stale_weights(owner: type) -> Undo:
    return replace_method(owner, "deliver_slots", lambda out: [t.roll(1, 0) for t in out])


def back_end_more_traffic(owner: type) -> Undo:
    """Sends every delivered buffer twice: right results, wrong traffic."""
    original = owner.deliver

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, *args, **kwargs)
        return original(self, *args, **kwargs)

    return own(owner, "deliver", twice)


PLANTS: dict[str, Callable[[], Undo]] = {
    "plan: wrong row": partial(wrong_row, plan.invert_rows),
    "plan: dropped row": partial(plan_dropped_row, plan.assign_rows),
    "plan: wrong row received": partial(received_wrong_row, arrivals.receive_rows),
    "plan: weight lost": partial(received_weight_lost, arrivals.receive_rows),
    "plan: swapped expert": partial(plan_swapped_expert, plan.resolve),
    "plan: wrong padding": partial(plan_wrong_padding, plan.resolve),
    "plan: kept set one block too small": partial(plan_one_too_few, plan.resolve),
    "rows: wrong row": partial(rows_swapped, rows.gather_rows),
    "rows: wrong padding": partial(rows_padding_not_zero, rows.gather_rows),
    "rows: weight forgotten": partial(rows_weight_forgotten, rows.gather_rows),
    "rows: dropped row": partial(rows_dropped_term, rows.reduce_rows),
    "rows: other order": partial(rows_other_order, rows.reduce_rows),
    "rows: lost weight gradient": partial(rows_no_weight_gradient, rows.dot_rows),
}
for _owner in (AllGather, AllToAll, DeepEP, HybridEP):
    PLANTS |= {
        f"{_owner.name}: wrong row": partial(back_end_wrong_row, _owner),
        f"{_owner.name}: dropped row": partial(back_end_dropped_row, _owner),
        f"{_owner.name}: lost weight gradient": partial(back_end_lost_weight_gradient, _owner),
        f"{_owner.name}: weights of another row": partial(back_end_stale_weights, _owner),
        f"{_owner.name}: sent twice": partial(back_end_more_traffic, _owner),
    }
for _owner in (AllGather, AllToAll):
    PLANTS |= {
        f"{_owner.name}: swapped expert": partial(buffer_swapped_expert, _owner),
        f"{_owner.name}: wrong padding": partial(buffer_wrong_padding, _owner),
    }
PLANTS |= WINDOW_PLANTS


@contextmanager
def planted(name: str) -> Iterator[None]:
    """The bug, for a while."""
    undo = PLANTS[name]()
    try:
        yield
    finally:
        undo()


def plant(name: str) -> None:
    """The bug, for good: the set-up of a rank process."""
    PLANTS[name]()
