"""Every routing and option runs in every column and passes its check; all libraries get the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

import flexep
from flexep.benchmark import rank
from flexep.benchmark.case import ROUTING_NAMES, BenchCase
from flexep.benchmark.check import Answers
from flexep.errors import ArgumentError
from flexep.testing.pool import RankPool

TINY = BenchCase(ranks=3, tokens=40, hidden=16, experts=8, top_k=3)
COLUMNS = [*(("flexep", name) for name in flexep.BACKENDS), ("torch", "all_to_all_single")]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(TINY.ranks) as ranks:
        yield ranks


@pytest.mark.parametrize(
    "case",
    [
        *(replace(TINY, routing=name) for name in ROUTING_NAMES),
        replace(TINY, layout="flat"),
        replace(TINY, domain_size=1),
        replace(TINY, weights="combine", dtype="fp32"),
        replace(TINY, mode="capacity", capacity=1.5),
        replace(TINY, mode="capacity", capacity=1.1, routing="hot", alignment=4),
        replace(TINY, fresh=False, routing="W6", weights="combine"),
    ],
    ids=lambda case: (
        f"{case.routing}-{case.layout}-{case.mode}-{case.weights}-{case.fresh}-{case.domain_size}"
    ),
)
def test_every_column_is_right(pool: RankPool, case: BenchCase) -> None:
    pool.run(rank.start, case)
    for column in COLUMNS:
        pool.run(rank.call, "open", column)
        assert pool.run(rank.call, "check", column) == [[]] * case.ranks, column
        for times, wrong in pool.run(rank.call, "chain", column, case.steps + 1):
            assert len(times) == case.steps + 1
            assert wrong == []


def test_cached_plans_send_no_metadata(pool: RankPool) -> None:
    pool.run(rank.start, replace(TINY, fresh=False))
    for column in COLUMNS:
        pool.run(rank.call, "open", column)
        for sent in pool.run(rank.call, "sent", column):
            assert sent["dispatch.rows"][0] > 0
            assert sent.get("dispatch.meta", (0, 0)) == sent.get("dispatch.counts", (0, 0)) == (0, 0)


def test_routing_depends_on_seed_and_rank_alone() -> None:
    first = Answers(TINY, TINY.world, 1, 0)
    same = Answers(TINY, replace(TINY.world, alignment=1), 1, 0)  # what the baseline promises
    assert torch.equal(first.routed.topk_idx, same.routed.topk_idx)
    assert torch.equal(first.routed.x, same.routed.x)
    assert not torch.equal(first.routed.topk_idx, Answers(TINY, TINY.world, 2, 0).routed.topk_idx)
    other = replace(TINY, seed=1)
    assert not torch.equal(first.routed.topk_idx, Answers(other, other.world, 1, 0).routed.topk_idx)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"tokens": 0}, "tokens = 0"),
        ({"routing": "w1"}, "routing = 'w1'"),
        ({"dispatchers": ("alltoall", "smoke")}, "dispatchers = 'smoke'"),
        ({"dispatchers": (), "baselines": ()}, "dispatchers = ()"),
        ({"hidden": 7}, "hidden = 7"),
        ({"top_k": 33}, "top_k = 33"),
        ({"layout": "flat", "weights": "combine"}, "weights = 'combine'"),
        ({"mode": "capacity", "capacity": 0.01}, "capacity = 0.01"),
        ({"time_limit": float("inf")}, "time_limit = inf"),
    ],
)
def test_bad_cases_are_refused_by_value(change: dict, named: str) -> None:
    with pytest.raises(ArgumentError, match=named.replace("(", r"\(").replace(")", r"\)")):
        replace(TINY, **change)
