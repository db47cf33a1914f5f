"""The dense feed-forward network: a shared expert, or what a mixture is upcycled from."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexep.errors import ArgumentError
from flexep.moe.activation import weighted_swiglu
from flexep.moe.init import keyed_normal


class FeedForward(nn.Module):
    """SwiGLU, `y = (silu(x Wg + bg) * (x Wu + bu)) W2 + b2`, in the layout of one of `Experts`.

    Parameters, fp32 and cast to the dtype of x: `w13 [H, 2I]` (gate columns first), `w2 [I, H]` and, with `bias`,
    `b13 [2I]` and `b2 [H]`, which start at zero.
    """

    b13: nn.Parameter | None
    b2: nn.Parameter | None

    def __init__(
        self, *, hidden: int, inner: int, bias: bool = False, seed: int = 0, name: str = "feed_forward"
    ) -> None:
        super().__init__()
        if inner < 1:
            raise ArgumentError("inner", inner, "at least 1")
        self.w13 = nn.Parameter(keyed_normal((hidden, 2 * inner), hidden**-0.5, seed, name, "w13"))
        self.w2 = nn.Parameter(keyed_normal((inner, hidden), inner**-0.5, seed, name, "w2"))
        self.register_parameter("b13", nn.Parameter(torch.zeros(2 * inner)) if bias else None)
        self.register_parameter("b2", nn.Parameter(torch.zeros(hidden)) if bias else None)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> [T, H] of the same dtype."""
        dtype = x_TH.dtype
        gate_up = F.linear(x_TH, self.w13.t().to(dtype), None if self.b13 is None else self.b13.to(dtype))
        return F.linear(
            weighted_swiglu(gate_up), self.w2.t().to(dtype), None if self.b2 is None else self.b2.to(dtype)
        )


class SharedExpert(nn.Module):
    """A feed-forward network for every token, on its own rank; with `gate`, times sigmoid(x . g) of the token."""

    gate: nn.Parameter | None

    def __init__(self, *, hidden: int, inner: int, gate: bool, seed: int, name: str) -> None:
        super().__init__()
        self.feed_forward = FeedForward(hidden=hidden, inner=inner, seed=seed, name=name)
        first = keyed_normal((1, hidden), hidden**-0.5, seed, name, "gate")
        self.register_parameter("gate", nn.Parameter(first) if gate else None)

    def forward(self, x_TH: Tensor) -> Tensor:
        """[T, H] -> fp32 [T, H], to be added to the routed experts' sum before it is rounded."""
        y_TH = self.feed_forward(x_TH).float()
        if self.gate is None:
            return y_TH
        return y_TH * torch.sigmoid(F.linear(x_TH.float(), self.gate.float()))
