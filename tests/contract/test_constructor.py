"""Constructor arguments: what is refused, by name, and what ranks that disagree are told."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexep
from flexep.errors import ArgumentError, CollectiveMismatch, PeerRefused
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from tests.contract.rounds import GOOD, caught, works


def disagreeing_constructor(ctx: RankContext, change: dict[str, Any]) -> tuple[Exception | None, bool]:
    args = {**GOOD, **(change if ctx.rank == 1 else {})}
    error = caught(lambda: flexep.Dispatcher(ctx.group, **args))
    with flexep.Dispatcher(ctx.group, **GOOD) as ep:
        return error, works(ep)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 32), ("num_experts", 6), ("top_k", 3), ("max_tokens", 8), ("dtype", torch.float16),
        ("combine_wire", "fp32"), ("domain_size", 1), ("layout", "flat"), ("alignment", 8), ("capacity", 64),
        ("overflow", "drop"), ("placement", [0, 1, 2, 0, 1]), ("backend", "allgather"), ("timeout", 21.0),
    ],
)  # fmt: skip
def test_constructor_arguments_that_disagree(pool: RankPool, field: str, value: object) -> None:
    for error, after in pool.run(disagreeing_constructor, {field: value}):
        assert isinstance(error, CollectiveMismatch), error
        assert list(error.differences) == [field]
        assert sorted(error.differences[field].values()) == [[0, 2], [1]]
        assert after


def test_a_constructor_argument_refused_on_one_rank(pool: RankPool) -> None:
    results = pool.run(disagreeing_constructor, {"hidden": 7})
    assert [type(error) for error, _ in results] == [PeerRefused, ArgumentError, PeerRefused]
    assert "hidden = 7" in str(results[0][0])
    assert all(after for _, after in results)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", 0), ("hidden", 7), ("hidden", 4.0), ("num_experts", 0), ("num_experts", True), ("top_k", 0),
        ("top_k", 33), ("max_tokens", -1), ("alignment", 0), ("dtype", torch.float64), ("wire", "fp8"),
        ("combine_wire", "bf17"), ("layout", "round"), ("capacity", 0), ("capacity", -1.5), ("capacity", 15),
        ("capacity", float("nan")), ("capacity", float("inf")), ("overflow", "grow"), ("domain_size", 3),
        ("domain_size", 0), ("placement", [0, 1]), ("placement", [0, 1, 0, 1, 7]), ("timeout", 0),
        ("timeout", float("inf")), ("num_sms", 0), ("backend", "smoke"), ("reduction", "slow"),
    ],
)  # fmt: skip
def test_bad_constructor_arguments_are_named(field: str, value: object) -> None:
    with pytest.raises(ArgumentError) as error:
        flexep.Dispatcher(flexep.Group.local(2), **{**GOOD, field: value})
    assert error.value.argument == field
    assert str(7 if value == [0, 1, 0, 1, 7] else value) in str(error.value)
