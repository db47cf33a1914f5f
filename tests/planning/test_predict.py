"""The prediction as a whole: how terms add up, what skew and domains do, the choice, thousands of ranks."""

from __future__ import annotations

import time
from typing import Any

import pytest

import flexep
from flexep.errors import ArgumentError
from flexep.planning import PATTERNS, Prediction, Topology, draw, make_workload, parse_topology, predict

SHAPES: dict[str, Any] = {"tokens": 256, "hidden": 64, "experts": 32, "top_k": 4}


def predicted(ranks: int, domain_size: int, samples: int = 10**6, **shapes: Any) -> Prediction:
    topology = Topology(ranks=ranks, domain_size=domain_size)
    work = make_workload(ranks=ranks, domain_size=domain_size, **{**SHAPES, **shapes})
    return predict(work, topology, list(PATTERNS), draw(work, samples))


@pytest.mark.parametrize("size", [8, 4, 1])
@pytest.mark.parametrize("layout", ["expert_major", "flat"])
@pytest.mark.parametrize("capacity", [None, 1.5])
@pytest.mark.parametrize("wire", ["bf16", "mxfp8"])
def test_totals_follow_their_rule(size: int, layout: str, capacity: float | None, wire: str) -> None:
    found = predicted(8, size, layout=layout, capacity=capacity, wire=wire, routing="zipf")
    for name, priced in [*found.closed.items(), *found.drawn.items()]:
        for op in (priced.dispatch, priced.combine):
            us = {term.name: term.us for term in op.terms}
            assert len(us) == len(op.terms)
            assert all(value >= 0 for value in us.values())
            assert all(term.formula and term.source for term in op.terms)
            wires = max(us["link"], us["rail"])
            beside = us["latency"] + us.get("plan", 0)
            passes = sum(us.values()) - us["link"] - us["rail"] - us["metadata"] - beside
            if name in ("allgather", "alltoall"):
                assert op.total_us == pytest.approx(wires + us["metadata"] + passes + beside)
            else:
                body = op.total_us - beside
                assert max(wires, passes) - 1e-9 <= body <= max(wires + us["metadata"], passes) + 1e-9
            assert op.remote.total == pytest.approx(op.link.total + op.rail.total)
            assert op.remote.total == pytest.approx(op.rows.total + op.metadata.total)
            assert op.remote.mean <= op.remote.max <= op.remote.total
            assert (us["rail"] == 0) == (size == 8)


def test_skew_costs_and_balance_says_so() -> None:
    shapes = {"hidden": 7168, "tokens": 1024}
    even, hot = predicted(8, 8, routing="W0", **shapes), predicted(8, 8, routing="W2", **shapes)
    assert even.balance["slots_max_over_mean"] == 1
    assert hot.balance["slots_max_over_mean"] > 3
    assert hot.ratio("alltoall") > 1.5 > 1.05 > even.ratio("alltoall")


def test_a_hierarchy_saves_rail_bytes_and_is_the_flat_pattern_in_one_domain() -> None:
    shapes = {"tokens": 1024, "hidden": 7168, "experts": 256, "top_k": 8}
    flat, two = predicted(16, 16, **shapes), predicted(16, 4, **shapes)
    assert flat.drawn["hybridep"] == flat.drawn["deepep"]
    rails = {name: two.drawn[name].dispatch.rail.total for name in PATTERNS}
    assert rails["hybridep"] < 0.7 * rails["deepep"] < rails["allgather"]
    assert rails["deepep"] == pytest.approx(rails["alltoall"], rel=0.01)
    assert two.choice(list(PATTERNS)) == "hybridep"


def test_choice_between_what_this_build_has() -> None:
    """Of collectives, with one slot a token and two ranks: half the tokens stay, so all-to-all. With all experts:
    all-gather moves no more and needs no send buffer in dispatch, but its combine gathers twice the rows. What moves
    the same rows and overlaps its passes is never behind."""
    found = predicted(2, 2, top_k=1)
    assert found.runnable == list(flexep.BACKENDS)
    assert found.choice(["allgather", "alltoall"]) == "alltoall"
    assert found.choice(found.runnable) == "deepep"
    many = predicted(2, 2, tokens=4096, hidden=7168, top_k=32)
    cost = {name: many.closed[name].dispatch.total_us for name in ("allgather", "alltoall")}
    assert cost["allgather"] < cost["alltoall"]
    assert found.choice([]) is None


def test_what_does_not_run_here_says_why() -> None:
    found = predicted(4, 4, wire="fp8")
    assert set(found.why_not) == set(PATTERNS)
    assert found.runnable == []
    assert "fp8" in found.why_not["alltoall"]
    assert "fp8" in found.why_not["deepep"]
    half = (
        found.closed["alltoall"].dispatch.rows.total / predicted(4, 4).closed["alltoall"].dispatch.rows.total
    )
    assert half == (64 + 4) / 128
    assert (
        found.closed["alltoall"].combine.rows.total == predicted(4, 4).closed["alltoall"].combine.rows.total
    )


def test_a_window_is_bounded_whatever_the_ranks() -> None:
    """The default budget of the rings, and the words, boards and records beside them, which grow with the ranks."""
    found = predicted(72, 8, tokens=4096, hidden=7168, experts=288, top_k=8)
    windows = {
        name: [b.worst for b in priced.memory if b.kind == "window"] for name, priced in found.drawn.items()
    }
    assert windows["allgather"] == windows["alltoall"] == []
    for name in ("deepep", "hybridep"):
        (window,) = windows[name]
        assert 8 << 20 < window < (32 << 20) + 72 * (128 << 10) + (1 << 20)


def test_2048_ranks_in_seconds() -> None:
    started = time.process_time()
    found = predicted(2048, 64, 1 << 20, tokens=4096, hidden=7168, experts=4096, top_k=8, routing="zipf")
    spent = time.process_time() - started
    assert found.sampling["tokens_drawn"] == 1 << 20
    assert found.sampling["tokens"] == 2048 * 4096
    assert not found.sampling["exact"]
    assert spent < 10, f"{spent:.1f} s of processor time"


@pytest.mark.parametrize(
    ("text", "shape"), [("nvl8", (8, 8)), ("NVL72", (72, 72)), ("9x8", (72, 8)), ("1x10", (10, 10))]
)
def test_topologies_by_name(text: str, shape: tuple[int, int]) -> None:
    assert parse_topology(text) == shape


@pytest.mark.parametrize("text", ["", "8", "x8", "0x8", "8x0", "2x2x2", "nvl9", "-1x8"])
def test_other_topologies_are_refused(text: str) -> None:
    with pytest.raises(ArgumentError, match="topology"):
        parse_topology(text)
