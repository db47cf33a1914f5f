"""What expert-major rows are: whose, which of them are real, and how to give every expert equally many."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flexep.ops.permute_rows import permute_rows, permute_weights, unpermute_rows


def owners(counts_L: Tensor, padded_counts_L: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(expert, place): int64 [N], the local expert of each row and the row's place among those of its expert.

    Rows of padding, and those behind the last expert, have the expert L. No host wait.
    """
    num_local = counts_L.shape[0]
    end_L = padded_counts_L.long().cumsum(0)
    row_N = torch.arange(num_rows, device=counts_L.device)
    expert_N = torch.searchsorted(end_L, row_N, right=True)
    nothing = end_L.new_zeros(1)
    place_N = row_N - torch.cat([end_L - padded_counts_L, nothing])[expert_N]
    real_N = place_N < torch.cat([counts_L.long(), nothing])[expert_N]
    return torch.where(real_N, expert_N, num_local), place_N


class _AddBias(torch.autograd.Function):
    """Touches no row but real ones, in either direction: what lies in padding may be anything."""

    @staticmethod
    def forward(
        ctx: Any, y_NO: Tensor, bias_LO: Tensor, weights_N: Tensor | None, expert_N: Tensor
    ) -> Tensor:
        ctx.save_for_backward(bias_LO, weights_N, expert_N)
        added_NO = _bias_rows(bias_LO, expert_N)
        if weights_N is not None:
            added_NO = added_NO * weights_N[:, None]
        real_N1 = (expert_N < bias_LO.shape[0])[:, None]
        return torch.where(real_N1, (y_NO.float() + added_NO).to(y_NO.dtype), y_NO)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, ...]:
        bias_LO, weights_N, expert_N = ctx.saved_tensors
        num_local = bias_LO.shape[0]
        real_NO = grad_NO.float().masked_fill((expert_N == num_local)[:, None], 0)
        grad_bias = grad_weights = None
        if ctx.needs_input_grad[1]:
            # A product with a matrix of ones adds in a fixed order, where index_add on CUDA would not.
            mine_LN = (torch.arange(num_local, device=expert_N.device)[:, None] == expert_N).float()
            if weights_N is not None:
                mine_LN = torch.where(mine_LN > 0, weights_N, 0)
            grad_bias = (mine_LN @ real_NO).to(bias_LO.dtype)
        if weights_N is not None and ctx.needs_input_grad[2]:
            grad_weights = (real_NO * _bias_rows(bias_LO, expert_N)).sum(-1)
        return grad_NO, grad_bias, grad_weights, None


def _bias_rows(bias_LO: Tensor, expert_N: Tensor) -> Tensor:
    return torch.cat([bias_LO.float(), bias_LO.new_zeros(1, bias_LO.shape[1], dtype=torch.float32)])[expert_N]


def add_bias(y_NO: Tensor, bias_LO: Tensor, expert_N: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """y + (weight *) bias of its expert for every real row, in fp32, rounded once to y's dtype.

    expert int64 [N], L where a row is not real: such rows stay as they are and add nothing to any gradient of bias
    or weights, so an expert without rows has a zero gradient.
    """
    return _AddBias.apply(y_NO, bias_LO, weights_N, expert_N)


class Padded(NamedTuple):
    """Expert-major rows of which every expert has equally many. `counts` and `padded_counts` int32 [L]."""

    x: Tensor
    weights: Tensor | None
    padded_counts: Tensor
    row_map: Tensor
    row_src: Tensor

    def undo(self, y: Tensor) -> Tensor:
        """Rows of the experts' output, bit for bit where the dispatcher's plan has them; padding is +0."""
        return unpermute_rows(y, self.row_map, self.row_src)


def pad_evenly(
    x_NH: Tensor, weights_N: Tensor | None, counts_L: Tensor, padded_counts_L: Tensor, rows_each: int
) -> Padded:
    """Gives every expert `rows_each` rows, its own first, then zeros; `rows_each` is at least any count.

    The result's shape depends on no routing. No host wait.
    """
    num_local = counts_L.shape[0]
    expert_N, place_N = owners(counts_L, padded_counts_L, x_NH.shape[0])
    target_N = torch.where(expert_N < num_local, expert_N * rows_each + place_N, -1)
    start_L = padded_counts_L.long().cumsum(0) - padded_counts_L
    place_R = torch.arange(rows_each, device=counts_L.device)
    source_LR = torch.where(place_R < counts_L[:, None], start_L[:, None] + place_R, -1)
    row_map, row_src = target_N.to(torch.int32)[:, None], source_LR.flatten().to(torch.int32)
    return Padded(
        x=permute_rows(x_NH, row_map, row_src),
        weights=None if weights_N is None else permute_weights(weights_N[:, None], row_map, row_src),
        padded_counts=torch.full_like(padded_counts_L, rows_each),
        row_map=row_map,
        row_src=row_src,
    )
