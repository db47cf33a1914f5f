"""The window of one-sided dispatchers: what `memory_plan` says is what is mapped, and it keeps to its budget."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from pathlib import Path

import pytest

import flexep
from flexep.errors import ArgumentError
from flexep.testing.case import Case
from flexep.testing.inputs import make_world
from flexep.testing.pool import RankPool
from flexep.testing.windows import ring_bytes_of_a_token, worst_case
from flexep.testing.worker import RankContext

ONE_SIDED = ("deepep", "hybridep")
CASE = Case(ranks=4, experts=6, hidden=256, top_k=3, tokens=1000, domain_size=2)


def mapped_windows() -> dict[str, int]:
    """{inode: bytes} of the windows that this process has mapped."""
    found: dict[str, int] = {}
    for line in Path("/proc/self/maps").read_text().splitlines():
        if "/memfd:flexep-window" in line:
            span, _, _, _, inode, *_ = line.split()
            begin, end = (int(address, 16) for address in span.split("-"))
            found[inode] = found.get(inode, 0) + end - begin
    return found


def dispatcher(group: flexep.Group, case: Case, window_bytes: int | None) -> flexep.Dispatcher:
    return flexep.Dispatcher(
        group, num_experts=case.experts, hidden=case.hidden, top_k=case.top_k, max_tokens=case.tokens,
        backend=case.dispatcher, domain_size=case.domain_size, window_bytes=window_bytes, timeout=60.0,
    )  # fmt: skip


def planned_and_mapped(
    ctx: RankContext, backend: str, window_bytes: int | None
) -> tuple[int, list[int], int]:
    case = Case(**{**vars(CASE), "dispatcher": backend})
    before = mapped_windows()
    with dispatcher(ctx.group, case, window_bytes) as ep:
        planned = ep.memory_plan().window_bytes
        mapped = [size for inode, size in mapped_windows().items() if inode not in before]
    return planned, mapped, len(mapped_windows()) - len(before)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4, timeout=120) as ranks:
        yield ranks


@pytest.mark.parametrize("window_bytes", [None, 1 << 20])
@pytest.mark.parametrize("backend", ONE_SIDED)
def test_the_plan_is_what_every_rank_maps(pool: RankPool, backend: str, window_bytes: int | None) -> None:
    """One window a rank, mapped by all ranks, and gone with the dispatcher."""
    for planned, mapped, left in pool.run(planned_and_mapped, backend, window_bytes):
        pages = -(-planned // mmap.PAGESIZE) * mmap.PAGESIZE
        assert mapped == [pages] * 4
        assert left == 0


@pytest.mark.parametrize("size", [None, 4, 2])
@pytest.mark.parametrize("backend", ONE_SIDED)
def test_rings_keep_to_a_tenth_of_the_worst_case(backend: str, size: int | None) -> None:
    """Rings that hold every token in one chunk are the worst case; a tenth of it as the budget is nearly used."""
    case = Case(**{**vars(CASE), "ranks": 8, "dispatcher": backend, "domain_size": size})
    world = make_world(case)
    pull, push = ring_bytes_of_a_token(case, world)
    least, everything = 2 * max(pull, push), 2 * max(pull, push) * case.tokens

    def planned(budget: int) -> int:
        with dispatcher(flexep.Group.local(8), case, budget) as ep:
            return ep.memory_plan().window_bytes

    in_rings = sum(least // 2 // of_a_token * of_a_token for of_a_token in (pull, push))
    beside = planned(least) - in_rings  # words, board and records, which no budget changes
    worst = worst_case(case, world)
    assert planned(everything) - beside == worst
    assert 0.08 * worst < planned(worst // 10) - beside <= worst // 10
    assert planned(worst // 10) < 0.2 * planned(everything)


@pytest.mark.parametrize("backend", ONE_SIDED)
def test_a_budget_below_one_token_a_chunk_is_refused_with_what_is_needed(backend: str) -> None:
    case = Case(**{**vars(CASE), "dispatcher": backend})
    needed = 2 * max(ring_bytes_of_a_token(case, make_world(case)))
    group = flexep.Group.local(4)
    dispatcher(group, case, needed).destroy()
    with pytest.raises(ArgumentError, match=f"at least {needed} bytes"):
        dispatcher(group, case, needed - 1)


def test_collectives_have_no_window_and_take_any_budget() -> None:
    for backend in ("allgather", "alltoall"):
        case = Case(**{**vars(CASE), "dispatcher": backend})
        with dispatcher(flexep.Group.local(4), case, 1) as ep:
            assert ep.memory_plan().window_bytes == 0
