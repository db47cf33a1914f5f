"""What is computed from times that only GPUs can take."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from flexep.benchmark.baselines import REFERENCE
from flexep.benchmark.beside import Beside, calls_to_cover, slowest
from flexep.benchmark.case import BenchCase
from flexep.benchmark.columns import Run
from flexep.benchmark.rank import Floor, floor_of
from flexep.benchmark.timing import GATE_US, MAX_GATE_US, gate_us
from flexep.ref import make_plan
from flexep.testing.pool import RankPool

DEEPEP = ("flexep", "deepep")


class Ranks:
    """A pool of which only what ranks counted is asked."""

    def run(self, fn: Any, method: str, column: Any, timeout: float) -> list[dict[str, tuple[float, float]]]:
        assert (method, column) == ("sent", REFERENCE)
        return [{"dispatch.bytes": (4e6, 4e6), "combine.bytes": (2e6, 2e6)}, {"dispatch.bytes": (3e6, 3e6)}]


def run_on_gpus(baselines: tuple[str, ...]) -> Run:
    case = BenchCase(device="cuda", ranks=2, dispatchers=("deepep",), baselines=baselines)
    one = Run(case, cast(RankPool, Ranks()), {})
    for column, us in ((REFERENCE, 100.0), (DEEPEP, 125.0)):
        one.facts[column] = None  # type: ignore[assignment]
        for op, times in (("dispatch", 1), ("combine", 1), ("roundtrip", 2)):
            one.samples[column, op] = [[us * times, us * times - 10.0]] * 3
    return one


def test_the_copy_engine_is_measured_whether_asked_for_or_not() -> None:
    assert run_on_gpus(()).columns == [DEEPEP, REFERENCE]
    assert run_on_gpus(()).opened == [DEEPEP]
    assert run_on_gpus(("copy_engine",)).columns == [DEEPEP, REFERENCE]
    assert run_on_gpus(("copy_engine",)).opened == [DEEPEP, REFERENCE]


def test_the_ratio_is_to_the_copy_engine_of_the_same_run() -> None:
    one = run_on_gpus(())
    assert one._ratio("dispatch", 125.0, 1.0) == 0.8
    found = one.copy_engine()
    assert found is not None
    assert found["dispatch"] == {"median_us": 100.0, "remote_bytes": 4_000_000, "bytes_per_second": 4e10}
    assert found["roundtrip"]["remote_bytes"] == 6_000_000
    one.left_out[REFERENCE] = "no peer access"
    assert (one._ratio("dispatch", 125.0, 1.0), one.copy_engine()) == (None, None)


def test_single_operations_count_with_their_slowest_rank_and_chains_with_the_median_one() -> None:
    one = run_on_gpus(())
    assert one._times(DEEPEP, "dispatch") == (125.0, 125.0)
    assert one._times(DEEPEP, "roundtrip") == (245.0, 245.0)


def test_the_floor_is_the_sum_on_one_memory_and_the_longer_of_link_and_memory_on_gpus() -> None:
    floor = Floor(100, 400, crossing_rows=60, touched_rows=300, row_bytes=1000)
    assert floor.us({"bytes_per_second": 1e9, "inside_bytes_per_second": None}) == pytest.approx(500.0)
    assert floor.us({"bytes_per_second": 1e9, "inside_bytes_per_second": 1e10}) == pytest.approx(60.0)
    assert floor.us({"bytes_per_second": 1e9, "inside_bytes_per_second": 1e9}) == pytest.approx(150.0)


@pytest.mark.parametrize(("flat", "touched"), [(True, 32 + 32), (False, 32 + 64)])
def test_the_busiest_rank_of_a_floor_is_that_of_its_plan(flat: bool, touched: int) -> None:
    """16 tokens of each of two ranks have both their experts on rank 1."""
    world = BenchCase(ranks=2, tokens=16, experts=4, top_k=2, hidden=8).world
    plan = make_plan(world, [torch.tensor([[2, 3]]).repeat(16, 1)] * 2)
    assert floor_of([plan, plan], flat, 16) == Floor(16, 64, 16, touched, 16)


@pytest.mark.parametrize("gathers", [True, False])
def test_a_floor_is_that_of_who_receives_most_or_sends_most(gathers: bool) -> None:
    """Of three ranks rank 1 receives from both others, or sends to both."""
    world = BenchCase(ranks=3, tokens=16, experts=3, top_k=2, hidden=8).world
    choices = [[1, 1]] * 3 if gathers else [[0, 0], [0, 2], [2, 2]]
    plan = make_plan(world, [torch.tensor([one]).repeat(16, 1) for one in choices])
    assert floor_of([plan], True, 16).crossing_rows == 32


def test_a_gate_sleeps_twice_as_long_as_the_host_takes() -> None:
    assert gate_us(10.0) == GATE_US
    assert gate_us(400.0) == 800.0
    assert gate_us(1e9) == MAX_GATE_US


def test_products_lose_what_they_take_longer_for_the_share_that_was_covered() -> None:
    assert Beside(1000.0, 1000.0, 1.0).ratio == 1.0
    assert Beside(1000.0, 1250.0, 1.0).ratio == 1.25
    # Half of 1100 us covered: in the other 550 as much was done as alone, so 450 us of work took 550.
    assert Beside(1000.0, 1100.0, 0.5).ratio == pytest.approx(550 / 450)
    worst = Beside(1000.0, 1300.0, 1.0)
    assert slowest([Beside(900.0, 1000.0, 1.0), worst, Beside(2000.0, 2100.0, 1.0)]) is worst


def test_operations_outlast_a_chain_that_they_slow_to_twice_its_time() -> None:
    assert calls_to_cover(1000.0, 250.0) == 8
    assert calls_to_cover(1000.0, 5000.0) == 1
