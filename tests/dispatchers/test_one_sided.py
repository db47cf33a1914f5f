"""What one-sided back ends promise beside the contract: windows of any budget, zero copy, one call at a time."""

from __future__ import annotations

import threading
import time

import pytest
import torch

import flexep
from flexep.config import WINDOWED
from flexep.dispatchers import one_sided
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from flexep.transport._window import OPS
from tests.dispatchers.one_sided_rows import SHAPE, Rows, inputs, round_trip


@pytest.mark.parametrize("backend", WINDOWED)
@pytest.mark.parametrize(("ranks", "domain_size"), [(1, None), (3, None), (4, 2), (6, 3), (6, 2)])
def test_a_small_window_moves_the_same_rows(backend: str, ranks: int, domain_size: int | None) -> None:
    group = flexep.Group.local(ranks)
    x, topk_idx, weights = inputs(ranks)
    whole = flexep.Dispatcher(group, backend=backend, domain_size=domain_size, **SHAPE)
    plain = flexep.Dispatcher(group, backend="alltoall", domain_size=domain_size, **SHAPE)
    want = round_trip(plain, x, topk_idx, weights)
    assert all(torch.equal(a, b) for a, b in zip(round_trip(whole, x, topk_idx, weights), want, strict=True))
    shape = whole._alive().backend.shape
    assert shape.pull_tokens == shape.push_tokens == SHAPE["max_tokens"]
    lines = (1, ranks) if backend == "deepep" or domain_size is None else (
        1 + ranks // domain_size, ranks + ranks // domain_size
    )  # fmt: skip
    for tokens in (4, 1):  # a tenth of max_tokens, and the least
        budget = 2 * max(lines) * shape.slots * tokens * shape.push_row_bytes
        ep = flexep.Dispatcher(group, backend=backend, domain_size=domain_size, window_bytes=budget, **SHAPE)
        assert ep._alive().backend.shape.push_tokens == tokens
        assert ep.memory_plan().window_bytes < whole.memory_plan().window_bytes
        got = round_trip(ep, x, topk_idx, weights)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(flexep.ArgumentError, match=r"window_bytes = .*at least"):
        flexep.Dispatcher(group, backend=backend, domain_size=domain_size, window_bytes=budget // 2, **SHAPE)


@pytest.mark.parametrize("backend", WINDOWED)
@pytest.mark.parametrize(("ranks", "domain_size"), [(1, None), (3, None), (4, 2), (6, 3), (6, 2)])
@pytest.mark.parametrize("capacity", [None, 30])
def test_slices_side_by_side_move_the_same_rows(
    backend: str, ranks: int, domain_size: int | None, capacity: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A window of a GPU has a slice for each multiprocessor; the same roles run here, some of them without a chunk."""
    group = flexep.Group.local(ranks)
    x, topk_idx, weights = inputs(ranks)
    shape = {**SHAPE, "domain_size": domain_size, "capacity": capacity, "overflow": "drop", "alignment": 2}
    plain = flexep.Dispatcher(group, backend="alltoall", **shape)
    want = round_trip(plain, x, topk_idx, weights)
    one_hop = backend == "deepep" or domain_size is None
    for slices, budget, ahead in (
        (2, None, False),
        (3, 1 << 15, False),
        (40, None, False),
        (3, None, one_hop),
    ):
        monkeypatch.setattr(one_sided, "num_slices", lambda *_, n=slices: n)
        ep = flexep.Dispatcher(group, backend=backend, window_bytes=budget, send_ahead=ahead, **shape)
        assert ep._alive().backend.shape.slices > 1
        for _ in range(2):  # with rings that the first round has left behind
            got = round_trip(ep, x, topk_idx, weights)
            assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), slices
        moved, floor = ep.traffic["dispatch.rows"], plain.traffic["dispatch.rows"]
        assert moved.remote_rows > 0 or ranks == 1
        if ahead:
            assert moved.remote_rows == 2 * (ranks - 1) * sum(one.shape[0] for one in x)
        elif capacity is None and one_hop:
            assert moved.remote_rows == 2 * floor.remote_rows


@pytest.mark.parametrize(("capacity", "drops"), [(4.0, False), (60, True)])
def test_what_was_kept_is_told_only_where_rows_were_dropped(capacity: float, drops: bool) -> None:
    ranks = 3
    ep = flexep.Dispatcher(
        flexep.Group.local(ranks), backend="deepep", capacity=capacity, alignment=1, overflow="drop", **SHAPE
    )
    received = ep.dispatch(*inputs(ranks))
    assert any(bool(r.dropped.any()) for r in received) == drops
    said = ep.traffic["dispatch.counts"]
    assert (said.calls, said.remote_bytes) == (1, drops * ranks * (ranks - 1) * 4 * ranks)


def rows_in_windows(ep: flexep.Dispatcher, x: Rows) -> list[list[bool]]:
    """Which rows of every rank's x lie in that rank's window."""
    memory = ep._alive().backend.window._alive()
    held = [memory.view(rank).tobytes() for rank in range(len(x))]
    return [
        [row.view(torch.uint8).numpy().tobytes() in window for row in rows]
        for window, rows in zip(held, x, strict=True)
    ]


@pytest.mark.parametrize(
    ("experts", "slots"),
    [
        (4, [[0], [2], [1], [3], [-1]]),
        (4, [[0, 1], [0, 2], [2, 3], [3, 1], [-1, 2], [1, -1], [-1, -1]]),
        (2, [[0, 0, 0], [0, 1, 0], [1, 1, 1], [-1, 1, -1], [-1, 0, 0], [-1, -1, -1]]),
    ],
)
def test_rows_that_stay_are_not_offered(experts: int, slots: list[list[int]]) -> None:
    """Where many rows stay, a window holds those alone that the other rank reads."""
    group, tokens, top_k = flexep.Group.local(2), len(slots), len(slots[0])
    ep = flexep.Dispatcher(
        group, backend="deepep", num_experts=experts, hidden=64, top_k=top_k, max_tokens=tokens
    )
    x = [torch.randn(tokens, 64).to(torch.bfloat16) for _ in group.hosted]
    topk_idx = [torch.tensor(slots) for _ in group.hosted]
    ep.dispatch(x, topk_idx, [torch.ones(tokens, top_k) for _ in group.hosted])
    assert rows_in_windows(ep, x) == [
        [any(e >= 0 and e // (experts // 2) != rank for e in token) for token in slots] for rank in range(2)
    ]


def test_where_nearly_all_rows_leave_all_are_offered() -> None:
    """A row that stays among those of a shape of which few do is offered with them."""
    ep = flexep.Dispatcher(
        flexep.Group.local(2), backend="deepep", num_experts=8, hidden=64, top_k=4, max_tokens=1
    )
    x = [torch.randn(1, 64).to(torch.bfloat16) for _ in range(2)]
    topk_idx = [torch.arange(4 * rank, 4 * rank + 4)[None] for rank in range(2)]
    ep.dispatch(x, topk_idx, [torch.ones(1, 4) for _ in range(2)])
    assert rows_in_windows(ep, x) == [[True], [True]]


def test_rows_that_stay_in_a_domain_are_offered_to_its_ranks() -> None:
    """With top-1 many rows stay with their rank, its domain or its rail: over relays all are offered."""
    group, generator = flexep.Group.local(4), torch.Generator().manual_seed(3)
    x = [torch.randn(60, 64, generator=generator).to(torch.bfloat16) for _ in group.hosted]
    topk_idx = [torch.randint(-1, 4, (60, 1), generator=generator) for _ in group.hosted]
    weights = [torch.rand(60, 1, generator=generator) for _ in group.hosted]
    shape = {"num_experts": 4, "hidden": 64, "top_k": 1, "max_tokens": 60, "domain_size": 2}
    got, want = (
        round_trip(flexep.Dispatcher(group, backend=name, **shape), x, topk_idx, weights)
        for name in ("hybridep", "alltoall")
    )
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("backend", WINDOWED)
def test_zero_copy_input_lies_in_the_window_and_gives_the_same_rows(backend: str) -> None:
    group = flexep.Group.local(4)
    x, topk_idx, weights = inputs(4)
    shape = {**SHAPE, "window_bytes": 1 << 14}
    want = round_trip(flexep.Dispatcher(group, backend=backend, domain_size=2, **shape), x, topk_idx, weights)
    ep = flexep.Dispatcher(group, backend=backend, domain_size=2, zero_copy=True, **shape)
    memory = ep._alive().backend.window._alive()
    own = [room[: rows.shape[0]] for room, rows in zip(ep.window_input(), x, strict=True)]
    for rank, (room, rows) in enumerate(zip(own, x, strict=True)):
        room.copy_(rows)
        if rows.numel():
            assert 0 <= room.data_ptr() - memory.addresses[rank] < memory.nbytes
    mixed = [*own[:2], x[2], own[3]]  # a rank may as well pass an x of its own
    for given in (own, mixed):
        got = round_trip(ep, given, topk_idx, weights)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    r = ep.dispatch(own, topk_idx, weights)
    with torch.no_grad():
        for room in own:
            room.neg_()  # the rows are the caller's again
    again = ep.dispatch(own, handle=[one.handle for one in r])
    assert all(torch.equal(a.x, -b.x) for a, b in zip(again, r, strict=True))


def zero_copy_in_processes(ctx: RankContext, backend: str) -> bool:
    ep = flexep.Dispatcher(
        ctx.group, backend=backend, domain_size=2, zero_copy=True, window_bytes=1 << 14, **SHAPE
    )
    x, topk_idx, weights = (given[ctx.rank] for given in inputs(ctx.size))
    want = ep.dispatch(x, topk_idx, weights)
    room = ep.window_input()[: x.shape[0]]
    for _ in range(20):  # overwritten at once, while slower peers may still want to read
        room.copy_(x)
        got = ep.dispatch(room, topk_idx, weights)
        room.fill_(float("nan"))
        if not torch.equal(got.x, want.x):
            return False
    ep.destroy()
    return True


@pytest.mark.parametrize("backend", WINDOWED)
def test_zero_copy_input_may_be_overwritten_at_once(backend: str) -> None:
    with RankPool(4) as pool:
        assert pool.run(zero_copy_in_processes, backend) == [True] * 4


def test_zero_copy_needs_a_window() -> None:
    group = flexep.Group.local(2)
    with pytest.raises(flexep.ArgumentError, match="zero_copy = True"):
        flexep.Dispatcher(group, backend="alltoall", zero_copy=True, **SHAPE)
    with pytest.raises(flexep.Unavailable, match="alltoall"):
        flexep.Dispatcher(group, backend="alltoall", **SHAPE).window_input()
    with pytest.raises(flexep.ArgumentError, match="zero_copy"):
        flexep.Dispatcher(group, backend="deepep", **SHAPE).window_input()


@pytest.mark.parametrize("backend", list(flexep.BACKENDS))
def test_a_second_call_at_the_same_time_is_refused_by_name(backend: str) -> None:
    """The first call is held inside its operation; the second must be refused, and the first must end well."""
    ep = flexep.Dispatcher(flexep.Group.local(2), backend=backend, **SHAPE)
    x, topk_idx, _ = inputs(2)
    inside, go_on = threading.Event(), threading.Event()
    back_end = ep._alive().backend
    deliver = back_end.deliver

    def slow_deliver(*args: object, **kwargs: object) -> object:
        inside.set()
        assert go_on.wait(20)
        return deliver(*args, **kwargs)

    back_end.deliver = slow_deliver
    results: list[object] = []
    first = threading.Thread(target=lambda: results.append(ep.dispatch(x, topk_idx)))
    first.start()
    assert inside.wait(20)
    with pytest.raises(flexep.WindowBusy, match="combine: another call"):
        ep.combine(x, [])
    with pytest.raises(flexep.WindowBusy, match="dispatch: another call"):
        ep.dispatch(x, topk_idx)
    go_on.set()
    first.join(20)
    assert len(results) == 1
    back_end.deliver = deliver
    ep.dispatch(x, topk_idx)


def overlap_below(ctx: RankContext) -> str:
    """Two operations on one window at once, below the dispatcher's own refusal."""
    ep = flexep.Dispatcher(ctx.group, backend="deepep", timeout=20.0, **SHAPE)
    window = ep._alive().backend.window
    mine = torch.zeros(1, dtype=torch.int32)
    caught: list[BaseException] = []
    if ctx.rank == 0:  # rank 1 comes when the file of the store says so
        other = threading.Thread(target=lambda: window.publish([mine], "dispatch.counts"))
        other.start()
        while window.epoch == 0:
            pass
        try:
            window.publish([mine], "dispatch.counts")
        except flexep.WindowBusy as busy:
            caught.append(busy)
        ctx.group.barrier()
        other.join()
    else:
        ctx.group.barrier()
        window.publish([mine], "dispatch.counts")
    ep.destroy()
    return str(caught)


def test_the_window_itself_refuses_a_second_operation() -> None:
    with RankPool(2) as pool:
        first, second = pool.run(overlap_below)
        assert "an operation is running on this window" in first
        assert second == "[]"


def test_a_window_that_was_left_is_named() -> None:
    ep = flexep.Dispatcher(flexep.Group.local(2), backend="deepep", **SHAPE)
    window = ep._alive().backend.window
    ep.destroy()
    ep.destroy()
    with pytest.raises(flexep.WindowBroken, match="closed"):
        window.publish([torch.zeros(1, dtype=torch.int32)] * 2, "dispatch.counts")


def other_order(ctx: RankContext) -> str:
    """Ranks that run different operations of one window."""
    ep = flexep.Dispatcher(ctx.group, backend="deepep", timeout=20.0, **SHAPE)
    window = ep._alive().backend.window
    try:
        window.publish(
            [torch.zeros(1, dtype=torch.int32)], "dispatch.counts" if ctx.rank else "combine.header"
        )
    except flexep.CollectiveMismatch as mismatch:
        return str(mismatch)
    finally:
        ep.destroy()
    return ""


def test_ranks_in_different_operations_are_told() -> None:
    with RankPool(2) as pool:
        said = pool.run(other_order)
    assert any(
        "header (epoch 1) (rank" in one and "dispatch.counts (epoch 1) (rank" in one for one in said
    ), said
    assert all(said), said


def later_epoch(ctx: RankContext) -> str:
    """Rank 1 sends in its second operation what rank 0 waits for in its first."""
    ep = flexep.Dispatcher(ctx.group, backend="deepep", timeout=20.0, **SHAPE)
    window, one = ep._alive().backend.window, torch.ones(1, 1, dtype=torch.int32)
    none, to_0, from_1 = (torch.tensor(n, dtype=torch.int32) for n in ([0, 0], [1, 0], [0, 1]))
    try:
        if ctx.rank == 0:
            window.exchange_records([one[:0]], [none], [one.clone()], [from_1], "dispatch.meta")
        else:
            window.exchange_records([one[:0]], [none], [one[:0]], [none], "dispatch.meta")
            window.exchange_records([one], [to_0], [one[:0]], [none], "dispatch.meta")
    except flexep.CollectiveMismatch as mismatch:
        return str(mismatch)
    finally:
        ctx.group.barrier()
        ep.destroy()
    return ""


def test_a_chunk_of_a_later_operation_is_not_taken_for_this_one() -> None:
    with RankPool(2) as pool:
        assert "dispatch.meta (epoch 2)" in pool.run(later_epoch)[0]


def meet_often(ctx: RankContext) -> float:
    """Seconds of a meeting of two ranks in which this one waits for the other."""
    ep = flexep.Dispatcher(ctx.group, backend="deepep", **SHAPE)
    window, mine, took = ep._alive().backend.window, torch.zeros(1, dtype=torch.int32), []
    for number in range(201):
        if number % 2 == ctx.rank:  # the other one sleeps by now
            time.sleep(0.001)
        begin = time.perf_counter()
        window.publish([mine], "dispatch.counts")
        took.append(time.perf_counter() - begin)
    ep.destroy()
    return sorted(took)[120]  # of the rounds in which this rank waits, the first third


def test_a_post_wakes_who_sleeps() -> None:
    """Without a wake every sleeper lies until its nap of 5 ms ends."""
    with RankPool(2) as pool:
        assert max(pool.run(meet_often)) < 0.0045


def test_every_operation_has_a_number_of_its_own() -> None:
    assert len(set(OPS)) == len(OPS) < 256
