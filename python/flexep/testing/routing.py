"""Who chooses which expert: the routings of the conformance list and the named workloads."""

from __future__ import annotations

from collections.abc import Callable

import torch

Router = Callable[["Site"], torch.Tensor]


class Site:
    """Where a routing is drawn: one rank's T tokens at one step, and the keyed random numbers for it.

    `common` draws the same on all ranks (a hot expert is hot for everybody), `own` differs by rank.
    """

    def __init__(
        self,
        tokens: int,
        top_k: int,
        rank_of_expert: tuple[int, ...],
        ranks: int,
        rank: int,
        step: int,
        common: torch.Generator,
        own: torch.Generator,
    ) -> None:
        self.tokens, self.top_k, self.ranks, self.rank, self.step = tokens, top_k, ranks, rank, step
        self.rank_of_expert = torch.tensor(rank_of_expert)
        self.experts = len(rank_of_expert)
        self.common, self.own = common, own

    def one(self, upper: int) -> int:
        """A number below `upper` that all ranks agree on."""
        return int(torch.randint(upper, (1,), generator=self.common))

    def on_rank(self, rank: int) -> torch.Tensor:
        return (self.rank_of_expert == rank).nonzero()[:, 0]

    def busy_rank(self) -> int:
        """A rank that has an expert, agreed on by all."""
        return int(self.rank_of_expert[self.one(self.experts)])

    def draw(self, odds_E: torch.Tensor) -> torch.Tensor:
        """topk_idx [T, K] by odds: distinct experts in a row where enough have odds, else with repetition."""
        if self.tokens == 0 or not bool((odds_E > 0).any()):
            return torch.full((self.tokens, self.top_k), -1)
        repeat = int((odds_E > 0).sum()) < self.top_k
        odds = odds_E.double().expand(self.tokens, -1)
        return torch.multinomial(odds, self.top_k, replacement=repeat, generator=self.own)

    def mix(self, share: float, hot_E: torch.Tensor) -> torch.Tensor:
        """Every slot goes to a hot expert with probability `share`, else to any."""
        cold, hot = self.draw(torch.ones(self.experts)), self.draw(hot_E.float())
        take = torch.rand(cold.shape, generator=self.own) < share
        return torch.where(take & (hot >= 0), hot, cold)


def _among(site: Site, experts: torch.Tensor, but: bool = False) -> torch.Tensor:
    """Odds 1 for these experts (or for all others)."""
    odds_E = torch.full((site.experts,), 1.0 if but else 0.0)
    odds_E[experts] = 0.0 if but else 1.0
    return odds_E


def _imbalance(factor: float | None) -> Router:
    """One rank gets exactly `factor` times an even share of the slots (as far as one rank can), the rest is
    even."""

    def route(site: Site) -> torch.Tensor:
        slots = site.tokens * site.top_k
        hot_rank = site.busy_rank()
        hot_slots = min(slots, round(slots * (factor or site.ranks) / site.ranks))
        hot, cold = site.on_rank(hot_rank), (site.rank_of_expert != hot_rank).nonzero()[:, 0]
        cold = cold if len(cold) else hot
        flat = torch.cat(
            [hot[torch.arange(hot_slots) % len(hot)], cold[torch.arange(slots - hot_slots) % len(cold)]]
        )
        return flat[torch.randperm(slots, generator=site.own)].view(site.tokens, site.top_k)

    return route


def _one_expert(site: Site) -> torch.Tensor:
    return torch.full((site.tokens, site.top_k), site.one(site.experts))


def _duplicates(site: Site) -> torch.Tensor:
    pair = torch.randint(site.experts, (site.tokens, 2), generator=site.own)
    return pair.gather(1, torch.randint(2, (site.tokens, site.top_k), generator=site.own))


def _balanced(site: Site) -> torch.Tensor:
    slots = torch.arange(site.tokens * site.top_k).view(site.tokens, site.top_k)
    return (slots + site.rank * site.top_k) % site.experts


def _spread_hot(site: Site) -> torch.Tensor:
    first = [int(e[0]) for r in range(site.ranks) if len(e := site.on_rank(r))]
    return site.mix(0.8, _among(site, torch.tensor(first)))


def _hot_experts(site: Site) -> torch.Tensor:
    start, count = site.one(site.experts), max(1, site.experts // 10)
    return site.mix(0.8, _among(site, (start + torch.arange(count)) % site.experts))


def _rotating(site: Site) -> torch.Tensor:
    return site.mix(0.7, _among(site, torch.tensor([(site.one(site.experts) + site.step) % site.experts])))


def _burst(site: Site) -> torch.Tensor:
    """Runs of neighbouring tokens choose the same experts."""
    choice = site.draw(torch.ones(site.experts))
    return choice[torch.arange(site.tokens) // 16 * 16]


def _uniform(site: Site) -> torch.Tensor:
    return site.draw(torch.ones(site.experts))


ROUTERS: dict[str, Router] = {
    "uniform": _uniform,
    "zipf": lambda s: s.draw(1.0 / (1 + torch.randperm(s.experts, generator=s.common).double()) ** 1.2),
    "one_expert": _one_expert,
    "own_rank": lambda s: s.draw(_among(s, s.on_rank(s.rank))),
    "one_rank": lambda s: s.draw(_among(s, s.on_rank(s.busy_rank()))),
    "expert_empty": lambda s: s.draw(_among(s, torch.tensor([s.one(s.experts)]), but=True)),
    "rank_empty": lambda s: s.draw(_among(s, s.on_rank(s.busy_rank()), but=True)),
    "duplicates": _duplicates,
    "imbalance_1": _imbalance(1.0),
    "imbalance_1.5": _imbalance(1.5),
    "imbalance_2": _imbalance(2.0),
    "imbalance_4": _imbalance(4.0),
    "imbalance_R": _imbalance(None),
    "W0_balanced": _balanced,
    "W1_hot_experts": _hot_experts,
    "W2_hot_rank": lambda s: s.mix(0.6, _among(s, s.on_rank(s.busy_rank()))),
    "W3_spread_hot": _spread_hot,
    "W4_ragged_sources": _uniform,  # the case's tokens are ragged, see inputs.py
    "W5_zero_expert_rank": _uniform,  # the case's placement leaves a rank without experts, see inputs.py
    "W6_rotating_hot": _rotating,
    "W7_burst": _burst,
}
