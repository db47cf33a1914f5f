"""Loads: the closed form against enumeration and drawing, scaling of a sample, the law of the fast draws."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from flexep.config import needed_share
from flexep.planning import Topology, closed_form, counted, draw, make_workload
from flexep.planning.load import _padded
from flexep.planning.sample import BY_RANK, FastSite
from flexep.testing.routing import ROUTERS


@pytest.mark.parametrize(
    ("experts", "held", "top_k"), [(5, 2, 3), (6, 1, 6), (4, 4, 1), (4, 0, 2), (7, 3, 5)]
)
def test_needed_by_enumeration(experts: int, held: int, top_k: int) -> None:
    rows = list(itertools.combinations(range(experts), top_k))
    hit = sum(any(e < held for e in row) for row in rows)
    assert needed_share(experts, held, top_k) == pytest.approx(hit / len(rows), abs=1e-12)


def test_needed_with_repetition() -> None:
    rows = list(itertools.product(range(3), repeat=4))
    hit = sum(any(e < 1 for e in row) for row in rows)
    assert needed_share(3, 1, 4) == pytest.approx(hit / len(rows), abs=1e-12)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "alignment"), [(6, 5, 2, 4), (9, 4, 1, 1), (3, 2, 4, 16)]
)
def test_padded_by_binomial(tokens: int, experts: int, top_k: int, alignment: int) -> None:
    draws, p = (tokens, top_k / experts) if top_k <= experts else (tokens * top_k, 1 / experts)
    want = sum(
        math.comb(draws, n) * p**n * (1 - p) ** (draws - n) * alignment * -(-n // alignment)
        for n in range(draws + 1)
    )
    assert _padded(tokens, experts, top_k, alignment) == pytest.approx(want, rel=1e-9)


def test_padded_is_continuous_where_it_changes_formula() -> None:
    """Just below and just above the number of tokens from which every remainder is taken as equally likely."""
    at = math.ceil(4 * 16**2 / (0.125 * 0.875))
    below, above = _padded(at - 8, 64, 8, 16), _padded(at + 8, 64, 8, 16)
    assert above - below == pytest.approx(16 * 0.125, abs=0.01)


def test_padded_when_every_token_takes_every_expert() -> None:
    assert _padded(10, 4, 4, 16) == 16


@pytest.mark.parametrize("routing", ["zipf", "W4", "W7"])
def test_a_sample_stands_for_all_tokens(routing: str) -> None:
    """Totals of a scaled sample: slots exactly, crossings within a few percent of all tokens' count."""
    work = make_workload(
        ranks=8, domain_size=4, tokens=2048, hidden=8, experts=32, top_k=4, routing=routing, alignment=1
    )
    topology = Topology(ranks=8, domain_size=4)
    part, whole = draw(work, 4096), draw(work, 10**6)
    assert (part.exact, whole.exact) == (False, True)
    assert part.tokens_R == whole.tokens_R
    assert part.drawn <= 4096 + 8
    a, b = counted(work, topology, part), counted(work, topology, whole)
    slots = 4 * sum(whole.tokens_R)
    assert float(b.slots_R.sum()) == slots
    assert float(a.slots_R.sum()) == pytest.approx(slots, abs=32)  # rounded once an expert
    assert float(a.crossing_RR.sum()) == pytest.approx(float(b.crossing_RR.sum()), rel=0.05)
    assert float(a.crossing_RD.sum()) == pytest.approx(float(b.crossing_RD.sum()), rel=0.05)


def test_closed_form_agrees_with_drawing() -> None:
    work = make_workload(ranks=6, domain_size=3, tokens=4096, hidden=8, experts=20, top_k=4)
    topology = Topology(ranks=6, domain_size=3)
    uniform, drawn = closed_form(work, topology), counted(work, topology, draw(work, 10**6))
    spread = 6 * math.sqrt(4096) / 2
    assert float((uniform.crossing_RR - drawn.crossing_RR).abs().max()) < spread
    assert float((uniform.crossing_RD - drawn.crossing_RD).abs().max()) < spread
    assert float((uniform.slots_R - drawn.slots_R).abs().max()) < 4 * spread * math.sqrt(6)
    assert float((uniform.rows_R - drawn.rows_R).abs().max()) < 4 * spread * math.sqrt(6) + 4 * 16


def site(kind: type, tokens: int, odds: int, seed: int) -> FastSite:
    gen = torch.Generator().manual_seed(seed)
    return kind(tokens, 3, tuple(range(odds)), odds, 0, 0, torch.Generator(), gen)


def test_fast_draws_follow_the_law_of_sampling_without_replacement() -> None:
    odds_E, n = torch.tensor([0.0, 5.0, 1.0, 2.0, 0.0, 0.5]), 40_000
    rows = site(FastSite, n, 6, 3).draw(odds_E).tolist()
    share = (odds_E / odds_E.sum()).tolist()
    seen: dict[tuple[int, ...], int] = {}
    for row in rows:
        seen[tuple(row)] = seen.get(tuple(row), 0) + 1
    possible = list(itertools.permutations([1, 2, 3, 5], 3))
    assert set(seen) <= set(possible)
    for a, b, c in possible:
        p = share[a] * share[b] / (1 - share[a]) * share[c] / (1 - share[a] - share[b])
        assert seen.get((a, b, c), 0) == pytest.approx(n * p, abs=5 * math.sqrt(n * p) + 5)


def test_fast_draws_repeat_where_too_few_experts_have_odds() -> None:
    chosen = site(FastSite, 50, 6, 0).draw(torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0, 0.0]))
    assert set(chosen.flatten().tolist()) == {1, 4}
    assert site(FastSite, 2, 6, 0).draw(torch.zeros(6)).tolist() == [[-1] * 3] * 2


@pytest.mark.parametrize("routing", list(ROUTERS))
def test_every_routing_is_drawn(routing: str) -> None:
    work = make_workload(ranks=4, domain_size=2, tokens=32, hidden=8, experts=9, top_k=3, routing=routing)
    one, two = draw(work, 10**6), draw(work, 10**6)
    for idx, again, tokens in zip(one.topk_idx, two.topk_idx, one.tokens_R, strict=True):
        assert idx.shape == (tokens, 3)
        assert idx.equal(again)
        assert bool(((idx >= 0) & (idx < 9)).all())
    assert routing not in BY_RANK or not one.topk_idx[0].equal(one.topk_idx[1])
