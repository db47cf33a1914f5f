"""Argument checks that several operations share. All raise ArgumentError with the argument's name and
value."""

from __future__ import annotations

import torch

from flexep._native import operands as native
from flexep.config import Environment
from flexep.errors import ArgumentError

INT32_MAX = 2**31 - 1  # row numbers are int32
IDS = (torch.int32, torch.int64)


def at_least(name: str, value: int, least: int) -> None:
    """Refuses a size outside [least, INT32_MAX]."""
    if value < least:
        raise ArgumentError(name, value, f"at least {least}")
    if value > INT32_MAX:
        raise ArgumentError(name, value, f"at most {INT32_MAX}")


def tensor(
    name: str,
    value: torch.Tensor,
    *,
    dim: int | None = None,
    dtypes: tuple[torch.dtype, ...] = (),
    like: torch.Tensor | None = None,
) -> None:
    """Refuses what is not a dense tensor, or has another number of dimensions, another dtype than one of
    `dtypes` (where given) or another device than `like`. Looks at no value, so that fake tensors pass
    too."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(name, value, "a torch.Tensor")
    if value.layout != torch.strided:
        raise ArgumentError(name, value.layout, "a dense tensor, torch.strided")
    if dim is not None and value.dim() != dim:
        raise ArgumentError(name, tuple(value.shape), f"{dim} dimension{'s' * (dim > 1)}")
    if dtypes and value.dtype not in dtypes:
        raise ArgumentError(name, value.dtype, " or ".join(str(dtype) for dtype in dtypes))
    if like is not None:
        same_device(name, value, like)


def rows(name: str, value: torch.Tensor, *, floats: bool = False) -> None:
    """Refuses what is not a row matrix that the row functors take, under the caller's name of it."""
    tensor(name, value)
    native.check_rows(name, value, floats=floats)


def same_device(name: str, tensor: torch.Tensor, like: torch.Tensor) -> None:
    """Refuses a tensor on another device than `like`."""
    if tensor.device != like.device:
        raise ArgumentError(name, str(tensor.device), f"the device of the other arguments, {like.device}")


def expert_ids(name: str, idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """int32 or int64 [T, K] expert ids in [-1, E) to contiguous int32.

    On CUDA the range cannot be judged without waiting for the device: ids outside it become -1, unless
    FLEXEP_DEBUG=1.
    """
    if idx.dim() != 2:
        raise ArgumentError(name, tuple(idx.shape), "2 dimensions, [tokens, top_k]")
    if idx.dtype not in IDS:
        raise ArgumentError(name, idx.dtype, "int32 or int64")
    at_least("num_experts", num_experts, 1)
    if not judges_values(idx):
        return torch.where((idx < 0) | (idx >= num_experts), -1, idx).to(torch.int32)
    return native.check_range(name, idx.cpu(), -1, num_experts).to(idx.device)


def judges_values(tensor: torch.Tensor) -> bool:
    """Whether a call may look at the tensor's values: on the CPU, and with FLEXEP_DEBUG=1 on CUDA."""
    if tensor.device.type == "cpu":
        return True
    return tensor.is_cuda and Environment.read().debug and not torch.cuda.is_current_stream_capturing()


def sizes(name: str, counts: torch.Tensor, total: int | None) -> torch.Tensor:
    """A 1-D int32 or int64 tensor of row counts >= 0 to int64; on the CPU also their sum, where `total` says
    it.

    Each count is bounded before they are added: a sum of larger ones could wrap around to a valid one.
    """
    tensor(name, counts, dim=1, dtypes=IDS)
    if counts.device.type == "cpu":
        if counts.numel() and int(counts.min()) < 0:
            raise ArgumentError(name, counts.tolist(), "counts of at least 0")
        if counts.numel() and (int(counts.max()) > INT32_MAX or int(counts.sum()) > INT32_MAX):
            raise ArgumentError(name, counts.tolist(), f"counts that sum to at most {INT32_MAX} rows")
        if total is not None and int(counts.sum()) != total:
            raise ArgumentError(name, counts.tolist(), f"counts that sum to the {total} rows")
    return counts.long()


def no_nan(name: str, weights: torch.Tensor) -> None:
    """fp32 weights without NaN; on CUDA only the dtype, because the values cannot be judged without a wait, unless
    FLEXEP_DEBUG=1."""
    if weights.dtype != torch.float32:
        raise ArgumentError(name, weights.dtype, "torch.float32")
    if judges_values(weights) and weights.isnan().any():
        where = weights.isnan().nonzero()[0].tolist()
        raise ArgumentError(name, float("nan"), f"weights without NaN (at {where})")
