"""Bugs to plant: in the plan's steps, in the row functors, and in each dispatcher.

A plant replaces one function everywhere it was imported to (a wrapper here, never a switch in the source).
`planted(name)` does it for a while; `PLANTS` are also callable for good, as the set-up of a rank process.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch

import flexep.dispatchers.dispatcher  # noqa: F401  (so that everything to patch is loaded)
from flexep._native import plan
from flexep.dispatchers.allgather import AllGather
from flexep.dispatchers.alltoall import AllToAll
from flexep.ops import rows

Undo = Callable[[], None]


def replace_function(original: Callable, changed: Callable) -> Undo:
    """Puts `changed` wherever a flexep module holds `original`."""
    places = [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("flexep") and not module_name.startswith("flexep.testing")
        for name, value in list(vars(module).items())
        if value is original
    ]
    assert places, original
    for module, name in places:
        setattr(module, name, changed)

    def undo() -> None:
        for module, name in places:
            setattr(module, name, original)

    return undo


def replace_method(owner: type, name: str, change: Callable[[Any], Any]) -> Undo:
    """Changes what a method of a back end returns."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original(self, *args, **kwargs))

    return _own(owner, name, changed)


def _own(owner: type, name: str, method: Callable) -> Undo:
    """Gives a back end a method of its own; undone, it has again what it had or inherited."""
    inherited, original = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, method)
    return lambda: delattr(owner, name) if inherited else setattr(owner, name, original)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """The first two different rows (or entries) change places."""
    out = tensor.clone()
    different = (out != out[:1]).flatten(1).any(1) if out.dim() > 1 else out != out[:1]
    if len(out) > 1 and different.any():
        other = int(different.nonzero()[0])
        out[0], out[other] = tensor[other], tensor[0]
    return out


def first_lost(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    """The first entry that says something is gone."""
    out = tensor.clone()
    filled = (out.flatten() != fill).nonzero()
    if len(filled):
        out.view(-1)[filled[0]] = fill
    return out


def wrong_row(invert: Callable) -> Undo:
    return replace_function(plan.invert_rows, lambda *a, **k: swapped(invert(*a, **k)))


def plan_dropped_row(assign: Callable) -> Undo:
    def changed(*args: Any, **kwargs: Any) -> Any:
        assigned = assign(*args, **kwargs)
        return replace(assigned, slot_row=first_lost(assigned.slot_row, -1))

    return replace_function(plan.assign_rows, changed)


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
    return replace_method(owner, "deliver", lambda out: replace(out, rows=[swapped(t) for t in out.rows]))


def back_end_dropped_row(owner: type) -> Undo:
    def lose(out: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([t[:1] * 0, t[1:]]) for t in out]

    return replace_method(owner, "collect", lose)


def back_end_swapped_expert(owner: type) -> Undo:
    def swap(planned: list[Any]) -> list[Any]:
        routes = [replace(p.route, row_buffer=swapped(p.route.row_buffer), row_src=swapped(p.route.row_src))
                  for p in planned]  # fmt: skip
        return [replace(p, route=route) for p, route in zip(planned, routes, strict=True)]

    return replace_method(owner, "plan", swap)


def back_end_wrong_padding(owner: type) -> Undo:
    def fill(planned: list[Any]) -> list[Any]:
        routes = [replace(p.route, row_buffer=p.route.row_buffer.clamp(min=0)) for p in planned]
        return [replace(p, route=route) for p, route in zip(planned, routes, strict=True)]

    return replace_method(owner, "plan", fill)


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

    return _own(owner, "deliver", twice)


PLANTS: dict[str, Callable[[], Undo]] = {
    "plan: wrong row": partial(wrong_row, plan.invert_rows),
    "plan: dropped row": partial(plan_dropped_row, plan.assign_rows),
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
for _owner in (AllGather, AllToAll):
    PLANTS |= {
        f"{_owner.name}: wrong row": partial(back_end_wrong_row, _owner),
        f"{_owner.name}: dropped row": partial(back_end_dropped_row, _owner),
        f"{_owner.name}: swapped expert": partial(back_end_swapped_expert, _owner),
        f"{_owner.name}: wrong padding": partial(back_end_wrong_padding, _owner),
        f"{_owner.name}: lost weight gradient": partial(back_end_lost_weight_gradient, _owner),
        f"{_owner.name}: weights of another row": partial(back_end_stale_weights, _owner),
        f"{_owner.name}: sent twice": partial(back_end_more_traffic, _owner),
    }


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
