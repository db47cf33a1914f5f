"""Dispatch is a copy: rows and weights picked by the plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep.ref.plan import Plan


@dataclass(frozen=True)
class Received:
    """What dispatch returns on one rank. expert_major: x [rows, H], weights [rows]; flat: x [N, H], weights
    and expert_idx [N, K], row_map [rows]. Integers are int32, weights fp32 (None when none were given)."""

    x: torch.Tensor
    weights: torch.Tensor | None
    counts: torch.Tensor
    padded_counts: torch.Tensor
    dropped: torch.Tensor
    row_map: torch.Tensor
    expert_idx: torch.Tensor | None


def pick(sources: list[torch.Tensor], rank: torch.Tensor, *where: torch.Tensor) -> torch.Tensor:
    """out[i] = sources[rank[i]][where[0][i], ...]; zeros where rank is -1."""
    like = sources[0]
    out = torch.zeros((len(rank), *like.shape[len(where) :]), dtype=like.dtype)
    for r, source in enumerate(sources):
        mine = rank == r
        out[mine] = source[tuple(index[mine] for index in where)]
    return out


def dispatch_rank(
    plan: Plan, rank: int, xs: list[torch.Tensor], weights: list[torch.Tensor] | None
) -> Received:
    """Everything that `rank` receives from every rank's x [T, H] and topk_weights [T, K]."""
    p = plan.ranks[rank]
    counts, padded, dropped, row_map = (t.int() for t in (p.counts, p.padded_counts, p.dropped, p.row_map))
    if plan.world.layout == "expert_major":
        x = pick(xs, p.source_rank, p.source_token)
        w = None if weights is None else pick(weights, p.source_rank, p.source_token, p.source_slot)
        return Received(x, w, counts, padded, dropped, row_map, None)
    x = pick(xs, p.flat_rank, p.flat_token)
    w = None
    if weights is not None:
        w = pick(weights, p.flat_rank, p.flat_token)
        w[p.expert_idx < 0] = 0
    return Received(x, w, counts, padded, dropped, row_map, p.expert_idx.int())


def dispatch(plan: Plan, xs: list[torch.Tensor], weights: list[torch.Tensor] | None = None) -> list[Received]:
    """Dispatch on every rank."""
    return [dispatch_rank(plan, rank, xs, weights) for rank in range(plan.world.num_ranks)]
