"""Routing maps composed from torch operations: a second opinion on csrc/ops, on either device."""

from __future__ import annotations

import torch


def take_columns(values_TE: torch.Tensor, idx_TK: torch.Tensor) -> torch.Tensor:
    """values[t, idx[t, k]], 0 where the index is -1."""
    taken_TK = values_TE.gather(1, idx_TK.clamp(min=0).long())
    return torch.where(idx_TK < 0, torch.zeros_like(taken_TK), taken_TK)


def multihot_mask(idx_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """bool [T, E]. Empty slots go to a column that is cut off."""
    mask = torch.zeros(idx_TK.shape[0], num_experts + 1, dtype=torch.bool, device=idx_TK.device)
    return mask.scatter_(1, torch.where(idx_TK < 0, num_experts, idx_TK).long(), True)[
        :, :num_experts
    ].contiguous()


def multihot_probs(idx_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """fp32 [T, E]. One step per k, so that repeated ids add in the order of k on every device."""
    probs = torch.zeros(idx_TK.shape[0], num_experts + 1, dtype=torch.float32, device=idx_TK.device)
    column_TK = torch.where(idx_TK < 0, num_experts, idx_TK).long()
    named = torch.zeros_like(probs, dtype=torch.bool)
    for k in range(idx_TK.shape[1]):
        column, weight = column_TK[:, k : k + 1], weights_TK[:, k : k + 1]
        # A sum starts from its first term: 0 + (-0) would lose the sign.
        grown = torch.where(named.gather(1, column), probs.gather(1, column) + weight, weight)
        probs = probs.scatter(1, column, grown)
        named = named.scatter(1, column, True)
    return probs[:, :num_experts].contiguous()


def mask_indices(mask_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32 [T, K], ascending, then -1. An unset entry counts as expert E, which sorts last."""
    E = mask_TE.shape[1]
    key_TE = torch.where(mask_TE, torch.arange(E, device=mask_TE.device), E).sort(dim=1).values
    if top_k > E:
        key_TE = torch.nn.functional.pad(key_TE, (0, top_k - E), value=E)
    idx_TK = key_TE[:, :top_k]
    return torch.where(idx_TK == E, -1, idx_TK).to(torch.int32)


def pad_mask(mask_TE: torch.Tensor, multiple: int) -> torch.Tensor:
    """See flexep.ops.maps.pad_routing_map."""
    mask_TE = torch.nn.functional.pad(mask_TE, (0, 0, 0, -mask_TE.shape[0] % multiple))
    missing_E = -mask_TE.sum(0) % multiple
    return mask_TE | ((~mask_TE).cumsum(0) <= missing_E)
