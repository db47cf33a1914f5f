"""The baselines that need GPUs do the same work as everybody, shown on stand-ins that move the same rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from flexep.benchmark import rank
from flexep.benchmark.baselines import BY_COLUMN, LIBRARIES, REFERENCE
from flexep.benchmark.case import BASELINES, BenchCase
from flexep.benchmark.copy_engine import crossing_bytes, hops
from flexep.benchmark.deep_ep_elastic import expert_order, flat_order
from flexep.benchmark.library import Column
from flexep.benchmark.symm_mem_baseline import kept_rows
from flexep.testing.pool import RankPool
from tests.bench import fakes

SMALL = BenchCase(ranks=2, tokens=12, hidden=256, experts=6, top_k=2, alignment=4)
SYMM_MEM = ("symm_mem", "all_to_all_vdev_2d")
BUFFER, ELASTIC = ("deep_ep", "Buffer"), ("deep_ep", "ElasticBuffer")


def fake_libraries(folder: str) -> None:
    fakes.symmetric_memory()
    fakes.deep_ep()
    fakes.shared_inboxes(folder)


@pytest.fixture(scope="module")
def pools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, RankPool]]:
    """Two and three ranks that have everything."""
    folders = {ranks: str(tmp_path_factory.mktemp(f"of-{ranks}")) for ranks in (2, 3)}
    made = {ranks: RankPool(ranks, setup=partial(fake_libraries, where)) for ranks, where in folders.items()}
    yield made
    for pool in made.values():
        pool.close()


def measured(
    case: BenchCase, column: Column, pools: dict[int, RankPool]
) -> list[dict[str, tuple[float, float]]]:
    """Bytes by message of every rank, after all checks passed."""
    pool = pools[case.ranks]
    pool.run(rank.start, case)
    pool.run(rank.call, "open", column)
    assert pool.run(rank.call, "check", column) == [[]] * case.ranks
    for _, wrong in pool.run(rank.call, "chain", column, case.steps + 2):
        assert wrong == []
    sent = pool.run(rank.call, "sent", column)
    pool.run(rank.call, "close")
    return sent


@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, weights="combine", fresh=False, routing="W6"),
        replace(SMALL, tokens=3, experts=8, dtype="fp32"),  # experts without rows
    ],
    ids=["fresh", "cached", "gaps"],
)
def test_symm_mem_is_right_and_sends_a_row_a_slot(pools: dict[int, RankPool], case: BenchCase) -> None:
    sent = measured(case, SYMM_MEM, pools)
    row = case.hidden * case.world.dtype.itemsize
    for one in sent:
        assert one["dispatch.rows"] == one["combine.rows"]
        assert one["dispatch.rows"][1] == case.tokens * case.top_k * row


@pytest.mark.parametrize("column", [BUFFER, ELASTIC], ids=lambda column: column[1])
@pytest.mark.parametrize(
    "case",
    [
        SMALL,
        replace(SMALL, fresh=False, routing="W6"),
        replace(SMALL, layout="flat", mode="capacity"),
        replace(SMALL, mode="capacity", capacity=4.0, tokens=3, experts=8),
    ],
    ids=["fresh", "cached", "flat", "no wait"],
)
def test_deep_ep_is_right_and_sends_a_row_a_rank(
    pools: dict[int, RankPool], column: Column, case: BenchCase
) -> None:
    sent = measured(case, column, pools)
    want = sum(map(sum, crossing_bytes(case, 0)))
    if case.steps == 1:
        assert sum(one["dispatch.rows"][0] for one in sent) == want
    assert all(one["dispatch.rows"] == one["combine.rows"] for one in sent)


@pytest.mark.parametrize("routing", ["uniform", "next_rank", "W4", "W6"])
def test_the_copy_engine_moves_the_bytes_that_must_cross(pools: dict[int, RankPool], routing: str) -> None:
    case = replace(SMALL, ranks=3, routing=routing)
    sent = measured(case, REFERENCE, pools)
    want = [crossing_bytes(case, step) for step in range(case.steps)]
    for r, one in enumerate(sent):
        assert one["dispatch.bytes"][0] == sum(sum(bytes_RR[r]) for bytes_RR in want) / case.steps
        assert one["combine.bytes"][0] == sum(each[r] for bytes_RR in want for each in bytes_RR) / case.steps


def test_bytes_that_land_elsewhere_are_found(tmp_path: Path) -> None:
    with RankPool(2, setup=partial(fakes.shared_inboxes, str(tmp_path), 7)) as pool:
        pool.run(rank.start, SMALL)
        pool.run(rank.call, "open", REFERENCE)
        for found in pool.run(rank.call, "check", REFERENCE):
            assert "bytes are not the sender's" in found[0]


def test_routings_that_stay_and_that_leave() -> None:
    row = SMALL.hidden * 2
    assert crossing_bytes(replace(SMALL, routing="own_rank"), 0) == [[0, 0], [0, 0]]
    assert crossing_bytes(replace(SMALL, routing="next_rank"), 0) == [[0, 12 * row], [12 * row, 0]]


def test_every_rank_starts_with_the_next() -> None:
    assert [hops(rank, 4) for rank in range(4)] == [[1, 2, 3], [2, 3, 0], [3, 0, 1], [0, 1, 2]]


def test_gaps_of_empty_experts_are_left_out() -> None:
    assert kept_rows([[2, 1], [1, 1]]) == (5, None)
    assert kept_rows([[0, 0], [1, 1], [0, 0]]) == (4, [1, 2])


def test_orders_of_rows_that_come_in_any() -> None:
    assert flat_order(torch.tensor([7, 0, 4])).tolist() == [1, 2, 0]
    source, slots = torch.tensor([9, 1, 4]), torch.tensor([[0, 4], [1, -1], [5, -1]])
    # Expert 0 has rows 0 and 1 of 4, expert 1 has rows 4 and 5; expert 2 has none.
    got = expert_order(source, slots, torch.tensor([2, 2, 0]), 4)
    assert got.tolist() == [1, 0, 2, 3, 5, 4, 6, 7]


@pytest.mark.parametrize(
    ("column", "change", "said"),
    [
        (SYMM_MEM, {"experts": 34}, "17 experts a rank: all_to_all_vdev_2d takes at most 16"),
        (SYMM_MEM, {"experts": 7}, "it needs as many experts on every rank"),
        (SYMM_MEM, {"routing": "W5"}, "it needs as many experts on every rank"),
        (BUFFER, {"ranks": 3}, "3 ranks: on one host it takes 2, 4, 8"),
        (BUFFER, {"hidden": 8192}, "hidden 8192: it takes at most 8176"),
        (ELASTIC, {"hidden": 64}, "hidden 64: it combines multiples of 256"),
        (ELASTIC, {"dtype": "fp32"}, "it combines bf16, not fp32"),
        (BUFFER, {"weights": "combine"}, "its combine multiplies no weights"),
        (REFERENCE, {"ranks": 1}, "one rank has no peer"),
    ],
)
def test_what_a_library_does_not_do_is_said(column: Column, change: dict, said: str) -> None:
    assert BY_COLUMN[column].why_not(replace(SMALL, **change)) == said


def test_every_baseline_has_its_classes() -> None:
    assert tuple(LIBRARIES) == BASELINES
    assert all(LIBRARIES.values())
