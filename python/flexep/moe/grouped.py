"""A linear map per expert over expert-major rows: one grouped GEMM, or one GEMM each."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from flexep.config import ROW_BYTES
from flexep.errors import ArgumentError


class _GroupedLinear(torch.autograd.Function):
    """torch's grouped GEMM with the sizes on the device, and a backward that is defined for empty experts."""

    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_LIO: Tensor, end_L: Tensor) -> Tensor:
        ctx.save_for_backward(x_NI, weight_LIO, end_L)
        return _grouped_mm(x_NI, weight_LIO, end_L)

    @staticmethod
    def backward(ctx: Any, grad_NO: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x_NI, weight_LIO, end_L = ctx.saved_tensors
        grad_NO = grad_NO.contiguous()
        grad_x = grad_weight = None
        if ctx.needs_input_grad[0]:
            grad_x = _grouped_mm(grad_NO, weight_LIO.transpose(1, 2), end_L)
        if ctx.needs_input_grad[1]:
            if x_NI.shape[0] == 0 or weight_LIO.numel() == 0:
                return grad_x, torch.zeros_like(weight_LIO), None
            grad_weight = F.grouped_mm(x_NI.t(), grad_NO, offs=end_L)
            # A group of no rows is a GEMM with an inner size of zero, whose output a kernel may leave
            # unwritten.
            empty_L = torch.diff(end_L, prepend=end_L.new_zeros(1)) == 0
            grad_weight.masked_fill_(empty_L[:, None, None], 0)
        return grad_x, grad_weight, None


def _grouped_mm(x_NI: Tensor, weight_LIO: Tensor, end_L: Tensor) -> Tensor:
    if x_NI.shape[0] == 0 or weight_LIO.shape[0] == 0:
        return x_NI.new_zeros(x_NI.shape[0], weight_LIO.shape[2])
    return F.grouped_mm(x_NI, weight_LIO, offs=end_L)


def grouped_linear(x_NI: Tensor, weight_LIO: Tensor, padded_counts_L: Tensor) -> Tensor:
    """Rows of expert l, which are `padded_counts[l]` consecutive ones, times `weight[l]`.

    x [N, I], weight [L, I, O] of one dtype, padded_counts int32 [L] on the same device. No host wait. Rows
    behind the last expert (the tail of a static capacity) are undefined in the result and in the gradient of
    x: no plan names them, so nobody reads them. An expert without rows gets a zero gradient.

    Raises ArgumentError where a row of x or of the result is no multiple of 16 bytes, which the kernels demand.
    """
    if any(width * x_NI.element_size() % ROW_BYTES for width in weight_LIO.shape[1:]):
        raise ArgumentError(
            "weight.shape", tuple(weight_LIO.shape), f"rows of {x_NI.dtype} in multiples of {ROW_BYTES} bytes"
        )
    return _GroupedLinear.apply(x_NI, weight_LIO, torch.cumsum(padded_counts_L, 0, dtype=torch.int32))


def sequential_linear(x_NI: Tensor, weight_LIO: Tensor, padded_counts_L: Tensor) -> Tensor:
    """The same map, one GEMM an expert, for debugging: it reads the counts on the host (one wait)."""
    sizes = padded_counts_L.tolist()
    rows = x_NI.split([*sizes, x_NI.shape[0] - sum(sizes)])
    tail = rows[-1] @ weight_LIO[:0].sum(0)  # zeros, and part of the graph even where there is no expert
    return torch.cat([part @ weight for part, weight in zip(rows[:-1], weight_LIO, strict=True)] + [tail])
