"""Routing for the model: the conformance routings, drawn fast enough for thousands of ranks."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch

from flexep.planning.workload import Workload
from flexep.testing.inputs import keyed
from flexep.testing.routing import ROUTERS, Site

BY_RANK = {"own_rank", "W0_balanced"}  # routings in which a token's choices depend on its rank


class FastSite(Site):
    """Draws in O(T K log E) instead of O(T E): the same law as `Site`, other random numbers."""

    def draw(self, odds_E: torch.Tensor) -> torch.Tensor:
        """topk_idx [T, K] by odds, distinct in a row where enough have odds: a slot that repeats an earlier
        one of its row is drawn again, which is sampling without replacement, slot after slot."""
        possible = (odds_E > 0).nonzero()[:, 0]
        if self.tokens == 0 or len(possible) == 0:
            return torch.full((self.tokens, self.top_k), -1)
        edges = odds_E.double().cumsum(0)

        def pick(count: int) -> torch.Tensor:
            at = torch.rand(count, dtype=torch.float64, generator=self.own) * edges[-1]
            return torch.searchsorted(edges, at, right=True).clamp_(max=int(possible[-1]))

        chosen = pick(self.tokens * self.top_k).view(self.tokens, self.top_k)
        if len(possible) < self.top_k:
            return chosen
        for k in range(1, self.top_k):
            again = (chosen[:, :k] == chosen[:, k : k + 1]).any(1).nonzero()[:, 0]
            while len(again):
                chosen[again, k] = pick(len(again))
                again = again[(chosen[again, :k] == chosen[again, k : k + 1]).any(1)]
        return chosen


@dataclass(frozen=True)
class Sample:
    """Drawn expert ids, int32 [n, K] a rank, standing for `tokens_R` tokens a rank (n = T when exact)."""

    topk_idx: list[torch.Tensor]
    tokens_R: list[int]

    @property
    def drawn(self) -> int:
        """Tokens drawn, over all ranks."""
        return sum(len(idx) for idx in self.topk_idx)

    @property
    def exact(self) -> bool:
        """Every token was drawn."""
        return self.drawn == sum(self.tokens_R)


def draw(work: Workload, samples: int) -> Sample:
    """Routing of every rank: all tokens if there are at most `samples`, else the same share of every rank's,
    at least one token a rank."""
    tokens_R, case = work.tokens_R, work.case
    share = min(1.0, samples / max(sum(tokens_R), 1))
    drawn_R = [math.ceil(tokens * share) for tokens in tokens_R]
    first = FastSite(
        sum(drawn_R),
        case.top_k,
        work.rank_of_expert,
        case.ranks,
        0,
        0,
        keyed(case, "routing"),
        keyed(case, "own"),
    )
    router = ROUTERS[case.routing]
    if case.routing not in BY_RANK:
        return Sample(list(router(first).to(torch.int32).split(drawn_R)), tokens_R)
    topk_idx = []
    for rank, drawn in enumerate(drawn_R):
        site = copy.copy(first)
        site.rank, site.tokens, site.own = rank, drawn, keyed(case, "own", rank)
        topk_idx.append(router(site).to(torch.int32))
    return Sample(topk_idx, tokens_R)
