"""Experts that cannot be confused: expert e multiplies by a diagonal matrix of its own."""

from __future__ import annotations

from typing import Any

import torch

from flexep.testing.case import Case
from flexep.testing.inputs import keyed


def expert_scales(case: Case) -> torch.Tensor:
    """[E, H] fp32: the diagonal of every expert; no two experts agree anywhere to speak of."""
    gen = keyed(case, "experts")
    scale_EH = torch.rand(case.experts, case.hidden, generator=gen) + 0.5
    return torch.where(torch.rand(scale_EH.shape, generator=gen) < 0.5, -scale_EH, scale_EH)


def expert_rows(
    scale_EH: torch.Tensor,
    x: torch.Tensor,
    expert: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """y [rows, H] of rows x whose (global) expert is `expert` [rows]; NaN where it is -1: nobody may read
    padding."""
    y = x.float() * scale_EH[expert.clamp(min=0)]
    if weights is not None:
        y = y * weights[:, None]
    return torch.where(expert[:, None] < 0, torch.nan, y.to(x.dtype))


def expert_partials(
    scale_EH: torch.Tensor,
    x: torch.Tensor,
    expert: torch.Tensor,
    weights: torch.Tensor | None,
) -> torch.Tensor:
    """Partial sums y [N, H] of flat rows x over the (global) experts [N, K] of each; NaN in rows that have
    none."""
    x_float = x.float()
    total = torch.zeros_like(x_float)
    for k in range(expert.shape[1]):
        term = x_float * scale_EH[expert[:, k].clamp(min=0)]
        if weights is not None:
            term = term * weights[:, k, None]
        total = total + torch.where(expert[:, k, None] < 0, 0.0, term)
    return torch.where((expert < 0).all(1)[:, None], torch.nan, total.to(x.dtype))


class TakeRows(torch.autograd.Function):
    """Flat rows [N, H] -> expert-major rows; gradients of copies of one row are added in fp32 in row order
    and rounded once, as the numerics recipe has it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_map)
        ctx.num_flat = len(x)
        used = row_map >= 0
        rows = torch.zeros((len(row_map), x.shape[1]), dtype=x.dtype, device=x.device)
        rows[used] = x[row_map[used].long()]
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (row_map,) = ctx.saved_tensors
        used = (row_map >= 0).nonzero()[:, 0]
        flat = row_map[used].long()
        order = torch.argsort(flat, stable=True)
        flat, used = flat[order], used[order]
        copies = torch.bincount(flat, minlength=ctx.num_flat)
        nth = torch.arange(len(flat), device=flat.device) - (copies.cumsum(0) - copies)[flat]
        total = torch.zeros((ctx.num_flat, grad.shape[1]), device=grad.device)
        for n in range(int(copies.max()) if len(flat) else 0):
            at = nth == n
            term = grad[used[at]].float()
            total[flat[at]] = term if n == 0 else total[flat[at]] + term
        return total.to(grad.dtype), None
