"""From flat rows to expert-major rows, for callers that take the flat layout and run grouped experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flexep.ops.rows import gather_rows, reduce_rows


class _Expand(torch.autograd.Function):
    """Backward adds the copies of a row in expert order, in fp32, and rounds once: the recipe of combine."""

    @staticmethod
    def forward(ctx: Any, x_NH: Tensor, row_map: Tensor, recv_rows_NK: Tensor) -> Tensor:
        ctx.save_for_backward(recv_rows_NK)
        return gather_rows(x_NH, row_map)

    @staticmethod
    def backward(ctx: Any, grad_MH: Tensor) -> tuple[Tensor, None, None]:
        (recv_rows_NK,) = ctx.saved_tensors
        return reduce_rows(grad_MH.contiguous(), recv_rows_NK, None, grad_MH.dtype, True), None, None


def expand_flat(x_NH: Tensor, row_map: Tensor, recv_rows_NK: Tensor) -> Tensor:
    """One row a (token, expert) from one row a token: [N, H] -> [M, H], grouped by expert, padding zero.

    `row_map` int32 [M] is `DispatchResult.row_map`, `recv_rows` int32 [N, K] is `Handle.recv_rows`.
    """
    return _Expand.apply(x_NH, row_map, recv_rows_NK)
