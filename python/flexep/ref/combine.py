"""Combine, by the rounding recipe: products and sums in fp32 rounded separately, each sum starting from its
first term, a rank's partial sum rounded to the combine wire, ranks (and domains) added in ascending order.

With `exact=True` the same sums run in fp64 and nothing is rounded: the yardstick for tolerances.
"""

from __future__ import annotations

import torch

from flexep.ref.plan import Plan

Partial = tuple[torch.Tensor, torch.Tensor]  # (tokens [n] that have one, their partial sums [n, H])


def _fold(partials: list[Partial], num_tokens: int, hidden: int, dtype: torch.dtype) -> Partial:
    """Adds partial sums, in order; a token starts from its first one."""
    total = torch.zeros(num_tokens, hidden, dtype=dtype)
    seen = torch.zeros(num_tokens, dtype=torch.bool)
    for tokens, values in partials:
        values, known = values.to(dtype), seen[tokens]
        if not known.any():
            total[tokens] = values
        else:
            total[tokens] = torch.where(known[:, None], total[tokens] + values, values)
        seen[tokens] = True
    tokens = seen.nonzero()[:, 0]
    return tokens, total[tokens]


def _sum_ranks(
    plan: Plan, partials: list[Partial], num_tokens: int, wire: torch.dtype, out: torch.dtype, exact: bool
) -> torch.Tensor:
    """Rounds every rank's partial sums to the wire and adds them, through domains where the world has
    them."""
    world, dtype = plan.world, torch.float64 if exact else torch.float32
    wire, out = (torch.float64, torch.float64) if exact else (wire, out)
    partials = [(tokens, values.to(wire)) for tokens, values in partials]
    if world.domain_size is not None:
        starts = range(0, world.num_ranks, world.domain_size)
        domains = [
            _fold(partials[d : d + world.domain_size], num_tokens, world.hidden, dtype) for d in starts
        ]
        partials = [(tokens, values.to(wire)) for tokens, values in domains]
    tokens, values = _fold(partials, num_tokens, world.hidden, dtype)
    z_TH = torch.zeros(num_tokens, world.hidden, dtype=out)
    z_TH[tokens] = values.to(out)
    return z_TH


def _rank_partial(
    here_TK: torch.Tensor,
    local_TK: torch.Tensor,
    y_TKH: torch.Tensor,
    w_TK: torch.Tensor | None,
    dtype: torch.dtype,
) -> Partial:
    """Sum over the slots marked in `here_TK` (those on one rank), in (expert, slot) order."""
    top_k = here_TK.shape[1]
    tokens, terms = here_TK.any(1).nonzero()[:, 0], here_TK.sum(1)
    key = torch.where(here_TK, local_TK * top_k + torch.arange(top_k), torch.iinfo(torch.int64).max)
    order = key.argsort(1)  # slots on other ranks sort behind everything
    total = torch.zeros(len(tokens), y_TKH.shape[2], dtype=dtype)
    for j in range(int(terms.max()) if len(tokens) else 0):
        at = (terms[tokens] > j).nonzero()[:, 0]
        where = (tokens[at], order[tokens[at], j])
        term = y_TKH[where].to(dtype)
        if w_TK is not None:
            term = term * w_TK[where].to(dtype)[:, None]
        total[at] = term if j == 0 else total[at] + term
    return tokens, total


def combine_slots(
    plan: Plan,
    rank: int,
    y_TKH: torch.Tensor,
    w_TK: torch.Tensor | None,
    wire: torch.dtype,
    out: torch.dtype,
    exact: bool = False,
) -> torch.Tensor:
    """z [T, H] of one home rank, from the expert output of each of its slots; empty and dropped slots are not
    read."""
    slot_rank, slot_local = plan.slot_rank[rank], plan.slot_local[rank]
    dtype = torch.float64 if exact else torch.float32
    partials = [
        _rank_partial(slot_rank == r, slot_local, y_TKH, w_TK, dtype) for r in range(plan.world.num_ranks)
    ]
    return _sum_ranks(plan, partials, len(slot_rank), wire, out, exact)


def combine_partials(
    plan: Plan, rank: int, p_TRH: torch.Tensor, wire: torch.dtype, out: torch.dtype, exact: bool = False
) -> torch.Tensor:
    """z [T, H] of one home rank from partial sums that the caller made: p_TRH[t, r], read where r received
    token t."""
    received = plan.token_row[rank] >= 0
    tokens = [received[:, r].nonzero()[:, 0] for r in range(plan.world.num_ranks)]
    partials = [(at, p_TRH[at, r]) for r, at in enumerate(tokens)]
    return _sum_ranks(plan, partials, len(received), wire, out, exact)


def slots_from_rows(plan: Plan, rank: int, rows: list[torch.Tensor]) -> torch.Tensor:
    """[T, K, ...] of a home rank from expert-major rows [rows, ...] of every rank; zero for slots without a
    row."""
    slot_rank, slot_row = plan.slot_rank[rank], plan.slot_row[rank]
    out = torch.zeros((*slot_rank.shape, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for r, values in enumerate(rows):
        out[slot_rank == r] = values[slot_row[slot_rank == r]]
    return out


def slots_from_flat(plan: Plan, rank: int, rows: list[torch.Tensor]) -> torch.Tensor:
    """[T, K] of a home rank from per-slot values [N, K] beside the flat rows of every rank."""
    slot_rank, token_row = plan.slot_rank[rank], plan.token_row[rank]
    out = torch.zeros(slot_rank.shape, dtype=rows[0].dtype)
    for r, values in enumerate(rows):
        token, slot = (slot_rank == r).nonzero(as_tuple=True)
        out[token, slot] = values[token_row[token, r], slot]
    return out


def partials_from_flat(plan: Plan, rank: int, rows: list[torch.Tensor]) -> torch.Tensor:
    """[T, R, H] of a home rank from flat rows [N, H] of every rank; zero where a rank did not receive the
    token."""
    token_row = plan.token_row[rank]
    out = torch.zeros((*token_row.shape, *rows[0].shape[1:]), dtype=rows[0].dtype)
    for r, values in enumerate(rows):
        tokens = (token_row[:, r] >= 0).nonzero()[:, 0]
        out[tokens, r] = values[token_row[tokens, r]]
    return out


def slot_values(plan: Plan, rank: int, values: list[torch.Tensor]) -> torch.Tensor:
    """[T, K] of a home rank from values in the shape of Received.weights."""
    return (slots_from_rows if plan.world.layout == "expert_major" else slots_from_flat)(plan, rank, values)


def combine(
    plan: Plan,
    ys: list[torch.Tensor],
    weights: list[torch.Tensor] | None = None,
    y_layout: str | None = None,
    exact: bool = False,
) -> list[torch.Tensor]:
    """z of every rank from every rank's y; `weights` have the shape of Received.weights."""
    world, z = plan.world, []
    for rank in range(world.num_ranks):
        if (y_layout or world.layout) == "flat":
            p_TRH = partials_from_flat(plan, rank, ys)
            z.append(combine_partials(plan, rank, p_TRH, world.wire, world.dtype, exact))
        else:
            w_TK = None if weights is None else slot_values(plan, rank, weights)
            y_TKH = slots_from_rows(plan, rank, ys)
            z.append(combine_slots(plan, rank, y_TKH, w_TK, world.wire, world.dtype, exact))
    return z
