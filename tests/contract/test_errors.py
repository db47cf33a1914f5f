"""What is refused, how it is named, that every rank hears of it, and that the group works afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import flexep
from flexep.errors import ArgumentError, CollectiveMismatch, HandleMismatch, PeerRefused
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from tests.contract.rounds import DISPATCHERS, GOOD, E, H, R, T, caught, changed, inputs, works

# name -> (argument that the error must name, what is done to it)
BAD_DISPATCH: dict[str, tuple[str, Callable[[torch.Tensor], Any]]] = {
    "dtype of x": ("x.dtype", lambda x: x.float()),
    "shape of x": ("x.shape", lambda x: x[:, :8].contiguous()),
    "dimensions of x": ("x.shape", lambda x: x[None]),
    "stride of x": ("x.stride", lambda x: x.repeat(1, 2)[:, ::2]),
    "too many tokens": ("x.shape[0]", lambda x: x.repeat(2, 1)),
    "x is a list": ("x", lambda x: [[1.0]]),
    "device of x": ("x.device", lambda x: x.to("meta")),
    "expert id E": ("topk_idx", lambda i: changed(i, (3, 1), E)),
    "expert id -2": ("topk_idx", lambda i: changed(i, (3, 1), -2)),
    "expert id beyond int32": ("topk_idx", lambda i: changed(i, (3, 1), 2**32)),
    "dtype of ids": ("topk_idx.dtype", lambda i: i.float()),
    "shape of ids": ("topk_idx.shape", lambda i: i[:, :1].contiguous()),
    "rows of ids": ("topk_idx.shape", lambda i: i[:-1]),
    "NaN weight": ("topk_weights", lambda w: changed(w, (6, 0), float("nan"))),
    "dtype of weights": ("topk_weights.dtype", lambda w: w.double()),
    "shape of weights": ("topk_weights.shape", lambda w: w[:-1]),
}


def bad_dispatch(
    ctx: RankContext, backend: str, what: str, capacity: int | None
) -> tuple[Exception | None, bool]:
    argument, spoil = BAD_DISPATCH[what]
    with flexep.Dispatcher(ctx.group, backend=backend, capacity=capacity, **GOOD) as ep:
        args = inputs()
        if ctx.rank == 1:
            name = argument.split(".")[0]
            args[name] = spoil(args[name])
        error = caught(lambda: ep.dispatch(**args))
        return error, works(ep)


@pytest.mark.parametrize("capacity", [None, 128])
@pytest.mark.parametrize("backend", DISPATCHERS)
@pytest.mark.parametrize("what", BAD_DISPATCH)
def test_bad_input_to_dispatch_on_one_rank(
    pool: RankPool, what: str, backend: str, capacity: int | None
) -> None:
    results = pool.run(bad_dispatch, backend, what, capacity)
    errors = [error for error, _ in results]
    assert isinstance(errors[1], ArgumentError)
    assert errors[1].argument.startswith(BAD_DISPATCH[what][0])
    for rank in (0, 2):
        assert isinstance(errors[rank], PeerRefused), errors[rank]
        assert list(errors[rank].refused) == [1]
    assert [after for _, after in results] == [True] * R


def bad_combine(ctx: RankContext, backend: str, what: str) -> tuple[Exception | None, bool]:
    with (
        flexep.Dispatcher(ctx.group, backend=backend, **GOOD) as ep,
        flexep.Dispatcher(ctx.group, backend=backend, **GOOD) as other,
    ):
        r, r_other = ep.dispatch(**inputs()), other.dispatch(**inputs())
        args: dict[str, Any] = {"y": r.x, "handle": r.handle, "weights": None}
        if ctx.rank == 1:
            args |= {
                "dtype of y": {"y": r.x.float()},
                "shape of y": {"y": r.x[:-1]},
                "stride of y": {"y": r.x.t().contiguous().t()},
                "shape of weights": {"weights": torch.ones(len(r.x) + 1)},
                "layout": {"y_layout": "sideways"},
                "handle of another dispatcher": {"handle": r_other.handle},
                "no handle": {"handle": None},
            }[what]
        elif what == "shape of weights":
            args["weights"] = r.weights
        error = caught(lambda: ep.combine(args.pop("y"), args.pop("handle"), **args))
        return error, works(ep)


@pytest.mark.parametrize("backend", DISPATCHERS)
@pytest.mark.parametrize(
    ("what", "kind", "message"),
    [
        ("dtype of y", ArgumentError, "y.dtype"),
        ("shape of y", ArgumentError, "y.shape"),
        ("stride of y", ArgumentError, "y.stride"),
        ("shape of weights", ArgumentError, "weights.shape"),
        ("layout", ArgumentError, "y_layout = 'sideways'"),
        ("handle of another dispatcher", HandleMismatch, "was made by"),
        ("no handle", ArgumentError, "handle"),
    ],
)
def test_bad_input_to_combine_on_one_rank(
    pool: RankPool, what: str, kind: type, message: str, backend: str
) -> None:
    results = pool.run(bad_combine, backend, what)
    errors = [error for error, _ in results]
    assert isinstance(errors[1], kind)
    assert message in str(errors[1])
    assert all(
        isinstance(errors[rank], PeerRefused) and list(errors[rank].refused) == [1] for rank in (0, 2)
    ), errors
    assert [after for _, after in results] == [True] * R


def bad_reuse(ctx: RankContext, backend: str) -> tuple[list[Exception | None], bool]:
    with (
        flexep.Dispatcher(ctx.group, backend=backend, **GOOD) as ep,
        flexep.Dispatcher(ctx.group, backend=backend, **GOOD) as other,
    ):
        x, handle = inputs()["x"], ep.dispatch(**inputs()).handle
        errors = [
            caught(lambda: ep.dispatch(x[: 3 if ctx.rank == 1 else T], handle=handle)),
            caught(lambda: other.dispatch(x, handle=handle)),
            caught(lambda: ep.dispatch(x)),
            caught(lambda: ep.dispatch(**inputs(), handle=handle)),
        ]
        return errors, works(ep)


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_bad_reuse_of_a_handle(pool: RankPool, backend: str) -> None:
    for rank, (errors, after) in enumerate(pool.run(bad_reuse, backend)):
        other_length, other_dispatcher, neither, both = errors
        assert isinstance(other_length, ArgumentError if rank == 1 else PeerRefused)
        assert isinstance(other_dispatcher, HandleMismatch)
        assert isinstance(neither, ArgumentError)
        assert isinstance(both, ArgumentError)
        assert after


def disagreeing_call(ctx: RankContext, backend: str, what: str) -> tuple[Exception | None, bool]:
    with flexep.Dispatcher(ctx.group, backend=backend, **GOOD) as ep:
        args: dict[str, Any] = inputs()
        odd = ctx.rank == 2
        if what == "x requires grad":
            args["x"].requires_grad_(odd)
        elif what == "weights require grad":
            args["topk_weights"].requires_grad_(odd)
        elif what == "weights given" and odd:
            del args["topk_weights"]
        elif what == "cached handle":
            handle = ep.dispatch(**inputs()).handle
            if odd:
                args = {"x": args["x"], "topk_weights": args["topk_weights"], "handle": handle}
        elif what == "flat rows":
            r = ep.dispatch(**args)
            rows = torch.ones(r.handle.num_recv, H, dtype=torch.bfloat16)
            if odd:
                error = caught(lambda: ep.combine(rows, r.handle, y_layout="flat"))
            else:
                error = caught(lambda: ep.combine(r.x, r.handle))
            return error, works(ep)
        error = caught(lambda: ep.dispatch(**args))
        return error, works(ep)


@pytest.mark.parametrize("backend", DISPATCHERS)
@pytest.mark.parametrize(
    "what", ["x requires grad", "weights require grad", "weights given", "cached handle", "flat rows"]
)
def test_calls_that_disagree_are_named_on_every_rank(pool: RankPool, what: str, backend: str) -> None:
    for error, after in pool.run(disagreeing_call, backend, what):
        assert isinstance(error, CollectiveMismatch), error
        assert sorted(map(sorted, error.differences[what].values())) == [[0, 1], [2]]
        assert after


def different_calls(ctx: RankContext, backend: str) -> tuple[Exception | None, bool]:
    with flexep.Dispatcher(ctx.group, backend=backend, **GOOD) as ep:
        r = ep.dispatch(**inputs())
        error = caught(lambda: ep.combine(r.x, r.handle) if ctx.rank == 1 else ep.dispatch(**inputs()))
        return error, works(ep)


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_ranks_in_different_calls_hear_of_it(pool: RankPool, backend: str) -> None:
    for error, after in pool.run(different_calls, backend):
        assert isinstance(error, CollectiveMismatch), error
        assert after


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_a_local_group_takes_one_list_entry_a_rank(backend: str) -> None:
    with flexep.Dispatcher(flexep.Group.local(2), backend=backend, **GOOD) as ep:
        args = inputs()
        for wrong in (args["x"], [args["x"]], [args["x"]] * 3):
            with pytest.raises(ArgumentError, match="a list of 2"):
                ep.dispatch(wrong, [args["topk_idx"]] * 2)
        results = ep.dispatch([args["x"]] * 2, [args["topk_idx"]] * 2)
        with pytest.raises(HandleMismatch, match="belongs to rank 1"):
            ep.combine([r.x for r in results], [r.handle for r in results][::-1])


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_a_destroyed_dispatcher_says_so(backend: str) -> None:
    args = inputs()
    ep = flexep.Dispatcher(flexep.Group.local(1), backend=backend, **GOOD)
    (r,) = ep.dispatch([args["x"]], [args["topk_idx"]])
    ep.destroy()
    ep.destroy()
    for call in (lambda: ep.dispatch([args["x"]], [args["topk_idx"]]), lambda: ep.combine([r.x], [r.handle])):
        with pytest.raises(HandleMismatch, match="destroyed"):
            call()
