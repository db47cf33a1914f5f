"""Rank pools: results by rank, errors that name their rank, nothing left behind."""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

from flexep.errors import FlexEPError
from flexep.testing.pool import RankFailed, RankPool
from flexep.testing.worker import RankContext, RankStart


def add_up(ctx: RankContext, term: int) -> int:
    value = torch.tensor([ctx.rank + term])
    dist.all_reduce(value)
    return int(value)


def where(ctx: RankContext) -> tuple[int, int, int]:
    return ctx.rank, os.getpid(), torch.get_num_threads()


def fail_on_one(ctx: RankContext) -> None:
    if ctx.rank == 1:
        raise ValueError("one is not welcome")


def die_on_one(ctx: RankContext) -> None:
    if ctx.rank == 1:
        os._exit(3)
    time.sleep(60)


def stuck_on_one(ctx: RankContext) -> None:
    if ctx.rank == 1:
        time.sleep(60)


def own_argument(ctx: RankContext, value: str) -> tuple[int, str]:
    return ctx.rank, value


def plant_mark() -> None:
    os.environ["FLEXEP_TEST_MARK"] = "planted"


def read_mark(ctx: RankContext) -> str | None:
    return os.environ.get("FLEXEP_TEST_MARK")


def gone(pid: int) -> bool:
    for _ in range(100):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_results_come_back_by_rank_and_the_pool_lives_on_after_an_error() -> None:
    with RankPool(2) as pool:
        assert pool.run(add_up, 10) == [21, 21]
        seen = pool.run(where)
        assert [(rank, threads) for rank, _, threads in seen] == [(0, 1), (1, 1)]
        assert pool.run_each(own_argument, [("a",), ("b",)]) == [(0, "a"), (1, "b")]
        with pytest.raises(RankFailed, match="rank 1: ValueError: one is not welcome") as caught:
            pool.run(fail_on_one)
        assert list(caught.value.errors) == [1]
        assert isinstance(caught.value.__cause__, ValueError)
        assert pool.run(add_up, 0) == [1, 1]
    pool.close()
    assert all(gone(pid) for _, pid, _ in seen)
    with pytest.raises(FlexEPError, match="closed"):
        pool.run(where)


@pytest.mark.parametrize("fault", [die_on_one, stuck_on_one])
def test_a_lost_or_stuck_rank_ends_the_pool_in_bounded_time(fault) -> None:
    pool = RankPool(2, setup=plant_mark)
    assert pool.run(read_mark) == ["planted"] * 2
    pids = [pid for _, pid, _ in pool.run(where)]
    started = time.monotonic()
    with pytest.raises(RankFailed, match=r"ranks \[[01]\]"):
        pool.run(fault, timeout=2)
    assert time.monotonic() - started < 10
    assert not pool.alive
    assert all(gone(pid) for pid in pids)


def test_pools_side_by_side_do_not_meet() -> None:
    with RankPool(1) as one, RankPool(2) as two:
        assert one.run(add_up, 0) == [0]
        assert two.run(add_up, 0) == [1, 1]
        assert one.run(read_mark) == [None]


def read_variable(ctx: RankContext, name: str) -> str | None:
    return os.environ.get(name)


def test_ranks_start_with_the_environment_of_their_pool() -> None:
    with RankPool(1, environment={"FLEXEP_TEST_MARK": "of this pool"}) as pool, RankPool(1) as other:
        assert pool.run(read_variable, "FLEXEP_TEST_MARK") == ["of this pool"]
        assert other.run(read_variable, "FLEXEP_TEST_MARK") == [None]


@pytest.mark.parametrize(
    ("size", "gpus", "places"),
    [(2, None, [0, 1]), (8, 2, [0, 0, 0, 0, 1, 1, 1, 1]), (4, 1, [0] * 4), (3, 2, [0, 0, 1]), (2, 2, [0, 1])],
)
def test_neighbouring_ranks_share_a_gpu(size: int, gpus: int | None, places: list[int]) -> None:
    starts = [RankStart(rank, size, "cuda", "", 1.0, gpus, {}, None) for rank in range(size)]
    assert [start.place for start in starts] == [torch.device("cuda", place) for place in places]
    assert RankStart(1, 2, "cpu", "", 1.0, None, {}, None).place == torch.device("cpu")


def meet(ctx: RankContext) -> list[int]:
    """Ranks that may share GPUs meet at a store; here they have none, and it is the store alone that is tried."""
    ctx.device = torch.device("cpu")
    return [int.from_bytes(said, "little") for said in ctx.group.all_gather(bytes([10 + ctx.rank]))]


def test_ranks_that_may_share_gpus_meet_at_a_store() -> None:
    with RankPool(2, gpus=1) as pool:
        assert pool.run(meet) == [[10, 11]] * 2
