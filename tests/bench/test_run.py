"""A small run by the benchmark contract: its fields, its bytes against the closed form, its checks."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

import flexep
from flexep.benchmark import rank
from flexep.benchmark import run as driver
from flexep.benchmark.case import BenchCase
from flexep.benchmark.columns import quantile
from flexep.benchmark.library import Column
from flexep.benchmark.run import run
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from tests.bench import plants

FIELDS = [
    "library", "dispatcher", "op", "layout", "wire", "routing", "mode", "fresh", "alignment", "tokens", "hidden",
    "experts", "top_k", "ranks", "sms", "median_us", "p99_us", "host_us", "remote_bytes", "logical_bytes",
    "floor_us", "ratio_to_copy_engine", "checked",
]  # fmt: skip
T, H, E, K, R = 512, 256, 16, 4, 4
P = 1 - math.comb(E - E // R, K) / math.comb(E, K)  # a token needs a given rank
ROW = 2 * H
TINY = BenchCase(
    ranks=2, dispatchers=("alltoall",), tokens=24, hidden=16, experts=4, top_k=2, time_limit=0.1, pairs=8
)  # fmt: skip


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    case = BenchCase(tokens=T, hidden=H, experts=E, top_k=K, ranks=R, time_limit=0.2, pairs=8)
    return run(case, copy_bytes=1 << 20)


def row(result: dict[str, Any], dispatcher: str, op: str) -> dict[str, Any]:
    (found,) = (r for r in result["results"] if (r["dispatcher"], r["op"]) == (dispatcher, op))
    return found


def test_results_have_the_fields_of_the_contract(result: dict[str, Any]) -> None:
    names = [*flexep.BACKENDS, "all_to_all_single"]
    assert [(r["dispatcher"], r["op"]) for r in result["results"]] == [
        (name, op) for name in names for op in ("dispatch", "combine", "roundtrip")
    ]
    for r in result["results"]:
        assert list(r) == FIELDS
        assert r["checked"] is True
        assert (r["tokens"], r["hidden"], r["experts"], r["top_k"], r["ranks"]) == (T, H, E, K, R)
        assert (r["routing"], r["fresh"], r["wire"], r["mode"]) == ("uniform", True, "bf16", "exact")
        assert r["host_us"] is None
        assert 0 < r["median_us"] <= r["p99_us"]
        assert r["remote_bytes"] < r["logical_bytes"]
        assert r["ratio_to_copy_engine"] == pytest.approx(r["floor_us"] / r["median_us"])
        assert r["library"] == ("torch" if r["dispatcher"] == "all_to_all_single" else "flexep")
    assert result["problems"] == []
    assert result["machine"]["cores"] >= 1
    assert result["command"].startswith("flexep bench --device cpu --ranks 4 ")


def test_bytes_are_those_of_the_closed_form(result: dict[str, Any]) -> None:
    """What the transports counted; metadata and headers included, so a little more than rows alone."""
    deduplicated, one_each = T * (R - 1) * P * ROW, T * K * (R - 1) / R * ROW
    meta = T * (R - 1) * P * 4 * (1 + K)  # token and K rows, int32
    for name, op, want in (
        ("alltoall", "dispatch", deduplicated + meta),
        ("alltoall", "combine", deduplicated),
        ("alltoall", "roundtrip", 2 * deduplicated + meta),
        ("deepep", "dispatch", deduplicated + meta),
        ("deepep", "combine", deduplicated),
        ("hybridep", "roundtrip", 2 * deduplicated + meta),
        ("allgather", "dispatch", T * (R - 1) * (ROW + 4 * K)),
        ("allgather", "combine", R * deduplicated),  # a block of T R P partial rows to R - 1 peers
        ("all_to_all_single", "dispatch", one_each),
        ("all_to_all_single", "combine", one_each),
    ):
        assert row(result, name, op)["remote_bytes"] == pytest.approx(want, rel=0.06), (name, op)
    own = row(result, "alltoall", "combine")
    assert own["logical_bytes"] == pytest.approx(own["remote_bytes"] * R / (R - 1), rel=0.1)


def test_the_floor_is_the_plans_and_everybodys(result: dict[str, Any]) -> None:
    rate = result["copy"]["bytes_per_second"]
    want = 1e6 * R * (T * (R - 1) * P + T * K) * ROW / rate
    for r in result["results"]:
        times = 2 if r["op"] == "roundtrip" else 1
        assert r["floor_us"] == times * row(result, "alltoall", "dispatch")["floor_us"]
    assert row(result, "alltoall", "dispatch")["floor_us"] == pytest.approx(want, rel=0.02)


def test_the_plan_is_a_part_of_dispatch(result: dict[str, Any]) -> None:
    assert [plan["dispatcher"] for plan in result["plan"]] == [*flexep.BACKENDS, "all_to_all_single"]
    for plan in result["plan"]:
        trip = row(result, plan["dispatcher"], "roundtrip")["median_us"]
        assert 0 < plan["median_us"] <= plan["p99_us"]
        assert plan["of_roundtrip"] == pytest.approx(plan["median_us"] / trip)


def test_a_plan_moves_no_rows_and_leaves_the_dispatcher_as_it_was() -> None:
    case = replace(TINY, ranks=3, experts=6, domain_size=1, dispatchers=tuple(flexep.BACKENDS))
    with RankPool(3) as pool:
        pool.run(rank.start, case)
        for column in [*(("flexep", name) for name in flexep.BACKENDS), ("torch", "all_to_all_single")]:
            pool.run(rank.call, "open", column)
            pool.run(rank.call, "plan", column, 2)
            for rows, others in pool.run(planned_bytes, column):
                assert (rows, others > 0) == (0, True)
            assert pool.run(rank.call, "check", column) == [[]] * 3


def planned_bytes(ctx: RankContext, column: Column) -> tuple[int, int]:
    """Bytes of rows, and of everything else, that a rank has sent."""
    assert rank._bench is not None
    sent = rank._bench.libraries[column].sent()
    rows = sum(both.remote_bytes for name, both in sent.items() if name.endswith(".rows"))
    return rows, sum(both.remote_bytes for both in sent.values()) - rows


def test_cached_plans_have_no_plan_to_time() -> None:
    found = run(replace(TINY, fresh=False), copy_bytes=1 << 20)
    assert found["plan"] == []
    assert found["problems"] == []


def test_speedup_is_over_the_baseline_of_the_run(result: dict[str, Any]) -> None:
    us = {name: row(result, name, "roundtrip")["median_us"] for name in ("alltoall", "all_to_all_single")}
    assert result["speedup"]["roundtrip"]["alltoall"] == us["all_to_all_single"] / us["alltoall"]


@pytest.mark.parametrize(
    ("plant", "wrong", "when"),
    [
        (plants.wrong_row_in_alltoall, "alltoall", "before"),
        (plants.wrong_row_late, "alltoall", "last of the chain"),
        (plants.wrong_sum_in_torch, "all_to_all_single", "before"),
    ],
)
def test_a_planted_bug_is_found(monkeypatch: pytest.MonkeyPatch, plant: Any, wrong: str, when: str) -> None:
    monkeypatch.setattr(driver, "RankPool", partial(RankPool, setup=plant))
    result = run(TINY, copy_bytes=1 << 20)
    checked = {r["dispatcher"]: r["checked"] for r in result["results"]}
    assert checked == {name: name != wrong for name in ("alltoall", "all_to_all_single")}
    assert result["problems"][0].startswith(f"{wrong}: {when}, rank 0: ")


def test_quantile() -> None:
    assert quantile([1.0], 0.99) == 1.0
    assert quantile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert quantile([float(i) for i in range(100)], 0.99) == 99.0
