"""Cases travel as JSON and their inputs depend on nothing but the case."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexep.errors import ArgumentError
from flexep.ref import make_plan
from flexep.testing.axes import random_cases
from flexep.testing.case import ROUTINGS, Case
from flexep.testing.compare import digest
from flexep.testing.inputs import make_inputs, make_world, placement, rank_tokens, topk_indices
from flexep.testing.routing import ROUTERS

SMALL = Case(ranks=4, experts=8, hidden=16, top_k=2, tokens=64)


@pytest.mark.parametrize("case", random_cases(3, 30, seed=1))
def test_json_round_trip(case: Case) -> None:
    assert Case.from_json(case.to_json()) == case


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "JSON object"),
        ("[1]", "JSON object"),
        ('{"ranks": 2}', "also the field experts"),
        (SMALL.to_json().replace("ranks", "rank"), "only the fields"),
        (SMALL.to_json().replace('"ranks": 4', '"ranks": 0'), "at least 1"),
        (SMALL.to_json().replace('"ranks": 4', '"ranks": "4"'), "at least 1"),
        (SMALL.to_json().replace("}", ', "dtype": "bf8"}'), "dtype = 'bf8'"),
        (SMALL.to_json().replace("}", ', "y_layout": "flat"}'), "y_layout"),
    ],
)
def test_bad_json_is_named(text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Case.from_json(text)


def test_inputs_depend_on_the_case_alone() -> None:
    def everything(case: Case) -> str:
        world = make_world(case)
        plan = make_plan(world, topk_indices(case, world, 0))
        return digest([topk_indices(case, world, 0), make_inputs(case, plan, 0, 0)])

    once = everything(SMALL)
    torch.manual_seed(123)  # whatever the global state
    assert everything(SMALL) == once
    assert everything(replace(SMALL, dispatcher="allgather", transport="local")) == once
    assert everything(replace(SMALL, seed=1)) != once


@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("experts", [1, 3, 8])
def test_every_routing_gives_expert_ids(routing: str, experts: int) -> None:
    assert set(ROUTERS) == set(ROUTINGS)
    for tokens in (0, 1, 64):
        case = replace(SMALL, routing=routing, experts=experts, tokens=tokens)
        for idx, count in zip(topk_indices(case, make_world(case), 0), rank_tokens(case), strict=True):
            assert idx.shape == (count, 2)
            assert ((idx >= -1) & (idx < experts)).all()


def slots_by_rank(case: Case) -> torch.Tensor:
    world = make_world(case)
    idx = torch.cat([i.flatten() for i in topk_indices(case, world, 0)])
    return torch.bincount(torch.tensor(world.rank_of_expert)[idx[idx >= 0]], minlength=case.ranks)


@pytest.mark.parametrize("factor", [1.0, 1.5, 2.0, 4.0])
def test_imbalance_is_precise(factor: float) -> None:
    loads = slots_by_rank(replace(SMALL, routing=f"imbalance_{factor:g}"))
    assert int(loads.max()) == round(4 * 64 * 2 * factor / 4)


def test_routings_do_what_they_say() -> None:
    assert (slots_by_rank(replace(SMALL, routing="one_rank")) > 0).sum() == 1
    assert (slots_by_rank(replace(SMALL, routing="rank_empty")) == 0).sum() == 1
    assert slots_by_rank(replace(SMALL, routing="W0_balanced")).tolist() == [128] * 4
    holed = replace(SMALL, routing="W5_zero_expert_rank")
    assert len(set(placement(holed))) == 3
    assert len(set(rank_tokens(replace(SMALL, routing="W4_ragged_sources")))) > 1
    own = replace(SMALL, routing="own_rank")
    for rank, idx in enumerate(topk_indices(own, make_world(own), 0)):
        assert (idx // 2 == rank).all()
    rotating = replace(SMALL, routing="W6_rotating_hot")
    hottest = [
        int(torch.cat(topk_indices(rotating, make_world(rotating), step)).flatten().mode()[0])
        for step in (0, 1)
    ]
    assert hottest[1] == (hottest[0] + 1) % 8
    empty = replace(SMALL, empty=1.0)
    assert all((idx == -1).all() for idx in topk_indices(empty, make_world(empty), 0))


@pytest.mark.parametrize(
    ("capacity", "dropped"), [("none", 0), ("full", 0), ("one_over", 1), ("far_over", 1)]
)
def test_capacities_do_what_they_say(capacity: str, dropped: int) -> None:
    case = replace(SMALL, capacity=capacity, alignment=1)
    world = make_world(case)
    plan = make_plan(world, topk_indices(case, world, 0))
    assert (sum(int(p.dropped.sum()) for p in plan.ranks) > 0) == bool(dropped)
    if capacity == "full":
        assert max(int(p.padded_counts.sum()) for p in plan.ranks) == world.capacity_rows
