"""Group: who is there, a bounded all-gather of bytes, names of late ranks, teardown."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

import flexep
from flexep.group import _await_completion
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext


def on_ranks(size: int, store: dist.Store, call, generation: int = 0) -> list:
    """call(group) on `size` threads that share a store; results or exceptions in rank order."""
    out: list = [None] * size

    def run(rank: int) -> None:
        try:
            out[rank] = call(flexep.Group.from_store(store, rank, size, generation))
        except Exception as error:
            out[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return out


def test_a_store_group_gathers_bytes_of_any_length_many_times() -> None:
    def call(group: flexep.Group) -> list[list[bytes]]:
        return [group.all_gather(b"x" * (group.rank * 100 + turn), timeout=10) for turn in range(20)]

    want = [[b"x" * (rank * 100 + turn) for rank in range(3)] for turn in range(20)]
    assert on_ranks(3, dist.HashStore(), call) == [want] * 3


def test_rounds_leave_no_growing_pile_of_keys_behind() -> None:
    store = dist.HashStore()

    def call(group: flexep.Group) -> None:
        for _ in range(50):
            group.barrier(10)

    on_ranks(2, store, call)
    assert store.num_keys() <= 2 * 3


def test_a_rank_that_never_comes_is_named_in_bounded_time() -> None:
    def call(group: flexep.Group) -> None:
        if group.rank != 1:
            group.all_gather(b"", timeout=1.0)

    started = time.monotonic()
    errors = on_ranks(3, dist.HashStore(), call)
    assert time.monotonic() - started < 10
    for rank in (0, 2):
        assert isinstance(errors[rank], flexep.Timeout)
        assert (errors[rank].op, errors[rank].waiting_rank) == ("all_gather", rank)
        assert errors[rank].awaited_ranks == (1,)
        assert "for rank 1" in str(errors[rank])


def test_a_higher_generation_does_not_meet_what_the_last_one_left() -> None:
    store = dist.HashStore()

    def forgotten(group: flexep.Group) -> None:
        if group.rank == 0:
            with pytest.raises(flexep.Timeout):
                group.all_gather(b"old", timeout=0.2)

    on_ranks(2, store, forgotten)
    assert on_ranks(2, store, lambda g: g.all_gather(b"new", timeout=10), generation=1) == [[b"new"] * 2] * 2


def test_local_group() -> None:
    group = flexep.Group.local(3)
    assert (group.rank, group.size, group.hosted, group.is_local) == (0, 3, (0, 1, 2), True)
    assert group.all_gather(b"a") == [b"a"] * 3
    with pytest.raises(flexep.Unavailable, match="plain copies"):
        group.process_group(1.0)
    group.close()


@pytest.mark.parametrize(
    ("make", "argument", "value"),
    [
        (lambda: flexep.Group.local(0), "size", 0),
        (lambda: flexep.Group.local(2.5), "size", 2.5),
        (lambda: flexep.Group.local(2, "tpu"), "device", "tpu"),
        (lambda: flexep.Group.local(2, "meta"), "device", "meta"),
        (lambda: flexep.Group.from_store(dist.HashStore(), 0, 0), "size", 0),
        (lambda: flexep.Group.from_store(dist.HashStore(), 0.5, 2), "rank", 0.5),
        (lambda: flexep.Group.from_store(dist.HashStore(), 2, 2), "rank", 2),
    ],
)
def test_bad_sizes_are_named(make, argument: str, value: int) -> None:
    with pytest.raises(flexep.ArgumentError) as caught:
        make()
    assert (caught.value.argument, caught.value.value) == (argument, value)


def test_without_torch_distributed_the_error_says_what_to_do() -> None:
    assert not dist.is_initialized()
    with pytest.raises(flexep.Unavailable, match=r"Group\.local"):
        flexep.Group.from_process_group()


def gathers(ctx: RankContext) -> list[bytes]:
    return ctx.group.all_gather(bytes(range(ctx.rank * 3)), timeout=20)


def test_a_process_group_gathers_bytes_of_unequal_length() -> None:
    with RankPool(3) as pool:
        assert pool.run(gathers) == [[b"", bytes(range(3)), bytes(range(6))]] * 3


class DeviceWork:
    """A collective on a device that has run once it has been asked `looks` times."""

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def is_completed(self) -> bool:
        self.looks -= 1
        return self.looks < 0


def test_a_gather_on_a_device_is_awaited_no_longer_than_its_timeout() -> None:
    work = DeviceWork(3)
    _await_completion(work, 1, 20.0)
    assert work.looks == -1
    began = time.monotonic()
    with pytest.raises(flexep.Timeout, match=r"all_gather: rank 1 waited 0\.2 s"):
        _await_completion(DeviceWork(10**9), 1, 0.2)
    assert 0.2 <= time.monotonic() - began < 2
