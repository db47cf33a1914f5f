"""A small run on two GPUs with everything on: baselines, the copy engine, static sizes, products beside."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bench.suites.measured import OPS, Measured
from bench.suites.no_cliffs import references
from flexep.benchmark import run as driver
from flexep.benchmark import sweep
from flexep.benchmark.baselines import LIBRARIES, column_of
from flexep.benchmark.case import ALL, BenchCase
from flexep.testing.pool import RankPool

pytestmark = pytest.mark.multigpu

SMALL = BenchCase(
    device="cuda", ranks=2, tokens=256, hidden=1024, experts=16, top_k=4, time_limit=0.5, pairs=32
)
PEERS = {"FLEXEP_PEER": "1"}


@pytest.fixture(autouse=True)
def _peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows between the processes of every pool."""
    pool = partial(RankPool, environment=PEERS)
    for module in (driver, sweep):
        monkeypatch.setattr(module, "RankPool", pool)


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize("mode", ["exact", "capacity"])
def test_every_library_is_right_or_says_why_not(layout: str, mode: str) -> None:
    case = replace(SMALL, layout=layout, mode=mode, capacity=1.5, baselines=ALL)
    result = driver.run(case)
    assert result["problems"] == []
    asked = {column_of(kind) for kinds in LIBRARIES.values() for kind in kinds}
    there = {(row["library"], row["dispatcher"]) for row in result["results"]}
    absent = {(one["library"], one["dispatcher"]): one["reason"] for one in result["left_out"]}
    assert {column for column in there | set(absent) if column[0] != "flexep"} == asked
    assert all(absent.values())
    for name in ("deepep", "hybridep", "alltoall", "allgather"):
        assert ("flexep", name) in there, absent
    assert {("torch", "all_to_all_single"), ("copy_engine", "memcpy")} <= there, absent
    for row in result["results"]:
        assert row["host_us"] is not None or row["op"] == "roundtrip"
        assert row["ratio_to_copy_engine"] > 0
        if row["library"] == "copy_engine":
            assert (row["sms"], row["ratio_to_copy_engine"]) == (0, 1.0)
            must_cross = result["must_cross_bytes"][row["op"]]
            if row["op"] == "roundtrip":  # the busiest there need not be the busiest back
                assert row["remote_bytes"] <= must_cross
            else:
                assert row["remote_bytes"] == must_cross
        assert row["floor_us"] < row["median_us"]


def test_products_beside_a_dispatcher() -> None:
    result = driver.run(replace(SMALL, tokens=2048, dispatchers=("alltoall",), baselines=(), beside="gemm"))
    assert [one["op"] for one in result["beside"]] == list(OPS)
    for one in result["beside"]:
        assert 0.9 < one["covered"] <= 1
        assert 0.95 < one["ratio"] < 10


def test_a_sweep_of_multiprocessors() -> None:
    case = replace(SMALL, dispatchers=("deepep",), baselines=())
    result = sweep.run_sweep(case, "num_sms", [8, 32])
    assert [row["sms"] for row in result["results"]] == [8] * 3 + [32] * 3
    assert result["problems"] == []


def test_the_shapes_that_rates_come_from() -> None:
    base = replace(SMALL, dispatchers=("alltoall",), baselines=(), fresh=False, top_k=1)
    with Measured("cuda", 2, count=5) as measure:
        for case in references(base).values():
            assert all(us > 0 for us in measure(case).values())
