"""The all-gather between CPU processes: everybody's rows in rank order, and a late rank by its number."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import flexep
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from flexep.transport.collectives import make_collectives

R = 3


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(R) as ranks:
        yield ranks


def rows_of(rank: int, rows: int, columns: int) -> torch.Tensor:
    return (torch.arange(rows * columns).view(rows, columns) * 7 + rank).to(torch.bfloat16)


def gathers(ctx: RankContext, rows: int, columns: int) -> tuple[bool, int]:
    collectives = make_collectives(ctx.group, 30.0)
    for _ in range(3):  # messages of one round must not reach the next
        (out,) = collectives.all_gather([rows_of(ctx.rank, rows, columns)], "test")
    want = torch.cat([rows_of(rank, rows, columns) for rank in range(ctx.size)])
    return torch.equal(out, want), collectives.traffic["test"].remote_bytes


@pytest.mark.parametrize(("rows", "columns"), [(0, 8), (1, 8), (37, 24), (1024, 1024)])
def test_rows_of_all_ranks_in_order(pool: RankPool, rows: int, columns: int) -> None:
    assert pool.run(gathers, rows, columns) == [(True, 3 * rows * columns * 2 * (R - 1))] * R


def waits_for_one(ctx: RankContext, path: str, late: int) -> tuple[str, tuple[int, ...]]:
    group = flexep.Group.from_store(dist.FileStore(path, ctx.size), ctx.rank, ctx.size)
    collectives = make_collectives(group, 1.0)
    mine = [rows_of(ctx.rank, 4, 8)]
    collectives.all_gather(mine, "test")
    if ctx.rank == late:
        time.sleep(2.5)
    try:
        collectives.all_gather(mine, "test")
    except flexep.Timeout as error:
        return str(error), error.awaited_ranks
    except flexep.PeerLost as error:
        return str(error), ()
    finally:
        group.close()
    return "", ()


@pytest.mark.parametrize("late", [0, 2])
def test_a_late_rank_is_named(late: int, tmp_path) -> None:
    with RankPool(R) as ranks:
        seen = ranks.run(waits_for_one, str(tmp_path / "store"), late)
    on_time = [seen[rank] for rank in range(R) if rank != late]
    assert all(text for text, _ in seen)
    # The first to give up breaks the connections of the others, who may then know no more than that.
    assert (late,) in [named for _, named in on_time]
    assert all(named in ((late,), ()) for _, named in on_time)
