"""What `backend="auto"` becomes: deepep where windows open on every rank, alltoall on all ranks where they do not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch.distributed import HashStore

import flexep
from flexep.dispatchers.auto import first_choice
from flexep.errors import PeerRefused, Unavailable
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from flexep.transport import window_memory

SHAPE: dict[str, Any] = {"num_experts": 5, "hidden": 16, "top_k": 2, "max_tokens": 7, "timeout": 30.0}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=120) as ranks:
        yield ranks


def short_of_memory(*_: object) -> int:
    raise Unavailable("no memory for a window here")


def choose(ctx: RankContext, short: tuple[int, ...]) -> tuple[str, torch.Tensor]:
    """What "auto" becomes where the ranks `short` cannot reserve a window, and z of one round."""
    generator = torch.Generator().manual_seed(ctx.rank)
    x = torch.randn(7, 16, generator=generator).bfloat16()
    idx = torch.randint(0, 5, (7, 2), generator=generator)
    reserve = short_of_memory if ctx.rank in short else window_memory.reserve_memfd
    with (
        mock.patch.object(window_memory, "reserve_memfd", reserve),
        flexep.Dispatcher(ctx.group, backend="auto", **SHAPE) as ep,
    ):
        r = ep.dispatch(x, idx)
        assert ep.config.backend in repr(r.handle)
        return ep.config.backend, ep.combine(r.x, r.handle)


def refused(ctx: RankContext, backend: str) -> type[Exception]:
    reserve = short_of_memory if ctx.rank == 1 else window_memory.reserve_memfd
    with (
        mock.patch.object(window_memory, "reserve_memfd", reserve),
        pytest.raises(flexep.FlexEPError) as caught,
    ):
        flexep.Dispatcher(ctx.group, backend=backend, **SHAPE)
    return caught.type


def test_processes_of_one_host_get_deepep(pool: RankPool) -> None:
    assert [name for name, _ in pool.run(choose, ())] == ["deepep"] * 3


@pytest.mark.parametrize("short", [(1,), (0, 2), (0, 1, 2)])
def test_all_ranks_fall_back_where_one_cannot_and_no_bit_changes(
    pool: RankPool, short: tuple[int, ...]
) -> None:
    found, usual = pool.run(choose, short), pool.run(choose, ())
    assert [name for name, _ in found] == ["alltoall"] * 3
    for (_, z), (_, same) in zip(found, usual, strict=True):
        assert torch.equal(z, same)
        assert z.any()


def test_who_asks_for_windows_is_told(pool: RankPool) -> None:
    assert pool.run(refused, "deepep") == [PeerRefused, Unavailable, PeerRefused]
    assert pool.run(choose, ())[0][0] == "deepep"  # and the group still works


def test_a_local_group_gets_deepep() -> None:
    with flexep.Dispatcher(flexep.Group.local(2), **SHAPE) as ep:
        assert ep.config.backend == "deepep"
        assert ep.memory_plan().window_bytes > 0


@pytest.mark.parametrize(
    ("switch", "between", "within"), [("0", "alltoall", "alltoall"), ("1", "deepep", "alltoall")]
)
def test_gpu_processes_try_windows_where_that_is_switched_on(
    monkeypatch: pytest.MonkeyPatch, switch: str, between: str, within: str
) -> None:
    monkeypatch.setenv("FLEXEP_PEER", switch)
    store = HashStore()
    assert first_choice(flexep.Group.from_store(store, 0, 2, device="cuda:0")) == between
    assert first_choice(flexep.Group.local(2, "cuda")) == within
    assert first_choice(flexep.Group.from_store(store, 0, 2)) == "deepep"


def test_zero_copy_does_not_fall_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_memory, "require_free", short_of_memory)
    with flexep.Dispatcher(flexep.Group.local(2), **SHAPE) as ep:
        assert ep.config.backend == "alltoall"
    with pytest.raises(Unavailable, match="no memory"):
        flexep.Dispatcher(flexep.Group.local(2), zero_copy=True, **SHAPE)
