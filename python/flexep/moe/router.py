"""The router: which experts a token goes to, and with what weight."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexep.errors import ArgumentError
from flexep.moe.init import keyed_normal


def softmax_topk(logits_TE: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Choose the `top_k` largest logits of each token; of equal logits the lower expert id comes first.

    Softmax runs over all E experts before the choice. Returns `(idx int32 [T, K], weights [T, K])`, largest
    weight first; with `renormalize` the K weights of a token sum to one. Gradients flow through the weights.
    """
    # A stable sort, because torch.topk promises no order among equal values.
    order_TE = torch.sort(logits_TE.detach(), dim=-1, descending=True, stable=True).indices
    idx_TK = order_TE[:, :top_k]
    weights_TK = F.softmax(logits_TE, dim=-1).gather(-1, idx_TK)
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
    return idx_TK.to(torch.int32), weights_TK


class Router(nn.Module):
    """Softmax top-k over a linear map. Weight, logits and probabilities are fp32 whatever the dtype of x."""

    def __init__(
        self,
        *,
        hidden: int,
        num_experts: int,
        top_k: int,
        renormalize: bool = True,
        seed: int = 0,
        name: str = "router",
    ) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ArgumentError(
                "top_k", top_k, f"1 to num_experts = {num_experts} (softmax top-k picks distinct experts)"
            )
        self.top_k = top_k
        self.renormalize = renormalize
        self.weight = nn.Parameter(keyed_normal((num_experts, hidden), hidden**-0.5, seed, name))

    def forward(self, x_TH: Tensor) -> tuple[Tensor, Tensor]:
        """x_TH [T, H] of any float dtype -> `(topk_idx int32 [T, K], topk_weights fp32 [T, K])`."""
        return softmax_topk(F.linear(x_TH.float(), self.weight), self.top_k, self.renormalize)
