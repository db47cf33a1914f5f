"""The capacity of an expert: which slots it keeps."""

from __future__ import annotations

import torch
from torch import Tensor

from flexep.moe.router_config import RouterConfig


def kept_slots(idx_TK: Tensor, weights_TK: Tensor, real_T: Tensor, config: RouterConfig) -> Tensor:
    """bool [T, K]: the slots that the experts keep of one rank's tokens. No host wait.

    Each expert keeps its first ceil(factor * tokens * K / E) slots, where tokens counts the real ones, in order of
    falling weight (equal weights: of the lower token) or of tokens. idx int [T, K], -1 empty.
    """
    E = config.num_experts
    assert config.capacity_factor is not None
    # In fp64 and in the order of RouterConfig.capacity, so that both round alike.
    most = (config.capacity_factor * real_T.sum().double() * config.top_k / E).ceil().long()
    expert_N = torch.where(idx_TK < 0, E, idx_TK.long()).flatten()
    order_N = torch.arange(expert_N.numel(), device=expert_N.device)
    if config.drop_by == "weight":
        order_N = torch.sort(weights_TK.detach().flatten(), descending=True, stable=True).indices
    sorted_N, within_N = torch.sort(expert_N[order_N], stable=True)
    order_N = order_N[within_N]
    place_N = torch.arange(expert_N.numel(), device=expert_N.device)
    first_N = torch.searchsorted(sorted_N, sorted_N)  # where the slots of the same expert begin
    kept_N = (place_N - first_N < most) & (sorted_N < E)
    return torch.empty_like(kept_N).scatter_(0, order_N, kept_N).view_as(idx_TK)
