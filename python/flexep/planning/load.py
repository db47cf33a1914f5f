"""How many tokens go where: by expectation, or counted by the real plan. Shape letters: R ranks, D domains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from flexep._native.plan import HEADER_INTS, PlanTable, count_slots, resolve
from flexep.config import needed_share
from flexep.planning.sample import Sample
from flexep.planning.topology import Topology
from flexep.planning.workload import Workload


@dataclass(frozen=True)
class Load:
    """float64 tensors, in tokens or rows.

    tokens_R: T of each rank. crossing_RR: distinct tokens of source s that rank r needs (its own included);
    crossing_RD: that domain d needs. slots_R: kept (token, slot) pairs on each rank; rows_R: its expert-major
    rows, padding and static tail included. dropped: slots over capacity, all ranks.
    """

    tokens_R: torch.Tensor
    crossing_RR: torch.Tensor
    crossing_RD: torch.Tensor
    slots_R: torch.Tensor
    rows_R: torch.Tensor
    dropped: float


def closed_form(work: Workload, topology: Topology) -> Load:
    """Uniform routing over distinct experts, T tokens on every rank, as expectations.

    A token needs a rank of L experts with P = 1 - C(E-L, K) / C(E, K), a domain likewise; padding is the
    expectation over a binomial number of slots an expert.
    """
    config, R, D = work.config, topology.ranks, topology.domains
    T, E, K = config.max_tokens, config.num_experts, config.top_k
    held_R = torch.bincount(torch.tensor(work.rank_of_expert), minlength=R)
    held_D = held_R.view(D, -1).sum(1)
    needs = {held: needed_share(E, held, K) for held in {*held_R.tolist(), *held_D.tolist()}}

    def crossing(held: torch.Tensor) -> torch.Tensor:
        odds = torch.tensor([needs[h] for h in held.tolist()], dtype=torch.float64)
        return T * odds.expand(R, len(held))

    slots_R = R * T * K * held_R.double() / E
    rows_R = held_R * _padded(R * T, E, K, config.alignment)
    capacity = config.capacity_rows
    kept_R = slots_R if capacity is None else slots_R.clamp(max=capacity)
    if capacity is not None:
        rows_R = torch.full_like(slots_R, capacity)
    return Load(
        torch.full((R,), float(T), dtype=torch.float64),
        crossing(held_R),
        crossing(held_D),
        kept_R,
        rows_R.double(),
        float((slots_R - kept_R).sum()),
    )


def counted(work: Workload, topology: Topology, sample: Sample) -> Load:
    """The real plan on the drawn routing: exact where every token was drawn, else scaled to all tokens.

    With a capacity, a rank needs a token only if it keeps a slot of it.
    """
    config, R = work.config, topology.ranks
    table = PlanTable(config.num_experts, R, work.rank_of_expert)
    by_domain = PlanTable(
        config.num_experts, topology.domains, [r // topology.domain_size for r in work.rank_of_expert]
    )
    tokens_R = torch.tensor(sample.tokens_R, dtype=torch.float64)
    drawn_R = torch.tensor([len(idx) for idx in sample.topk_idx], dtype=torch.float64)
    scale_R = tokens_R / drawn_R.clamp(min=1)
    slots_RE = torch.stack([_counts(idx, table)[0] for idx in sample.topk_idx]) * scale_R[:, None]
    # Sizes follow from sums over sources alone, so all of them may stand in the first row.
    counts_RE = torch.zeros(R, config.num_experts, dtype=torch.int32)
    counts_RE[0] = slots_RE.sum(0).round().to(torch.int32)
    resolved = resolve(counts_RE, table, config.alignment, config.capacity_rows)
    before_RE = slots_RE.cumsum(0) - slots_RE
    crossing_RR = torch.empty(R, R, dtype=torch.float64)
    crossing_RD = torch.empty(R, topology.domains, dtype=torch.float64)
    for s, drawn in enumerate(sample.topk_idx):
        idx = drawn
        if config.capacity_rows is not None:
            idx = _kept(drawn, table, before_RE[s], float(scale_R[s]), resolved.kept_E)
        crossing_RR[s] = _counts(idx, table)[1] * scale_R[s]
        crossing_RD[s] = _counts(idx, by_domain)[1] * scale_R[s]
    kept_R = torch.zeros(R, dtype=torch.float64).index_add(
        0, table.rank_of_place.long(), resolved.kept_E.double()
    )
    capacity = config.capacity_rows
    rows_R = resolved.rows_R.double() if capacity is None else torch.full_like(kept_R, capacity)
    return Load(tokens_R, crossing_RR, crossing_RD, kept_R, rows_R, float(resolved.dropped_E.sum()))


def _counts(topk_idx: torch.Tensor, table: PlanTable) -> tuple[torch.Tensor, ...]:
    """Slots per place [E] and distinct tokens per rank [R]."""
    return count_slots(topk_idx, table).said[HEADER_INTS:].split([table.num_experts, table.num_ranks])


def _kept(
    idx_TK: torch.Tensor, table: PlanTable, before_E: torch.Tensor, scale: float, kept_E: torch.Tensor
) -> torch.Tensor:
    """A source's expert ids, -1 where the slot comes after the kept rows of its expert. By place: `before_E` slots of
    the sources before this one, `kept_E` rows that are kept; each slot here stands for `scale` of them."""
    E = table.num_experts
    place = torch.where(idx_TK < 0, E, table.place_of_expert[idx_TK.clamp(min=0).long()].long()).flatten()
    order = place.argsort(stable=True)  # (place, token, slot): the order of rows
    counts = torch.bincount(place, minlength=E + 1)
    nth = torch.empty_like(place)
    nth[order] = torch.arange(len(place)) - (counts.cumsum(0) - counts)[place[order]]
    at = place.clamp(max=E - 1)
    kept = (place < E) & (before_E[at] + nth * scale < kept_E[at])
    return torch.where(kept.view(idx_TK.shape), idx_TK, -1)


def _padded(tokens: int, experts: int, top_k: int, alignment: int) -> float:
    """Expected rows of an expert after padding: alignment * sum over j of P(slots > j * alignment)."""
    draws, p = (tokens, top_k / experts) if top_k <= experts else (tokens * top_k, 1 / experts)
    mean = draws * p
    if p == 1:
        return float(math.ceil(mean / alignment) * alignment)
    if mean * (1 - p) > 4 * alignment**2:  # spread over many multiples: every remainder is as likely
        return mean + (alignment - 1) / 2
    most = min(draws, math.ceil(mean + 12 * math.sqrt(mean) + 20))
    n = torch.arange(most + 1, dtype=torch.float64)
    whole = torch.tensor(float(draws), dtype=torch.float64)
    log_ways = torch.lgamma(whole + 1) - torch.lgamma(n + 1) - torch.lgamma(whole - n + 1)
    odds = (log_ways + n * math.log(p) + (whole - n) * math.log1p(-p)).exp()
    return float((odds * (n / alignment).ceil() * alignment).sum())
