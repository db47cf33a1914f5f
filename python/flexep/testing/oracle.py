"""A case's plans, inputs and expectations, kept so that every dispatcher and repeat of the case shares
them."""

from __future__ import annotations

from functools import cached_property, lru_cache

import torch

from flexep.ref import Plan, World, make_plan
from flexep.testing.case import Case
from flexep.testing.expected import Expected, expected
from flexep.testing.experts import expert_scales
from flexep.testing.inputs import Inputs, make_inputs, make_world, topk_indices


class Oracle:
    """Lazily made values of one case; `step` counts dispatches with new routing, `use` the uses of one
    handle."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self._routing: dict[int, tuple[list[torch.Tensor], Plan]] = {}
        self._inputs: dict[tuple[int, int], Inputs] = {}
        self._expected: dict[tuple[int, int, int], Expected] = {}

    @cached_property
    def world(self) -> World:
        return make_world(self.case)

    @cached_property
    def scale_EH(self) -> torch.Tensor:
        return expert_scales(self.case)

    def topk_idx(self, step: int) -> list[torch.Tensor]:
        return self._route(step)[0]

    def plan(self, step: int) -> Plan:
        return self._route(step)[1]

    def _route(self, step: int) -> tuple[list[torch.Tensor], Plan]:
        if step not in self._routing:
            idx = topk_indices(self.case, self.world, step)
            self._routing[step] = (idx, make_plan(self.world, idx))
        return self._routing[step]

    def inputs(self, step: int, use: int) -> Inputs:
        if (step, use) not in self._inputs:
            self._inputs[step, use] = make_inputs(self.case, self.plan(step), step, use)
        return self._inputs[step, use]

    def expected(self, step: int, use: int, rank: int) -> Expected:
        key = (step, use, rank)
        if key not in self._expected:
            self._expected[key] = expected(
                self.case, self.plan(step), self.topk_idx(step), self.inputs(step, use), self.scale_EH, rank
            )
        return self._expected[key]


@lru_cache(maxsize=1)
def oracle_of(data: Case) -> Oracle:
    """The oracle of `case.data`; the last one is kept."""
    return Oracle(data)
