"""Bugs of one-sided back ends: in what their roles are told about rows, tokens, relays and domains.

Lists stay in bounds and ascending, as the roles require; what is wrong is where they point.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from flexep.dispatchers import _hops
from flexep.dispatchers.deepep import DeepEP
from flexep.dispatchers.hybridep import HybridEP
from tests.mutants.planting import Undo, first_lost, own, routes_changed, swapped


def window_changed(owner: type, field: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Undo:
    """Changes one tensor of what one-sided movement needs; None stays None (no relays)."""

    def changed(route: Any) -> Any:
        value = getattr(route.one_sided, field)
        if value is None:
            return route
        return replace(route, one_sided=replace(route.one_sided, **{field: change(value)}))

    return routes_changed(owner, changed)


def window_swapped_expert(owner: type) -> Undo:
    return routes_changed(owner, lambda r: replace(r, part_rows=swapped(r.part_rows)))


def window_row_in_padding(owner: type) -> Undo:
    """The first slot's row lands in the padding of its expert, or of another."""

    def changed(route: Any) -> Any:
        empty, used = (route.row_src < 0).nonzero(), (route.part_rows.flatten() >= 0).nonzero()
        part_rows = route.part_rows.clone()
        if len(empty) and len(used):
            part_rows.view(-1)[used[0]] = int(empty[-1])
        return replace(route, part_rows=part_rows)

    return routes_changed(owner, changed)


def next_instead(tokens: torch.Tensor) -> torch.Tensor:
    """The first token that another one follows becomes that one: the list still ascends."""
    out = tokens.clone()
    rising = (tokens[1:] > tokens[:-1]).nonzero()
    if len(rising):
        out[rising[0]] = tokens[rising[0] + 1]
    return out


def last_block_lost(base: torch.Tensor) -> torch.Tensor:
    """Nothing comes from the last of several sources."""
    out = base.clone()
    out[-1] = out[-2]
    return out


def window_lost_domain(owner: type) -> Undo:
    """Home adds nothing of the last domain that holds a slot of the token."""
    original = owner.plan

    def changed(self: Any, *args: Any) -> Any:
        planned = original(self, *args)
        if self.hop_size == self.config.num_ranks:
            return planned
        for one in planned:
            home_rank = one.route.home_rank
            domain = home_rank.div(self.hop_size, rounding_mode="floor")
            last = domain == domain.amax(1, keepdim=True)
            home_rank[last] = -1
        return planned

    return own(owner, "plan", changed)


def hops_wrong_owner(take_slots: Callable) -> Undo:
    """At a relay, per-slot numbers are taken from the record that does not carry the slot."""

    def undo() -> None:
        _hops.take_slots = take_slots

    _hops.take_slots = lambda values, record: take_slots(values.flip(0), record)
    return undo


WINDOW_PLANTS: dict[str, Callable[[], Undo]] = {}
for _owner in (DeepEP, HybridEP):
    WINDOW_PLANTS |= {
        f"{_owner.name}: swapped expert": partial(window_swapped_expert, _owner),
        f"{_owner.name}: row in padding": partial(window_row_in_padding, _owner),
        f"{_owner.name}: row of the next token": partial(window_changed, _owner, "recv_token", next_instead),
    }
WINDOW_PLANTS |= {
    "hybridep: next row at the relay": partial(window_changed, HybridEP, "relay_token", next_instead),
    "hybridep: domain lost at the relay": partial(window_changed, HybridEP, "relay_base", last_block_lost),
    "hybridep: domain lost at home": partial(window_lost_domain, HybridEP),
    "hybridep: member lost at the relay": partial(
        window_changed, HybridEP, "relay_members", partial(first_lost, fill=-1)
    ),
    "hybridep: slots of the wrong owner": partial(hops_wrong_owner, _hops.take_slots),
}
