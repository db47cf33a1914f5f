"""Gradients of dispatch and combine, written out; backward of one is the other with x.dtype on the wire."""

from __future__ import annotations

import torch

from flexep.ref.combine import (
    combine_partials,
    combine_slots,
    partials_from_flat,
    slot_values,
    slots_from_rows,
)
from flexep.ref.dispatch import pick
from flexep.ref.plan import Plan


def combine_backward(
    plan: Plan,
    dzs: list[torch.Tensor],
    ys: list[torch.Tensor],
    weights: list[torch.Tensor] | None = None,
    y_layout: str | None = None,
    exact: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """(dy, dweights) of every rank from every rank's dz [T, H].

    dy = round(w * dz of the row's token) in y's dtype, zero in padding. dweights: fp32 dots of y and dz over
    H, in the shape of Received.weights, zero where there is no row.
    """
    world, dtype = plan.world, torch.float64 if exact else torch.float32
    dys: list[torch.Tensor] = []
    dws: list[torch.Tensor] = []
    for p, y, r in zip(plan.ranks, ys, range(world.num_ranks), strict=True):
        if (y_layout or world.layout) == "flat":
            dys.append(pick(dzs, p.flat_rank, p.flat_token).to(dtype if exact else y.dtype))
            continue
        dz_row, used = pick(dzs, p.source_rank, p.source_token).to(dtype), p.source_rank >= 0
        if weights is not None:
            where = used if world.layout == "expert_major" else (p.row_map[used], p.source_slot[used])
            dw = torch.zeros(weights[r].shape, dtype=dtype)
            dw[where] = (y[used].to(dtype) * dz_row[used]).sum(1)
            dws.append(dw)
            dz_row[used] = dz_row[used] * weights[r][where].to(dtype)[:, None]
        dys.append(dz_row if exact else dz_row.to(y.dtype))
    return dys, dws if weights is not None else None


def dispatch_backward(
    plan: Plan,
    dxs: list[torch.Tensor],
    dws: list[torch.Tensor] | None = None,
    exact: bool = False,
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    """(dx [T, H], dtopk_weights [T, K]) of every rank from the gradients of Received.x and
    Received.weights."""
    world = plan.world
    dx: list[torch.Tensor] = []
    for rank in range(world.num_ranks):
        if world.layout == "flat":
            p_TRH = partials_from_flat(plan, rank, dxs)
            dx.append(combine_partials(plan, rank, p_TRH, world.dtype, world.dtype, exact))
        else:
            d_TKH = slots_from_rows(plan, rank, dxs)
            dx.append(combine_slots(plan, rank, d_TKH, None, world.dtype, world.dtype, exact))
    return dx, None if dws is None else [slot_values(plan, rank, dws) for rank in range(world.num_ranks)]
