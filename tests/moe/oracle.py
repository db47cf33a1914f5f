"""The MoE layer in fp64, dense: every expert sees every token and the routing picks from the results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def moe_oracle(
    x_TH: Tensor, idx_TK: Tensor, router_EH: Tensor, w13: Tensor, w2: Tensor, renormalize: bool = True
) -> Tensor:
    """All fp64 but idx, the experts each token chose. w13 [E, H, 2I], w2 [E, I, H] by global expert id."""
    weights_TK = torch.softmax(x_TH @ router_EH.t(), -1).gather(1, idx_TK.long())
    if renormalize:
        weights_TK = weights_TK / weights_TK.sum(-1, keepdim=True)
    gate, up = torch.einsum("th,ehi->eti", x_TH, w13).chunk(2, -1)
    y_ETH = torch.einsum("eti,eih->eth", F.silu(gate) * up, w2)
    picked_TKH = y_ETH.transpose(0, 1).gather(1, idx_TK.long()[..., None].expand(-1, -1, x_TH.shape[1]))
    return (picked_TKH * weights_TK[..., None]).sum(1)
