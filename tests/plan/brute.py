"""The plan's integers by the plainest reading of the rules: lists and loops, one process plays every rank."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep._native.plan import PlanTable

Slot = tuple[int, int, int]  # source rank, token, slot


@dataclass(frozen=True)
class World:
    """A routing of all ranks and the rules that apply to it."""

    topk_idx: list[torch.Tensor]  # [T, K] int32 of each rank
    table: PlanTable
    alignment: int
    capacity: int | None

    @property
    def num_ranks(self) -> int:
        return self.table.num_ranks


def padded(count: int, alignment: int) -> int:
    return (count + alignment - 1) // alignment * alignment


def slots_by_place(world: World) -> list[list[Slot]]:
    """The slots of each place in plan order: source rank, token, slot."""
    places: list[list[Slot]] = [[] for _ in range(world.table.num_experts)]
    place_of_expert = world.table.place_of_expert.tolist()
    for s, idx in enumerate(world.topk_idx):
        for t, row in enumerate(idx.tolist()):
            for k, expert in enumerate(row):
                if expert >= 0:
                    places[place_of_expert[expert]].append((s, t, k))
    return places


def largest_cut(world: World, counts: list[int]) -> int:
    """The kept-set rule by trying every c."""
    if world.capacity is None:
        return 2**31 - 1
    return max(
        c
        for c in range(max(counts, default=0) + 1)
        if sum(padded(min(n, c), world.alignment) for n in counts) <= world.capacity
    )


def rows_of_slots(world: World) -> dict[Slot, tuple[int, int]]:
    """Kept slot -> (rank, expert-major row)."""
    out: dict[Slot, tuple[int, int]] = {}
    places = slots_by_place(world)
    for rank in range(world.num_ranks):
        mine = places[world.table.places(rank)]
        cut = largest_cut(world, [len(slots) for slots in mine])
        row = 0
        for slots in mine:
            kept = slots[:cut]
            out.update({slot: (rank, row + i) for i, slot in enumerate(kept)})
            row += padded(len(kept), world.alignment)
    return out


def sent_tokens(world: World, source: int) -> list[list[int]]:
    """For each rank, the tokens of `source` that have a kept slot there, in order."""
    rows = rows_of_slots(world)
    by_rank: list[list[int]] = [[] for _ in range(world.num_ranks)]
    for t in range(world.topk_idx[source].shape[0]):
        ranks = {rank for (s, token, _), (rank, _) in rows.items() if (s, token) == (source, t)}
        for rank in ranks:
            by_rank[rank].append(t)
    return by_rank
