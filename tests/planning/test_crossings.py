"""Crossings against a walk over every token, and what they must conserve."""

from __future__ import annotations

import pytest
import torch

from flexep.planning import Topology, counted, draw, make_workload
from flexep.planning.crossings import Crossings, by_rail, direct, to_everyone
from flexep.planning.movement import Scene
from flexep.planning.patterns import hybridep

WORLDS = [(1, 4), (4, 1), (2, 2), (3, 2), (2, 3)]  # domains x ranks


def tokens_of(domains: int, size: int, seed: int) -> tuple[Topology, Scene, list[list[set[int]]]]:
    """A world with uneven routing, and the ranks that each token of each source needs."""
    R = domains * size
    work = make_workload(
        ranks=R, domain_size=size, tokens=20, hidden=8, experts=2 * R + 1, top_k=3, routing="W2", seed=seed
    )
    topology, sample = Topology(ranks=R, domain_size=size), draw(work, 10**6)
    needs = [[{work.rank_of_expert[e] for e in row} for row in idx.tolist()] for idx in sample.topk_idx]
    return topology, Scene(work, topology, counted(work, topology, sample)), needs


def walk(topology: Topology, hops: list[tuple[int, int]]) -> dict[str, list[float]]:
    """Rows on every wire after these hops from rank to rank; a hop to oneself moves nothing."""
    names = ("link_send", "link_recv", "rail_send", "rail_recv")
    out = {name: [0.0] * topology.ranks for name in names}
    for source, to in hops:
        if source != to:
            wire = "link" if source // topology.domain_size == to // topology.domain_size else "rail"
            out[f"{wire}_send"][source] += 1
            out[f"{wire}_recv"][to] += 1
    return out


def as_dict(rows: Crossings) -> dict[str, list[float]]:
    return {
        name: getattr(rows, name).tolist() for name in ("link_send", "link_recv", "rail_send", "rail_recv")
    }


@pytest.mark.parametrize(("domains", "size"), WORLDS)
def test_direct(domains: int, size: int) -> None:
    topology, scene, needs = tokens_of(domains, size, 1)
    hops = [(s, r) for s, tokens in enumerate(needs) for ranks in tokens for r in ranks]
    assert as_dict(direct(topology, scene.load.crossing_RR)) == walk(topology, hops)


def relay_hops(topology: Topology, needs: list[list[set[int]]]) -> list[tuple[int, int]]:
    S, hops = topology.domain_size, []
    for s, tokens in enumerate(needs):
        for ranks in tokens:
            for domain in {r // S for r in ranks}:
                relay = domain * S + s % S
                hops += [(s, relay), *((relay, r) for r in ranks if r // S == domain)]
    return hops


@pytest.mark.parametrize(("domains", "size"), WORLDS)
def test_by_rail(domains: int, size: int) -> None:
    topology, scene, needs = tokens_of(domains, size, 2)
    rows = by_rail(topology, scene.load.crossing_RR, scene.load.crossing_RD)
    assert as_dict(rows) == walk(topology, relay_hops(topology, needs))


@pytest.mark.parametrize(("domains", "size"), WORLDS)
def test_to_everyone(domains: int, size: int) -> None:
    topology = Topology(ranks=domains * size, domain_size=size)
    rows_R = torch.arange(1.0, topology.ranks + 1, dtype=torch.float64)
    hops = [(s, r) for s in range(topology.ranks) for r in range(topology.ranks) for _ in range(s + 1)]
    assert as_dict(to_everyone(topology, rows_R)) == walk(topology, hops)


@pytest.mark.parametrize(("domains", "size"), [(2, 2), (3, 2), (2, 3)])
def test_reductions_of_the_relay_and_of_the_source(domains: int, size: int) -> None:
    """Rows that the hierarchical combine reads and writes, counted token by token."""
    topology, scene, needs = tokens_of(domains, size, 3)
    relay, final = [0] * topology.ranks, [0] * topology.ranks
    for s, tokens in enumerate(needs):
        for ranks in tokens:
            final[s] += 1  # z
            for domain in {r // size for r in ranks}:
                inside = sum(r // size == domain for r in ranks)
                if domain == s // size:
                    final[s] += inside
                else:
                    relay[domain * size + s % size] += inside + 1
                    final[s] += 1
    passes = {p.name: p.bytes_R for p in hybridep(scene).combine.passes}
    assert (passes["relay"] / scene.home).tolist() == relay
    assert (passes["final reduce"] / scene.home).tolist() == final


def test_reversed_swaps_directions_and_nothing_else() -> None:
    topology, scene, _ = tokens_of(2, 3, 4)
    rows = direct(topology, scene.load.crossing_RR)
    back = direct(topology, scene.load.crossing_RR.T.contiguous())
    assert as_dict(rows.reversed()) == as_dict(back)
