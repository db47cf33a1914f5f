"""The experts one rank owns: SwiGLU feed-forward networks over expert-major rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flexep.errors import ArgumentError
from flexep.moe.activation import weighted_swiglu
from flexep.moe.expert_rows import add_bias, owners
from flexep.moe.grouped import grouped_linear, sequential_linear
from flexep.moe.init import keyed_normal

LINEARS = {"grouped": grouped_linear, "sequential": sequential_linear}


class Experts(nn.Module):
    """L SwiGLU experts, `y = weight * ((silu(x Wg + bg) * (x Wu + bu)) W2 + b2)`, each named by its global id.

    Parameters: `w13 [L, H, 2I]` (gate columns first) and `w2 [L, I, H]`, fp32, cast to the dtype of x for the
    GEMMs; with `bias` also `b13 [L, 2I]` and `b2 [L, H]`, fp32, zero at first and added in fp32 to real rows alone.
    Initial values depend on (seed, name, global expert id) alone. `expert_ids` may be empty.
    """

    b13: nn.Parameter | None
    b2: nn.Parameter | None

    def __init__(
        self,
        expert_ids: Sequence[int],
        *,
        hidden: int,
        inner: int,
        implementation: str = "grouped",
        bias: bool = False,
        seed: int = 0,
        name: str = "experts",
    ) -> None:
        super().__init__()
        if implementation not in LINEARS:
            raise ArgumentError("implementation", implementation, f"one of {', '.join(LINEARS)}")
        if inner < 1:
            raise ArgumentError("inner", inner, "at least 1")
        self.expert_ids = tuple(expert_ids)
        self.implementation = implementation
        self.w13 = nn.Parameter(self._draw((hidden, 2 * inner), hidden**-0.5, seed, name, "w13"))
        self.w2 = nn.Parameter(self._draw((inner, hidden), inner**-0.5, seed, name, "w2"))
        num_local = len(self.expert_ids)
        self.register_parameter("b13", nn.Parameter(torch.zeros(num_local, 2 * inner)) if bias else None)
        self.register_parameter("b2", nn.Parameter(torch.zeros(num_local, hidden)) if bias else None)

    def _draw(self, shape: tuple[int, int], std: float, seed: int, name: str, part: str) -> Tensor:
        each = [keyed_normal(shape, std, seed, name, part, expert) for expert in self.expert_ids]
        return torch.stack(each) if each else torch.zeros(0, *shape)

    def forward(
        self,
        x_NH: Tensor,
        padded_counts_L: Tensor,
        weights_N: Tensor | None = None,
        counts_L: Tensor | None = None,
    ) -> Tensor:
        """Expert-major rows in, expert-major rows out [N, H].

        padded_counts int32 [L]; weights fp32 [N] are applied before the second linear, so that the output of
        an expert need not be kept for their gradient (memory-efficient permutation). counts int32 [L] are the real
        rows among the padded ones; left out, all are real.
        """
        linear = LINEARS[self.implementation]
        gate_up_N2I = linear(x_NH, self.w13.to(x_NH.dtype), padded_counts_L)
        if self.b13 is None or self.b2 is None:
            act_NI = weighted_swiglu(gate_up_N2I, weights_N)
            return linear(act_NI, self.w2.to(x_NH.dtype), padded_counts_L)
        real_L = padded_counts_L if counts_L is None else counts_L
        expert_N, _ = owners(real_L, padded_counts_L, x_NH.shape[0])
        act_NI = weighted_swiglu(add_bias(gate_up_N2I, self.b13, expert_N), weights_N)
        y_NH = linear(act_NI, self.w2.to(x_NH.dtype), padded_counts_L)
        return add_bias(y_NH, self.b2, expert_N, weights_N)
