"""SwiGLU with the routing weight applied behind it, saving nothing that its input does not already hold."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


class _WeightedSwiGLU(torch.autograd.Function):
    """Saves `gate_up` and the weights alone; the product is recomputed in backward (row-wise, cheap)."""

    @staticmethod
    def forward(ctx: Any, gate_up_N2I: Tensor, weights_N: Tensor | None) -> Tensor:
        gate, up = gate_up_N2I.float().chunk(2, dim=-1)
        act = F.silu(gate) * up
        if weights_N is not None:
            act = act * weights_N[:, None]
        ctx.save_for_backward(gate_up_N2I, weights_N)
        return act.to(gate_up_N2I.dtype)

    @staticmethod
    def backward(ctx: Any, grad_NI: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_up_N2I, weights_N = ctx.saved_tensors
        gate, up = gate_up_N2I.float().chunk(2, dim=-1)
        sigmoid = torch.sigmoid(gate)
        silu = gate * sigmoid
        grad = grad_NI.float()
        grad_weights = None
        if weights_N is not None:
            if ctx.needs_input_grad[1]:
                grad_weights = (grad * silu * up).sum(dim=-1)
            grad = grad * weights_N[:, None]
        grad_gate_up = torch.empty_like(gate_up_N2I)
        grad_gate, grad_up = grad_gate_up.chunk(2, dim=-1)
        grad_gate.copy_(grad * up * (sigmoid + silu * (1 - sigmoid)))
        grad_up.copy_(grad * silu)
        return grad_gate_up, grad_weights


def weighted_swiglu(gate_up_N2I: Tensor, weights_N: Tensor | None = None) -> Tensor:
    """silu(gate) * up * weight for every row.

    gate_up [N, 2I] holds the gate in its first I columns; weights fp32 [N] or None. Computed in fp32 and
    rounded once to the dtype of gate_up. The gradient of the weights is fp32.
    """
    return _WeightedSwiGLU.apply(gate_up_N2I, weights_N)
