"""A case's tensors, from a keyed counter: any rank can make any other rank's inputs, anywhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from flexep.ref import Plan, World, make_plan
from flexep.testing.case import DTYPES, Case
from flexep.testing.routing import ROUTERS, Site


def keyed(case: Case, *key: object) -> torch.Generator:
    """Random numbers that depend on the case's seed and the key alone."""
    digest = hashlib.sha256(repr((case.seed, *key)).encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


def rank_tokens(case: Case) -> list[int]:
    """T of every rank; the largest is `case.tokens`."""
    spread = "ragged" if case.routing == "W4_ragged_sources" and case.spread == "equal" else case.spread
    if spread == "ragged":
        tokens = torch.randint(case.tokens + 1, (case.ranks,), generator=keyed(case, "tokens")).tolist()
        tokens[case.seed % case.ranks] = case.tokens
        return tokens
    if spread == "only_first":
        return [case.tokens] + [0] * (case.ranks - 1)
    if spread == "last_empty" and case.ranks > 1:
        return [case.tokens] * (case.ranks - 1) + [0]
    return [case.tokens] * case.ranks


def placement(case: Case) -> tuple[int, ...] | None:
    """Rank of each expert; None is the default, contiguous."""
    if case.placement == "round_robin":
        return tuple(e % case.ranks for e in range(case.experts))
    if case.ranks > 1 and (case.placement == "hole" or case.routing == "W5_zero_expert_rank"):
        empty = case.seed % case.ranks  # this rank has no expert
        others = [r for r in range(case.ranks) if r != empty]
        return tuple(others[e * len(others) // case.experts] for e in range(case.experts))
    return None


def topk_indices(case: Case, world: World, step: int) -> list[torch.Tensor]:
    """topk_idx [T, K] int64 of every rank."""
    idx = []
    for rank, tokens in enumerate(rank_tokens(case)):
        own = keyed(case, "routing", rank, step)
        site = Site(
            tokens, case.top_k, world.rank_of_expert, case.ranks, rank, step, keyed(case, "routing"), own
        )
        chosen = ROUTERS[case.routing](site)
        chosen[torch.rand(chosen.shape, generator=own) < case.empty] = -1
        idx.append(chosen)
    return idx


def make_world(case: Case) -> World:
    """The dispatcher's arguments; a capacity in words becomes rows, from the routing of the first step."""
    world = World(
        case.ranks,
        case.experts,
        case.hidden,
        case.top_k,
        max(1, case.tokens + case.headroom),
        DTYPES[case.dtype],
        None if case.combine_wire is None else DTYPES[case.combine_wire],
        case.domain_size,
        case.layout,
        case.alignment,
        None,
        placement(case),
    )
    if case.capacity == "none":
        return world
    least = max(len(world.experts_of(r)) for r in range(case.ranks)) * case.alignment
    needed = max(int(p.padded_counts.sum()) for p in make_plan(world, topk_indices(case, world, 0)).ranks)
    rows = {"full": needed, "one_over": needed - 1, "far_over": needed // 3}.get(case.capacity)
    if rows is not None:
        return replace(world, capacity=max(least, rows, 1))
    return replace(world, capacity=max(0.75, least / (world.max_tokens * world.top_k)))


@dataclass(frozen=True)
class Inputs:
    """What every rank passes in at one step, on the CPU. x, dz [T, H]; weights [T, K] fp32; dw: a gradient
    for r.weights, by receiving rank and in its shape."""

    x: list[torch.Tensor]
    weights: list[torch.Tensor]
    dz: list[torch.Tensor]
    dw: list[torch.Tensor]


def make_inputs(case: Case, plan: Plan, step: int, data: int) -> Inputs:
    """Inputs of all ranks for the `data`-th use of the plan of `step`."""
    dtype, xs, ws, dzs, dws = DTYPES[case.dtype], [], [], [], []
    for rank, tokens in enumerate(rank_tokens(case)):
        gen = keyed(case, "data", rank, step, data)
        x = torch.randn(tokens, case.hidden, generator=gen).to(dtype)
        if case.payload == "nonfinite" and tokens:
            x[0, 0], x[tokens // 2, -1], x[-1, 1] = torch.nan, torch.inf, -torch.inf
        xs.append(x)
        w = torch.rand(tokens, case.top_k, generator=gen) - 0.25
        w[torch.rand(w.shape, generator=gen) < 0.1] = 0.0  # a weight of exactly zero is a weight
        ws.append(w)
        dzs.append(torch.randn(tokens, case.hidden, generator=gen).to(dtype))
        p = plan.ranks[rank]
        shape = p.expert_idx.shape if case.layout == "flat" else p.expert.shape
        dws.append(torch.randn(shape, generator=gen))
    return Inputs(xs, ws, dzs, dws)
