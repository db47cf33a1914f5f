"""A second oracle, dumber than the first: Python loops over single numbers. Only for tiny worlds."""

from __future__ import annotations

import numpy as np
import torch

from flexep.ref import World

Slot = tuple[int, int, int]  # source rank, token, slot


def round_to(value: float, dtype: torch.dtype) -> np.float32:
    return np.float32(torch.tensor(float(value), dtype=torch.float32).to(dtype).float().item())


def kept_slots(world: World, topk_idx: list[torch.Tensor]) -> dict[int, list[Slot]]:
    """Expert -> its kept slots in row order."""
    slots: dict[int, list[Slot]] = {e: [] for e in range(world.num_experts)}
    for s, idx in enumerate(topk_idx):
        for t, row in enumerate(idx.tolist()):
            for k, e in enumerate(row):
                if e >= 0:
                    slots[e].append((s, t, k))
    if world.capacity_rows is None:
        return slots
    kept = {}
    for r in range(world.num_ranks):
        experts = [e for e in range(world.num_experts) if world.rank_of_expert[e] == r]
        best = 0
        for c in range(1 + max([len(slots[e]) for e in experts], default=0)):
            rows = 0
            for e in experts:
                n = min(len(slots[e]), c)
                while n % world.alignment:
                    n += 1
                rows += n
            if rows <= world.capacity_rows:
                best = c
        kept.update({e: slots[e][:best] for e in experts})
    return kept


def rows_of(world: World, kept: dict[int, list[Slot]], rank: int) -> list[Slot | None]:
    """Expert-major rows of a rank, None for padding and tail."""
    rows: list[Slot | None] = []
    for e in range(world.num_experts):
        if world.rank_of_expert[e] == rank:
            rows += kept[e]
            while len(rows) % world.alignment:
                rows.append(None)
    while world.capacity_rows is not None and len(rows) < world.capacity_rows:
        rows.append(None)
    return rows


def flat_of(world: World, kept: dict[int, list[Slot]], rank: int) -> list[tuple[int, int]]:
    """(source rank, token) of the flat rows of a rank."""
    return sorted(
        {(s, t) for e, slots in kept.items() if world.rank_of_expert[e] == rank for s, t, _ in slots}
    )


def expert_of(kept: dict[int, list[Slot]], slot: Slot) -> int:
    """Expert of a kept slot, or -1."""
    return next((e for e, slots in kept.items() if slot in slots), -1)


def add(terms: list[np.float32]) -> np.float32:
    """Sum in order, starting from the first term; +0 of nothing."""
    if not terms:
        return np.float32(0)
    total = terms[0]
    for term in terms[1:]:
        total = np.float32(total + term)
    return total


def nest(world: World, partial: dict[int, np.float32], wire: torch.dtype, out: torch.dtype) -> np.float32:
    """z from unrounded partial sums by rank (only the ranks that hold a row)."""
    rounded = {r: round_to(p, wire) for r, p in partial.items()}
    size = world.domain_size
    if size is not None:
        domains = sorted({r // size for r in rounded})
        rounded = {
            d: round_to(add([rounded[r] for r in sorted(rounded) if r // size == d]), wire) for d in domains
        }
    return round_to(add([rounded[r] for r in sorted(rounded)]), out)


def combine(
    world: World,
    kept: dict[int, list[Slot]],
    num_tokens: list[int],
    ys: list[torch.Tensor],
    weights: dict[Slot, float] | None,
    wire: torch.dtype,
) -> list[torch.Tensor]:
    """z of every rank from expert-major rows."""
    out = [torch.zeros(t, world.hidden, dtype=world.dtype) for t in num_tokens]
    for s, count in enumerate(num_tokens):
        for t in range(count):
            for h in range(world.hidden):
                partial = {}
                for r in range(world.num_ranks):
                    terms = []
                    for i, slot in enumerate(rows_of(world, kept, r)):
                        if slot is not None and slot[:2] == (s, t):
                            y = np.float32(ys[r][i, h].float().item())
                            terms.append(y if weights is None else np.float32(np.float32(weights[slot]) * y))
                    if terms:
                        partial[r] = add(terms)
                out[s][t, h] = float(nest(world, partial, wire, world.dtype))
    return out


def combine_flat(
    world: World,
    kept: dict[int, list[Slot]],
    num_tokens: list[int],
    ys: list[torch.Tensor],
    wire: torch.dtype,
) -> list[torch.Tensor]:
    """z of every rank from flat rows, the caller's partial sums."""
    out = [torch.zeros(t, world.hidden, dtype=world.dtype) for t in num_tokens]
    flat = [flat_of(world, kept, r) for r in range(world.num_ranks)]
    for s, count in enumerate(num_tokens):
        for t in range(count):
            for h in range(world.hidden):
                partial = {
                    r: np.float32(ys[r][flat[r].index((s, t)), h].float().item())
                    for r in range(world.num_ranks)
                    if (s, t) in flat[r]
                }
                out[s][t, h] = float(nest(world, partial, wire, world.dtype))
    return out
