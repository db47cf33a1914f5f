"""The front: what it promises beside moving rows (tests/contract checks the rows themselves)."""

from __future__ import annotations

import gc
import time
from dataclasses import FrozenInstanceError

import pytest
import torch
import torch.distributed as dist

import flexep
from flexep.config import WINDOWED, DispatcherConfig
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext

BACKENDS = list(flexep.BACKENDS)
SHAPE = {"num_experts": 6, "hidden": 16, "top_k": 2, "max_tokens": 8}


def tokens(ranks: int, seed: int = 0) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    x = [torch.randn(8, 16, generator=generator).to(torch.bfloat16) for _ in range(ranks)]
    topk_idx = [torch.randint(-1, 6, (8, 2), generator=generator) for _ in range(ranks)]
    weights = [torch.rand(8, 2, generator=generator) for _ in range(ranks)]
    return x, topk_idx, weights


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_dispatchers_interleaved_do_not_touch_each_other(backend: str) -> None:
    group = flexep.Group.local(2)
    one = flexep.Dispatcher(group, backend=backend, **SHAPE)
    two = flexep.Dispatcher(group, backend=backend, **{**SHAPE, "hidden": 32, "dtype": torch.float32})
    x, topk_idx, weights = tokens(2)
    wide = [torch.cat([t, t], 1).float() for t in x]
    got = one.dispatch(x, topk_idx)
    alone = one.combine([r.x for r in got], [r.handle for r in got])
    first, second = one.dispatch(x, topk_idx, weights), two.dispatch(wide, topk_idx, weights)
    z_two = two.combine([r.x for r in second], [r.handle for r in second])
    z_one = one.combine([r.x for r in first], [r.handle for r in first])
    assert all(torch.equal(a, b) for a, b in zip(z_one, alone, strict=True))
    assert all(torch.allclose(a.float(), b[:, :16], atol=0.05) for a, b in zip(z_one, z_two, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_is_raised_once_at_the_next_call_or_by_check(backend: str) -> None:
    ep = flexep.Dispatcher(flexep.Group.local(2), backend=backend, alignment=1, capacity=4, **SHAPE)
    x, topk_idx, _ = tokens(2)
    r = ep.dispatch(x, topk_idx)
    dropped = sum(int(one.dropped.sum()) for one in r)
    assert dropped > 0
    with pytest.raises(flexep.CapacityExceeded) as caught:
        ep.combine([one.x for one in r], [one.handle for one in r])
    assert (caught.value.dropped, caught.value.capacity) == (dropped, 4)
    ep.combine([one.x for one in r], [one.handle for one in r])  # said once; the kept rows are there
    ep.dispatch(x, topk_idx)
    with pytest.raises(flexep.CapacityExceeded):
        ep.check()
    ep.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_drop_counts_and_never_raises(backend: str) -> None:
    ep = flexep.Dispatcher(
        flexep.Group.local(2), backend=backend, alignment=1, capacity=4, overflow="drop", **SHAPE
    )
    x, topk_idx, _ = tokens(2)
    assert sum(int(one.dropped.sum()) for one in ep.dispatch(x, topk_idx)) > 0
    ep.check()
    assert [one.x.shape[0] for one in ep.dispatch(x, topk_idx)] == [4, 4]


def test_handles_are_frozen_and_die_with_their_dispatcher() -> None:
    ep = flexep.Dispatcher(flexep.Group.local(1), **SHAPE)
    x, topk_idx, _ = tokens(1)
    r = ep.dispatch(x, topk_idx)[0]
    with pytest.raises(FrozenInstanceError):
        r.handle.rank = 1
    ep.destroy()
    ep.destroy()
    for call in (
        lambda: ep.combine([r.x], [r.handle]),
        lambda: ep.dispatch(x, topk_idx),
        ep.memory_plan,
    ):
        with pytest.raises(flexep.HandleMismatch, match="was destroyed"):
            call()
    other = flexep.Dispatcher(flexep.Group.local(1), **SHAPE)
    with pytest.raises(flexep.HandleMismatch, match="was made by"):
        other.combine([r.x], [r.handle])


def test_auto_is_one_of_the_back_ends_and_gives_the_same_bits() -> None:
    group = flexep.Group.local(3)
    x, topk_idx, weights = tokens(3)
    results = []
    for backend in ("auto", *BACKENDS):
        ep = flexep.Dispatcher(group, backend=backend, **SHAPE)
        assert ep.config.backend in BACKENDS
        r = ep.dispatch(x, topk_idx, weights)
        results.append(
            ep.combine([one.x for one in r], [one.handle for one in r], [one.weights for one in r])
        )
    for z in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(z, results[0], strict=True))


@pytest.mark.parametrize("capacity", [None, 1.0])
@pytest.mark.parametrize("backend", BACKENDS)
def test_memory_plan_bounds_what_the_collectives_hold(backend: str, capacity: float | None) -> None:
    ep = flexep.Dispatcher(
        flexep.Group.local(4), backend=backend, alignment=1, capacity=capacity, overflow="drop", **SHAPE
    )
    x, topk_idx, weights = tokens(4)
    seen = watch(ep)
    r = ep.dispatch(x, topk_idx, weights)
    ep.combine([one.x for one in r], [one.handle for one in r])
    plan = ep.memory_plan()
    assert (plan.window_bytes > 0) == (backend in WINDOWED)
    assert max(seen) <= max(plan.staging_bytes.values())
    assert plan.total_bytes == plan.window_bytes + sum(plan.staging_bytes.values())


def watch(ep: flexep.Dispatcher) -> list[int]:
    """Bytes of every tensor that a collective of `ep`, or what is told, brings to one rank."""
    seen: list[int] = []
    back_end = ep._alive().backend
    for owner, name in (
        (back_end, "tell"), (back_end.collectives, "all_gather"), (back_end.collectives, "all_to_all")
    ):  # fmt: skip
        original = getattr(owner, name)

        def call(*args, original=original, **kwargs):
            out = original(*args, **kwargs)
            seen.append(out[0].numel() * out[0].element_size())
            return out

        setattr(owner, name, call)
    return seen


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_need_not_be_contiguous(backend: str, layout: str) -> None:
    """The gradient that `expand` leaves is one number under many strides of 0."""
    ep = flexep.Dispatcher(flexep.Group.local(2), backend=backend, layout=layout, **SHAPE)
    x, topk_idx, _ = tokens(2)
    leaves = [one.requires_grad_() for one in x]
    rows = [one.x for one in ep.dispatch(leaves, topk_idx)]
    ones = [torch.ones_like(row) for row in rows]
    expanded = [torch.ones((), dtype=row.dtype).expand_as(row) for row in rows]
    want = torch.autograd.grad(rows, leaves, ones, retain_graph=True)
    found = torch.autograd.grad(rows, leaves, expanded)
    assert all(torch.equal(a, b) and a.any() for a, b in zip(found, want, strict=True))


@pytest.mark.parametrize("backend", BACKENDS)
def test_destroy_closes_the_back_end_once(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[object] = []
    monkeypatch.setattr(flexep.BACKENDS[backend], "close", lambda self: closed.append(self))
    with flexep.Dispatcher(flexep.Group.local(2), backend=backend, **SHAPE) as ep:
        held = ep._alive().backend
        assert closed == []
    ep.destroy()
    assert closed == [held]


def test_two_hundred_dispatchers_leave_nothing_behind() -> None:
    group = flexep.Group.local(2)
    x, topk_idx, weights = tokens(2)

    def once() -> None:
        with flexep.Dispatcher(group, **SHAPE) as ep:
            r = ep.dispatch(x, topk_idx, weights)
            ep.combine([one.x for one in r], [one.handle for one in r])

    def tensors() -> int:
        gc.collect()
        return sum(type(o) is torch.Tensor for o in gc.get_objects())

    once()
    before = tensors()
    for _ in range(200):
        once()
    assert tensors() <= before


GOOD = {
    "num_ranks": 4, "num_experts": 8, "hidden": 64, "top_k": 2, "max_tokens": 16, "backend": "alltoall",
    "dtype": torch.bfloat16, "wire": None, "combine_wire": None, "domain_size": None, "layout": "flat",
    "alignment": 16, "capacity": None, "overflow": "error", "num_sms": None, "timeout": 300.0, "placement": None,
    "reduction": "ordered",
}  # fmt: skip


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("num_experts", 0), ("num_experts", 2.0), ("hidden", 0), ("hidden", 12), ("top_k", 0), ("top_k", 33),
        ("max_tokens", -1), ("max_tokens", True), ("dtype", torch.float64), ("wire", "fp8"), ("wire", "fp32"),
        ("combine_wire", "int8"), ("domain_size", 3), ("domain_size", 0), ("layout", "sorted"), ("alignment", 0),
        ("capacity", 0), ("capacity", -1.0), ("capacity", float("nan")), ("capacity", True), ("capacity", 31),
        ("capacity", 2**31), ("capacity", "big"), ("overflow", "grow"), ("num_sms", 0), ("timeout", 0),
        ("timeout", float("inf")), ("timeout", 1e300), ("timeout", True), ("num_experts", 2**31),
        ("alignment", 2**31), ("hidden", 2**40), ("max_tokens", 2**40), ("wire", []), ("wire", {}),
        ("combine_wire", []), ("reduction", "fast"), ("reduction", "random"),
    ],
)  # fmt: skip
def test_bad_arguments_are_refused_by_name_and_value(argument: str, value: object) -> None:
    assert DispatcherConfig(**GOOD).capacity_rows is None
    with pytest.raises(flexep.ArgumentError) as caught:
        DispatcherConfig(**{**GOOD, argument: value})
    assert caught.value.argument == argument
    assert caught.value.value is value
    assert repr(value) in str(caught.value)


def test_partial_sums_that_are_no_whole_vectors_are_refused_before_there_are_any() -> None:
    narrow = {**GOOD, "dtype": torch.float32, "hidden": 20}
    assert DispatcherConfig(**narrow).combine_dtype == torch.float32
    with pytest.raises(flexep.ArgumentError, match=r"hidden = 20: .*combine_wire bf16: 40"):
        DispatcherConfig(**{**narrow, "combine_wire": "bf16"})


def test_an_unknown_back_end_is_refused_with_the_list() -> None:
    with pytest.raises(flexep.ArgumentError, match="allgather, alltoall"):
        flexep.Dispatcher(flexep.Group.local(1), backend="carrier_pigeon", **SHAPE)


@pytest.mark.parametrize(("name", "value"), [("x", torch.zeros(8, 16)), ("x", [torch.zeros(8, 16)])])
def test_a_local_group_wants_a_list_of_its_size(name: str, value: object) -> None:
    ep = flexep.Dispatcher(flexep.Group.local(2), **SHAPE)
    with pytest.raises(flexep.ArgumentError, match="a list of 2") as caught:
        ep.dispatch(value, tokens(2)[1])
    assert caught.value.argument == name


def test_a_refusal_in_a_local_group_says_whose_value_it_was_and_where() -> None:
    ep = flexep.Dispatcher(flexep.Group.local(3), **SHAPE)
    x, topk_idx, _ = tokens(3)
    topk_idx[2][5, 1] = 77
    with pytest.raises(flexep.ArgumentError, match=r"topk_idx = 77: .*token 5, slot 1.*rank 2's"):
        ep.dispatch(x, topk_idx)
    topk_idx[2][5, 1] = 0
    with pytest.raises(flexep.ArgumentError, match=r"x.dtype = .*rank 1's"):
        ep.dispatch([x[0], x[1].double(), x[2]], topk_idx)
    received = ep.dispatch(x, topk_idx)
    y, handles = [r.x for r in received], [r.handle for r in received]
    with pytest.raises(flexep.ArgumentError, match=r"y.shape = .*rank 0's"):
        ep.combine([y[0][1:], *y[1:]], handles)


def comes_late(ctx: RankContext, backend: str, path: str) -> tuple[str, float]:
    group = flexep.Group.from_store(dist.FileStore(path, ctx.size), ctx.rank, ctx.size)
    ep = flexep.Dispatcher(group, backend=backend, timeout=1.5, **SHAPE)
    x, topk_idx, _ = (one[0] for one in tokens(1))
    r = ep.dispatch(x, topk_idx)
    if ctx.rank == 0:
        time.sleep(4)
    started = time.monotonic()
    try:
        ep.combine(r.x, r.handle)
    except (flexep.Timeout, flexep.PeerLost) as error:
        return type(error).__name__, time.monotonic() - started
    finally:
        group.close()
    return "nothing", time.monotonic() - started


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_late_rank_is_a_timeout_for_the_others_and_all_can_regroup(backend: str, tmp_path) -> None:
    with RankPool(3) as pool:
        seen = pool.run(comes_late, backend, str(tmp_path / "store"))
        for rank in (1, 2):
            what, seconds = seen[rank]
            assert what == "Timeout"
            assert seconds < 1.5 * 1.5
        assert pool.run(works_again, str(tmp_path / "again")) == [True] * 3


def works_again(ctx: RankContext, path: str) -> bool:
    group = flexep.Group.from_store(dist.FileStore(path, ctx.size), ctx.rank, ctx.size, generation=1)
    with flexep.Dispatcher(group, **SHAPE) as ep:
        x, topk_idx, _ = (one[0] for one in tokens(1))
        r = ep.dispatch(x, topk_idx)
        z = ep.combine(r.x, r.handle)
    group.close()
    return bool(torch.isfinite(z.float()).all())


def checks_alone(ctx: RankContext, path: str) -> list[str]:
    """Rank 0 asks for the overflow; the other is told at its next call, for which rank 0 waits."""
    group = flexep.Group.from_store(dist.FileStore(path, ctx.size), ctx.rank, ctx.size)
    ep = flexep.Dispatcher(group, backend="alltoall", alignment=1, capacity=4, timeout=20.0, **SHAPE)
    x, topk_idx, _ = (one[ctx.rank] for one in tokens(2))
    r, seen = ep.dispatch(x, topk_idx), []
    for call in ([ep.check] if ctx.rank == 0 else []) + [lambda: ep.combine(r.x, r.handle)] * 2:
        try:
            call()
            seen.append("moved")
        except flexep.FlexEPError as error:
            seen.append(type(error).__name__)
    group.close()
    return seen


def test_asking_for_an_overflow_on_one_rank_alone_hangs_nobody(tmp_path) -> None:
    with RankPool(2) as pool:
        assert pool.run(checks_alone, str(tmp_path / "store")) == [
            ["CapacityExceeded", "PeerRefused", "moved"],
            ["CapacityExceeded", "moved"],
        ]


def test_the_fast_sum_adds_in_fp32_and_takes_no_domains() -> None:
    group = flexep.Group.local(4)
    x, topk_idx, weights = tokens(4)
    results = []
    for reduction in ("ordered", "fast"):
        ep = flexep.Dispatcher(group, backend="allgather", reduction=reduction, **SHAPE)
        r = ep.dispatch(x, topk_idx, weights)
        results.append(
            ep.combine([one.x for one in r], [one.handle for one in r], [one.weights for one in r])
        )
    for ordered, fast in zip(*results, strict=True):
        assert torch.allclose(ordered.float(), fast.float(), rtol=2**-7, atol=1e-6)
    with pytest.raises(flexep.ArgumentError, match="no order to nest"):
        flexep.Dispatcher(group, backend="allgather", reduction="fast", domain_size=2, **SHAPE)


@pytest.mark.parametrize("capacity", [4, 8, 100])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_static_sizes_come_from_the_arguments_alone(backend: str, layout: str, capacity: int) -> None:
    """Capacities below max_tokens, at it, and above everybody's tokens: r.x and the splits on the wire."""
    ep = flexep.Dispatcher(
        flexep.Group.local(3), backend=backend, layout=layout, alignment=1, capacity=capacity, overflow="drop",
        **SHAPE,
    )  # fmt: skip
    x, topk_idx, _ = tokens(3)
    r = ep.dispatch(x, topk_idx)
    rows = capacity if layout == "expert_major" else min(3 * 8, capacity)
    assert [one.x.shape[0] for one in r] == [rows] * 3
    assert [one.handle.num_recv for one in r] == [min(3 * 8, capacity)] * 3
    moved = ep.traffic["dispatch.rows"].remote_rows
    if backend in WINDOWED:  # sizes are static, and only kept rows move
        arrived = [one.handle.route.one_sided.recv_R.tolist() for one in r]
        assert moved == sum(sum(splits) - splits[rank] for rank, splits in enumerate(arrived))
    else:
        assert moved == 3 * 2 * (min(8, capacity) if backend == "alltoall" else 8)


@pytest.mark.parametrize("capacity", [None, 24])
@pytest.mark.parametrize("backend", BACKENDS)
def test_weights_through_a_handle_are_those_of_a_fresh_dispatch(backend: str, capacity: int | None) -> None:
    for layout in ("expert_major", "flat"):
        ep = flexep.Dispatcher(
            flexep.Group.local(3), backend=backend, layout=layout, alignment=1, capacity=capacity,
            overflow="drop", **SHAPE,
        )  # fmt: skip
        x, topk_idx, weights = tokens(3)
        fresh = ep.dispatch(x, topk_idx, weights)
        again = ep.dispatch(x, handle=[one.handle for one in fresh], topk_weights=weights)
        for one, two in zip(fresh, again, strict=True):
            assert torch.equal(one.weights, two.weights)
            if layout == "flat":
                assert bool((one.weights[one.expert_idx < 0] == 0).all())


@pytest.mark.parametrize(
    ("argument", "value"),
    [("placement", 5), ("placement", [0.5] * 6), ("placement", "012345"), ("backend", ["alltoall"])],
)
def test_arguments_of_another_type_are_refused_like_any_other(argument: str, value: object) -> None:
    with pytest.raises(flexep.ArgumentError) as caught:
        flexep.Dispatcher(flexep.Group.local(1), **SHAPE, **{argument: value})
    assert caught.value.argument == argument


def test_nan_weights_through_a_handle_are_refused() -> None:
    ep = flexep.Dispatcher(flexep.Group.local(1), **SHAPE)
    x, topk_idx, weights = tokens(1)
    handle = ep.dispatch(x, topk_idx)[0].handle
    weights[0][3, 1] = torch.nan
    with pytest.raises(flexep.ArgumentError, match="token 3, slot 1 is NaN"):
        ep.dispatch(x, handle=[handle], topk_weights=weights)


def test_a_nested_or_sparse_x_is_refused() -> None:
    ep = flexep.Dispatcher(flexep.Group.local(1), **SHAPE)
    x, topk_idx, _ = tokens(1)
    with pytest.raises(flexep.ArgumentError, match="a dense tensor"):
        ep.dispatch([x[0].to_sparse()], topk_idx)
