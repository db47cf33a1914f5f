"""The model reproduces floors that were worked out by hand: T = 4096, H = 7168, K = 8, E = 256, 370 GB/s,
4.3 TB/s, no padding. Each figure was rounded to what is written here."""

from __future__ import annotations

import pytest

from flexep.planning import Topology, closed_form, make_workload
from flexep.planning.movement import Scene
from flexep.planning.patterns import PATTERNS
from flexep.planning.terms import Operation, price


def operations(
    name: str, ranks: int, wire: str = "bf16", layout: str = "expert_major", alignment: int = 1
) -> tuple[Operation, Operation]:
    """Dispatch and combine of uniform routing in one domain."""
    work = make_workload(
        ranks=ranks,
        domain_size=ranks,
        tokens=4096,
        hidden=7168,
        experts=256,
        top_k=8,
        wire=wire,
        layout=layout,
        alignment=alignment,
    )
    topology = Topology(ranks=ranks, domain_size=ranks)
    pattern = PATTERNS[name](Scene(work, topology, closed_form(work, topology)))
    return price(pattern.dispatch, topology), price(pattern.combine, topology)


@pytest.mark.parametrize(
    ("ranks", "wire", "remote_mb", "link_us", "staging_us", "expand_us"),
    [
        (2, "bf16", 58.8, 159, 54, 137),
        (2, "fp8", 30.4, 82, 28, 70),
        (8, "bf16", 273.3, 738, 145, 182),
        (8, "fp8", 141.5, 382, 75, 94),
    ],
)
def test_dispatch(
    ranks: int, wire: str, remote_mb: float, link_us: float, staging_us: float, expand_us: float
) -> None:
    dispatch, _ = operations("alltoall", ranks, wire)
    # Worked out with 64 bytes of metadata a row; the plan's rows carry 4 (1 + 2K) = 68.
    assert dispatch.remote.max / 1e6 == pytest.approx(remote_mb, abs=0.11)
    assert dispatch.us("link") + dispatch.us("metadata") == pytest.approx(link_us, abs=1)
    assert dispatch.us("staging") == pytest.approx(staging_us, abs=0.5)
    assert dispatch.us("expand") == pytest.approx(expand_us, abs=0.6)


@pytest.mark.parametrize(("ranks", "expert_us", "final_us"), [(2, 137, 41), (8, 182, 86)])
def test_combine(ranks: int, expert_us: float, final_us: float) -> None:
    _, combine = operations("alltoall", ranks)
    assert combine.us("expert reduce") == pytest.approx(expert_us, abs=0.6)
    assert combine.us("final reduce") == pytest.approx(final_us, abs=0.5)


def test_separate_passes_and_overlapped_ones() -> None:
    """350 us of passes one after another at two ranks; 159 on the wire where they overlap, and 27 + 137 in memory,
    of which the first put x into the window."""
    separate, _ = operations("alltoall", 2)
    overlapped, _ = operations("deepep", 2)
    for operation, want in ((separate, 350), (overlapped, 164)):
        beside = operation.us("latency") + operation.us("plan")
        assert operation.total_us - beside == pytest.approx(want, abs=1)
    assert overlapped.us("link") + overlapped.us("metadata") == pytest.approx(159, abs=1)
    assert overlapped.us("staging") == pytest.approx(27, abs=0.5)


def test_padding_at_alignment_128() -> None:
    """582 MB written instead of 483 (one kind of row, 14,336 bytes)."""
    work = {"ranks": 2, "domain_size": 2, "tokens": 4096, "hidden": 7168, "experts": 256, "top_k": 8}
    written = [
        float(closed_form(make_workload(**work, alignment=a), Topology(ranks=2, domain_size=2)).rows_R.max())
        for a in (16, 128)
    ]
    assert written[0] * 14336 / 1e6 == pytest.approx(483, abs=1.5)
    assert written[1] * 14336 / 1e6 == pytest.approx(582, abs=6)


@pytest.mark.parametrize(
    ("experts", "ranks", "top_k", "copies"),
    [
        (256, 2, 8, 0.997),
        (64, 2, 6, 0.988),
        (8, 2, 2, 0.786),
        (256, 4, 8, 2.711),
        (256, 8, 8, 4.633),
        (256, 64, 8, 7.556),
        (288, 72, 8, 7.604),
    ],
)
def test_remote_copies_a_token(experts: int, ranks: int, top_k: int, copies: float) -> None:
    work = make_workload(ranks=ranks, domain_size=ranks, tokens=1, hidden=8, experts=experts, top_k=top_k)
    load = closed_form(work, Topology(ranks=ranks, domain_size=ranks))
    remote = load.crossing_RR.sum(1) - load.crossing_RR.diagonal()
    assert float(remote[0]) == pytest.approx(copies, abs=6e-4)


def test_worked_example_of_the_docs() -> None:
    """NVL72 in docs/planning.md, figure by figure."""
    work = make_workload(ranks=72, domain_size=72, tokens=4096, hidden=7168, experts=288, top_k=8)
    topology = Topology(ranks=72, domain_size=72)
    scene = Scene(work, topology, closed_form(work, topology))
    found = {name: PATTERNS[name](scene) for name in PATTERNS}
    dispatch = {name: price(pattern.dispatch, topology) for name, pattern in found.items()}
    alltoall = dispatch["alltoall"]
    assert round(alltoall.remote_rows / 72) == 31_147
    assert alltoall.rows.max / 1e6 == pytest.approx(446.5, abs=0.05)
    assert alltoall.metadata.max / 1e6 == pytest.approx(2.2, abs=0.05)
    said = {"link": 1207, "metadata": 6, "staging": 211, "expand": 215}
    assert {name: round(alltoall.us(name)) for name in said} == said
    assert round(price(found["alltoall"].combine, topology).us("final reduce")) == 119
    assert [round(dispatch[name].total_us) for name in ("alltoall", "deepep")] == [1645, 1219]
    assert dispatch["allgather"].total_us == pytest.approx(11_600, abs=50)
