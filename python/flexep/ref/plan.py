"""Where every (source rank, token, slot) goes: the oracle's plan."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep.ref.world import World


@dataclass(frozen=True)
class RankPlan:
    """What one rank receives. All int64 on the CPU; `rows` is the static size, or the padded rows in use.

    Expert-major position -> its origin: `source_rank`, `source_token`, `source_slot`, `expert` [rows] (global
    id), -1 in padding and tail. Flat row -> its origin: `flat_rank`, `flat_token` [N], `expert_idx` [N, K]
    (local expert of slot k, -1 where slot k is not a kept row here); -1 in the static tail. `row_map` [rows]:
    flat row of a position, -1 likewise.
    """

    counts: torch.Tensor
    padded_counts: torch.Tensor
    dropped: torch.Tensor
    source_rank: torch.Tensor
    source_token: torch.Tensor
    source_slot: torch.Tensor
    expert: torch.Tensor
    flat_rank: torch.Tensor
    flat_token: torch.Tensor
    expert_idx: torch.Tensor
    row_map: torch.Tensor
    num_recv: int


@dataclass(frozen=True)
class Plan:
    """Both ends of every row. Home view, per source rank, -1 for empty and dropped slots:

    `slot_rank`, `slot_row`, `slot_local` [T, K]: destination rank, expert-major row and local expert there.
    `token_row` [T, R]: flat row of the token on each rank.
    """

    world: World
    ranks: list[RankPlan]
    slot_rank: list[torch.Tensor]
    slot_row: list[torch.Tensor]
    slot_local: list[torch.Tensor]
    token_row: list[torch.Tensor]


def kept_rows(world: World, counts: list[int]) -> list[int]:
    """Rows that each expert of one rank keeps: min(count, c) for the largest c that fits the capacity."""
    capacity = world.capacity_rows
    if capacity is None:
        return counts
    low, high = 0, max(counts, default=0)  # padded rows grow with c, so the largest c is found by bisection
    while low < high:
        c = (low + high + 1) // 2
        fits = sum(world.align(min(count, c)) for count in counts) <= capacity
        low, high = (c, high) if fits else (low, c - 1)
    return [min(count, low) for count in counts]


def make_plan(world: World, topk_idx: list[torch.Tensor]) -> Plan:
    """Plan of all ranks from every rank's topk_idx [T, K] (global expert, -1 empty)."""
    slots = torch.cat(
        [  # one line (source rank, token, slot, expert) a filled slot, in plan order inside an expert
            torch.cat([torch.full((len(at), 1), s), at, idx.long()[idx >= 0][:, None]], dim=1)
            for s, idx in enumerate(topk_idx)
            for at in [(idx >= 0).nonzero()]
        ]
    )
    by_expert = slots[torch.argsort(slots[:, 3], stable=True)]
    counts = torch.bincount(slots[:, 3], minlength=world.num_experts)
    of_expert = dict(enumerate(by_expert.split(counts.tolist())))
    home = [torch.full((3, *idx.shape), -1) for idx in topk_idx]
    token_row = [torch.full((len(idx), world.num_ranks), -1) for idx in topk_idx]
    ranks = [_rank_plan(world, rank, of_expert, home, token_row) for rank in range(world.num_ranks)]
    return Plan(world, ranks, [h[0] for h in home], [h[1] for h in home], [h[2] for h in home], token_row)


def _rank_plan(
    world: World,
    rank: int,
    of_expert: dict[int, torch.Tensor],
    home: list[torch.Tensor],
    token_row: list[torch.Tensor],
) -> RankPlan:
    """One rank's part; also writes this rank's rows into the home views."""
    experts = world.experts_of(rank)
    counts = [len(of_expert[e]) for e in experts]
    kept = kept_rows(world, counts)
    padded = [world.align(rows) for rows in kept]
    rows = sum(padded) if world.capacity_rows is None else world.capacity_rows
    origin = torch.full((rows, 4), -1)
    local_of_row = torch.full((rows,), -1)
    start = 0
    for local, e in enumerate(experts):
        origin[start : start + kept[local]] = of_expert[e][: kept[local]]
        local_of_row[start : start + kept[local]] = local
        start += padded[local]
    used = (origin[:, 0] >= 0).nonzero()[:, 0]
    source, token, slot, _ = origin[used].T

    # Received tokens in (source rank, source token) order, each once.
    stride = world.max_tokens + 1
    keys, flat_of_used = torch.unique(source * stride + token, return_inverse=True)
    num_recv = len(keys)
    flat_rows = num_recv if world.flat_rows is None else world.flat_rows
    flat_rank, flat_token = torch.full((flat_rows,), -1), torch.full((flat_rows,), -1)
    flat_rank[:num_recv], flat_token[:num_recv] = keys // stride, keys % stride
    expert_idx = torch.full((flat_rows, world.top_k), -1)
    expert_idx[flat_of_used, slot] = local_of_row[used]
    row_map = torch.full((rows,), -1)
    row_map[used] = flat_of_used

    for s in range(len(home)):
        mine = source == s
        where = (token[mine], slot[mine])
        home[s][0][where], home[s][1][where], home[s][2][where] = rank, used[mine], local_of_row[used[mine]]
        token_row[s][token[mine], rank] = flat_of_used[mine]
    as_tensor = lambda values: torch.tensor(values, dtype=torch.int64)  # noqa: E731
    return RankPlan(
        as_tensor(kept),
        as_tensor(padded),
        as_tensor(counts) - as_tensor(kept),
        origin[:, 0],
        origin[:, 1],
        origin[:, 2],
        origin[:, 3],
        flat_rank,
        flat_token,
        expert_idx,
        row_map,
        num_recv,
    )
