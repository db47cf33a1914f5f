"""Argument checks that several operations share. All raise ArgumentError with the argument's name and
value."""

from __future__ import annotations

import torch

from flexep._native import rows as native
from flexep.errors import ArgumentError


def at_least(name: str, value: int, least: int) -> None:
    """Refuses a size below `least`."""
    if value < least:
        raise ArgumentError(name, value, f"at least {least}")


def same_device(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Refuses a tensor on another device than `like`."""
    if tensor.device != like.device:
        raise ArgumentError(name, str(tensor.device), f"the device of the other arguments, {like.device}")


def expert_ids(name: str, idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 or int64 [T, K] expert ids in [-1, E) to contiguous int32.

    On CUDA the range cannot be judged without waiting for the device: ids outside it become -1.
    """
    if idx.dim() != 2:
        raise ArgumentError(name, tuple(idx.shape), "2 dimensions, [tokens, top_k]")
    if idx.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(name, idx.dtype, "int32 or int64")
    at_least("num_experts", num_experts, 1)
    if idx.device.type != "cpu":
        return torch.where((idx < 0) | (idx >= num_experts), -1, idx).to(torch.int32)
    return native.check_range(name, idx, -1, num_experts)


def sizes(name: str, counts: torch.Tensor, total: int | None) -> torch.Tensor:
    """A 1-D int32 or int64 tensor of row counts >= 0 to int64; on the CPU also their sum, where `total` says
    it."""
    if counts.dim() != 1:
        raise ArgumentError(name, tuple(counts.shape), "1 dimension")
    if counts.dtype not in (torch.int32, torch.int64):
        raise ArgumentError(name, counts.dtype, "int32 or int64")
    if counts.device.type == "cpu":
        if counts.numel() and int(counts.min()) < 0:
            raise ArgumentError(name, counts.tolist(), "counts of at least 0")
        if total is not None and int(counts.sum()) != total:
            raise ArgumentError(name, counts.tolist(), f"counts that sum to the {total} rows")
    return counts.long()


def no_nan(name: str, weights: torch.Tensor) -> None:
    """fp32 weights without NaN; on CUDA only the dtype, because the values cannot be judged without a
    wait."""
    if weights.dtype != torch.float32:
        raise ArgumentError(name, weights.dtype, "torch.float32")
    if weights.device.type == "cpu" and weights.isnan().any():
        where = weights.isnan().nonzero()[0].tolist()
        raise ArgumentError(name, float("nan"), f"weights without NaN (at {where})")
