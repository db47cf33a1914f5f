"""Windows of ranks that are processes: one memory under every rank's address, refusals that all hear, no leaks.

On the CPU and, with a fake driver, on GPUs: who opens them is the same text.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from flexep.errors import ArgumentError, CollectiveMismatch, FlexEPError, PeerRefused, Unavailable
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from flexep.transport import _opening
from flexep.transport.window_memory import open_windows
from tests.transport.fake_driver import reached_by
from tests.transport.held import Held, held, window_mappings

R = 3
NBYTES = 3 * 4096 + 128  # no whole number of pages
TIMEOUT = 20.0


both = pytest.mark.parametrize("transport", ["shm", "peer"])


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(R, timeout=60) as ranks:
        yield ranks


def caught(call: Callable[[], object]) -> Exception | None:
    try:
        call()
    except FlexEPError as error:
        return error
    return None


def every_rank_writes_everywhere(
    ctx: RankContext, transport: str
) -> tuple[str, bool, bool, list[list[int]], int]:
    opened = open_windows(reached_by(transport, ctx.group), NBYTES, TIMEOUT)
    zeroed = not any(opened.view(rank).any() for rank in range(ctx.size))
    aligned = all(address % 4096 == 0 for address in opened.addresses)
    ctx.group.barrier(TIMEOUT)
    for rank in range(ctx.size):
        opened.view(rank)[ctx.rank] = 1 + 10 * ctx.rank + rank
        ctypes.memset(opened.addresses[rank] + NBYTES - 1 - ctx.rank, 200 + ctx.rank, 1)
    ctx.group.barrier(TIMEOUT)
    last = NBYTES - ctx.size
    seen = [
        [*opened.view(rank)[: ctx.size].tolist(), *opened.view(rank)[last:].tolist()] for rank in range(R)
    ]
    opened.close()
    return opened.name, zeroed, aligned, seen, window_mappings()


@both
def test_every_rank_reaches_every_window(pool: RankPool, transport: str) -> None:
    ends = [200 + rank for rank in reversed(range(R))]
    want = [[1 + 10 * writer + rank for writer in range(R)] + ends for rank in range(R)]
    found = pool.run(every_rank_writes_everywhere, transport)
    assert found == [(transport, True, True, want, 0)] * R


def reads_after_peers_closed(ctx: RankContext, transport: str) -> tuple[int, int]:
    opened = open_windows(reached_by(transport, ctx.group), NBYTES, TIMEOUT)
    opened.view(ctx.rank)[:] = ctx.rank + 1
    ctx.group.barrier(TIMEOUT)
    left = opened.view((ctx.rank + 1) % ctx.size)
    opened.close()
    ctx.group.barrier(TIMEOUT)
    return int(left.sum()), window_mappings()


@both
def test_a_peer_that_closes_takes_no_memory_away(pool: RankPool, transport: str) -> None:
    assert pool.run(reads_after_peers_closed, transport) == [
        (((r + 1) % R + 1) * NBYTES, 1) for r in range(R)
    ]


def opens_many_times(ctx: RankContext, transport: str, times: int) -> tuple[Held, Held, bool]:
    fresh = True
    group = reached_by(transport, ctx.group)

    def once() -> None:
        nonlocal fresh
        opened = open_windows(group, 1 << 20, TIMEOUT)
        fresh &= not any(opened.view(rank).any() for rank in range(ctx.size))
        ctx.group.barrier(TIMEOUT)
        opened.view(ctx.rank)[:] = 1
        opened.close()

    for _ in range(10):
        once()
    before = held()
    for _ in range(times):
        once()
    return before, held(), fresh


@both
def test_opening_and_closing_leaks_nothing(pool: RankPool, transport: str) -> None:
    for before, after, fresh in pool.run(opens_many_times, transport, 200):
        assert after.descriptors == before.descriptors
        assert abs(after.mappings - before.mappings) <= 2  # the C library may map or unmap a heap of its own
        assert (
            after.resident - before.resident < 8 << 20
        )  # one leaked window of three would be 200 MiB and more
        assert fresh


def opens(
    ctx: RankContext, transport: str, nbytes: list[int], layouts: Sequence[str] = ("",) * R
) -> tuple[Exception | None, int, int]:
    """The error; descriptors gained; windows still mapped."""
    group = reached_by(transport, ctx.group)
    ctx.group.barrier(TIMEOUT)
    before = held().descriptors
    error = caught(lambda: open_windows(group, nbytes[ctx.rank], TIMEOUT, layouts[ctx.rank]))
    return error, held().descriptors - before, window_mappings()


def works(pool: RankPool, transport: str = "shm") -> bool:
    return [error for error, *_ in pool.run(opens, transport, [NBYTES] * R)] == [None] * R


@both
def test_layouts_that_differ_are_named_on_every_rank(pool: RankPool, transport: str) -> None:
    for error, descriptors, mapped in pool.run(opens, transport, [NBYTES] * R, ["two", "two", "three"]):
        assert isinstance(error, CollectiveMismatch)
        assert error.differences == {"layout": {"two": [0, 1], "three": [2]}}
        assert (descriptors, mapped) == (0, 0)


@both
def test_sizes_that_differ_are_named_on_every_rank(pool: RankPool, transport: str) -> None:
    for error, descriptors, mapped in pool.run(opens, transport, [NBYTES, 2 * NBYTES, NBYTES]):
        assert isinstance(error, CollectiveMismatch)
        assert error.differences == {"nbytes": {str(NBYTES): [0, 2], str(2 * NBYTES): [1]}}
        assert (descriptors, mapped) == (0, 0)
    assert works(pool, transport)


@both
def test_a_size_that_one_rank_gets_wrong_is_refused_on_all(pool: RankPool, transport: str) -> None:
    results = pool.run(opens, transport, [NBYTES, NBYTES, 0])
    assert isinstance(results[2][0], ArgumentError)
    for rank in (0, 1):
        assert isinstance(results[rank][0], PeerRefused)
        assert "nbytes = 0" in results[rank][0].refused[2]
    assert works(pool, transport)


def test_more_than_the_host_has_is_refused_before_anybody_reserves(pool: RankPool) -> None:
    for error, descriptors, mapped in pool.run(opens, "shm", [1 << 50] * R):
        assert isinstance(error, Unavailable)
        assert f"{R} windows of {1 << 50} bytes" in str(error)
        assert (descriptors, mapped) == (0, 0)
    assert works(pool)


def opens_where_one_cannot_reserve(ctx: RankContext) -> tuple[Exception | None, int, int]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (NBYTES // 2, limits[1]))
    try:
        return opens(ctx, "shm", [NBYTES] * ctx.size)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_shortage_on_one_rank_is_heard_by_all(pool: RankPool) -> None:
    results = pool.run(opens_where_one_cannot_reserve)
    assert isinstance(results[1][0], Unavailable)
    assert f"cannot reserve a window of {NBYTES} bytes" in str(results[1][0])
    assert "free: " in str(results[1][0])
    for rank in (0, 2):
        assert isinstance(results[rank][0], PeerRefused)
        assert list(results[rank][0].refused) == [1]
    assert [(descriptors, mapped) for _, descriptors, mapped in results] == [(0, 0)] * R
    assert works(pool)


def address_space() -> int:
    """Bytes of it that this process has mapped."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def opens_where_one_cannot_map(ctx: RankContext) -> tuple[Exception | None, int, int]:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if ctx.rank == 2:
        mapped = address_space()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + (100 << 20), limits[1]))
    try:
        return opens(ctx, "shm", [80 << 20] * ctx.size)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def test_a_mapping_that_fails_on_one_rank_is_heard_by_all(pool: RankPool) -> None:
    results = pool.run(opens_where_one_cannot_map)
    assert isinstance(results[2][0], Unavailable)
    assert "cannot map" in str(results[2][0])
    assert all(isinstance(results[rank][0], PeerRefused) for rank in (0, 1))
    assert [(descriptors, mapped) for _, descriptors, mapped in results] == [(0, 0)] * R
    assert works(pool)


def opens_elsewhere(ctx: RankContext, transport: str, field: int) -> Exception | None:
    """Rank 1 believes it lives on another host (0) or in another network namespace (1)."""
    real, identity = _opening.host_identity, _opening.host_identity()
    identity[field] += " elsewhere"
    if ctx.rank == 1:
        _opening.host_identity = lambda: identity
    try:
        return caught(lambda: open_windows(reached_by(transport, ctx.group), NBYTES, TIMEOUT))
    finally:
        _opening.host_identity = real


@both
@pytest.mark.parametrize(("field", "where"), [(0, "another host"), (1, "another network namespace")])
def test_ranks_out_of_reach_are_named(pool: RankPool, transport: str, field: int, where: str) -> None:
    errors = pool.run(opens_elsewhere, transport, field)
    assert all(isinstance(error, Unavailable) for error in errors)
    named = [f"ranks {ranks} run {'on' if field == 0 else 'in'} {where}" for ranks in ([1], [0, 2], [1])]
    assert all(
        text in str(error) and "alltoall" in str(error) for text, error in zip(named, errors, strict=True)
    )
    assert works(pool, transport)


def marks_its_windows(ctx: RankContext, transport: str, mark: int) -> list[list[int]]:
    found = []
    group = reached_by(transport, ctx.group)
    for turn in range(20):
        opened = open_windows(group, NBYTES, TIMEOUT)
        opened.view((ctx.rank + 1) % ctx.size)[:] = mark + turn
        ctx.group.barrier(TIMEOUT)
        found.append([int(opened.view(rank).min()) - turn for rank in range(ctx.size)])
        ctx.group.barrier(TIMEOUT)
        opened.close()
    return found


@both
def test_two_jobs_at_once_do_not_collide(pool: RankPool, transport: str) -> None:
    out: dict[int, list] = {}
    with RankPool(2) as other:
        jobs = [
            threading.Thread(
                target=lambda p=p, mark=mark: out.update({mark: p.run(marks_its_windows, transport, mark)})
            )
            for mark, p in ((10, pool), (100, other))
        ]
        for job in jobs:
            job.start()
        for job in jobs:
            job.join(60)
    assert out == {10: [[[10] * R] * 20] * R, 100: [[[100] * 2] * 20] * 2}


def forks(ctx: RankContext) -> tuple[int, int, int]:
    """A child writes into the inherited windows, closes them and ends; the parent's stay."""
    opened = open_windows(ctx.group, NBYTES, TIMEOUT)
    child = os.fork()
    if child == 0:
        opened.view(ctx.rank)[:] = 5
        opened.close()
        os._exit(0 if window_mappings() == 0 else 1)
    status = os.waitpid(child, 0)[1]
    ctx.group.barrier(TIMEOUT)
    seen = min(int(opened.view(rank).min()) for rank in range(ctx.size))
    ctx.group.barrier(TIMEOUT)
    return status, seen, window_mappings()


def test_a_forked_child_does_no_harm(pool: RankPool) -> None:
    assert pool.run(forks) == [(0, 5, R)] * R
