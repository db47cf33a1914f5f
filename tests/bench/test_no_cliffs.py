"""The model of bench/suites/no_cliffs on synthetic times, and its measuring on real ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from bench.suites import measured
from bench.suites.measured import Measured, WrongResult
from bench.suites.no_cliffs import (
    Load,
    Rates,
    TooFewTokens,
    cliffs,
    load_of,
    measure_rates,
    model_us,
    references,
    report,
    run,
    shapes,
)
from flexep.benchmark.case import BenchCase
from flexep.testing.pool import RankPool
from tests.bench import plants

BASE = BenchCase(
    ranks=2, dispatchers=("deepep",), baselines=(), tokens=64, hidden=64, experts=16, top_k=1, fresh=False
)  # fmt: skip
TRUE = {8: Rates(180.0, 400.0, 5.0), 64: Rates(340.0, 2500.0, 4.0)}
ROW = 128


class Machine:
    """Takes as long as the model says at its rates; `cliff` times as long at one hidden size."""

    def __init__(self, cliff: float = 1.0, hidden: int = 2880) -> None:
        self.cliff, self.hidden, self.asked = cliff, hidden, 0

    def __call__(self, case: BenchCase) -> dict[str, float]:
        self.asked += 1
        times = self.cliff if case.hidden == self.hidden else 1.0
        assert case.num_sms is not None
        return {op: times * model_us(load_of(case, op), TRUE[case.num_sms]) for op in ("dispatch", "combine")}


def test_loads_are_those_of_the_plan() -> None:
    leaves, stays = references(BASE)["link"], replace(references(BASE)["local"], top_k=3)
    assert load_of(leaves, "dispatch") == Load(64 * ROW, 64 * ROW)
    assert load_of(stays, "dispatch").link == load_of(stays, "combine").link == 0
    padded = load_of(stays, "dispatch").local / ROW
    assert 3 * 64 <= padded <= 3 * 64 + 8 * 15
    assert load_of(stays, "combine").local == (3 * 64 + 64) * ROW
    hot = replace(BASE, routing="hot", top_k=2)
    assert load_of(hot, "dispatch").link > 1.3 * load_of(replace(hot, routing="uniform"), "dispatch").link / 2


def test_the_slower_of_link_and_memory_and_a_constant() -> None:
    rates = Rates(link=2.0, local=4.0, constant_us=7.0)
    assert model_us(Load(100.0, 100.0), rates) == 57.0
    assert model_us(Load(100.0, 300.0), rates) == 82.0


def test_rates_are_found_again() -> None:
    for sms, want in TRUE.items():
        for got in measure_rates(replace(BASE, num_sms=sms, tokens=4096), Machine()).values():
            assert got.link == pytest.approx(want.link, rel=0.05)
            assert got.local == pytest.approx(want.local, rel=0.05)
            assert got.constant_us == pytest.approx(want.constant_us, rel=0.2)


def test_a_machine_that_follows_the_model_has_no_cliff() -> None:
    base, machine = replace(BASE, tokens=512), Machine()
    rates, judged = run(base, [8, 64], machine, list(shapes(base)))
    assert len(judged) == 2 * 2 * 36
    assert machine.asked == 2 * (3 + 36)
    assert cliffs(judged) == []
    assert set(rates) == {(sms, op, False) for sms in (8, 64) for op in ("dispatch", "combine")}


def test_rows_that_are_sent_ahead_have_rates_of_their_own() -> None:
    """On GPUs, where nearly every rank needs nearly every row: with top_k = 1 of two ranks they are pulled."""
    base = replace(BASE, device="cuda", tokens=1024)
    one, many = (replace(base, hidden=2048, top_k=k) for k in (1, 6))
    assert (one.sends_ahead, many.sends_ahead) == (False, True)
    assert load_of(many, "dispatch").link == 1024 * 2048 * 2 > load_of(one, "dispatch").link
    assert load_of(many, "combine").link < load_of(many, "dispatch").link
    rates, judged = run(base, [64], Machine(), [one, many])
    assert set(rates) == {(64, op, ahead) for op in ("dispatch", "combine") for ahead in (False, True)}
    assert [j.sent_ahead for j in judged] == [False, False, True, True]
    assert cliffs(judged) == []
    assert "ahead" in report(rates, judged, 0.15)


@pytest.mark.parametrize("times", [1.3, 0.7])
def test_a_cliff_is_found_and_named(times: float) -> None:
    base = replace(BASE, tokens=512)
    some = [case for case in shapes(base) if case.routing == "zipf" and case.top_k == 6]
    rates, judged = run(base, [64], Machine(cliff=times), some)
    found = cliffs(judged)
    assert {one.hidden for one in found} == {2880}
    assert {one.op for one in found} == {"dispatch", "combine"}
    text = report(rates, judged, 0.15)
    assert "2 of 8 further than 15% from the model" in text
    assert text.count(" cliff |") == 2


def test_too_few_tokens_give_no_rate() -> None:
    with pytest.raises(TooFewTokens, match="64 tokens take no longer than one"):
        measure_rates(BASE, lambda case: {"dispatch": 10.0, "combine": 10.0})


def test_real_ranks_are_measured_and_checked() -> None:
    with Measured("cpu", 2, count=3) as measure:
        for case in references(BASE).values():
            times = measure(case)
            assert set(times) == {"dispatch", "combine"}
            assert all(0 < us < 1e6 for us in times.values())


def test_what_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "RankPool", partial(RankPool, setup=plants.wrong_row_in_alltoall))
    with Measured("cpu", 2, count=3) as measure, pytest.raises(WrongResult, match="rows"):
        measure(replace(BASE, dispatchers=("alltoall",)))
