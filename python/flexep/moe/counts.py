"""Integers summed over ranks: how many slots chose each expert, and of how many tokens and sequences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flexep.group import Group, wait


def count_experts(idx_TK: Tensor, num_experts: int) -> Tensor:
    """int64 [E]: slots that name each expert; -1 counts nowhere. No host wait."""
    expert_N = torch.where(idx_TK < 0, num_experts, idx_TK.long()).flatten()
    counts = torch.zeros(num_experts + 1, dtype=torch.int64, device=idx_TK.device)
    return counts.scatter_add_(0, expert_N, torch.ones_like(expert_N))[:-1]


def sum_over_ranks(tensors: Sequence[Tensor], group: Group | None, timeout: float) -> Tensor:
    """The sum over all ranks of a tensor of which each rank of this process passes one. Collective.

    Integers stay integers, so the sum depends on no order. Without a group, this process is the only rank.
    Raises Timeout and PeerLost as the dispatchers do.
    """
    total = torch.stack(list(tensors)).sum(0)
    if group is None or group.is_local or group.size == 1:
        return total
    work = group.process_group(timeout).allreduce([total])
    wait(work, "router.counts", group.rank, timeout, group.device)
    return total
