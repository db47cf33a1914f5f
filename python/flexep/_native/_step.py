"""How a step of the plan is run: tensors become addresses, on the host at once or on a CUDA stream."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from flexep._native._load import _C
from flexep._native.operands import enqueue
from flexep.errors import ArgumentError


def run_step(step: Callable[..., None], device: torch.device, *shared: object, **values: object) -> None:
    """Runs one plan step where its tensors are: on the host at once, or enqueued on the current CUDA stream.

    Tensors become addresses, None a null one. The caller keeps every tensor alive until the step has run or
    been enqueued; the caching allocator does the rest in stream order.
    """
    fields = {
        k: v.data_ptr() if isinstance(v, torch.Tensor) else 0 if v is None else v for k, v in values.items()
    }
    run_native(step, device, *shared, **fields)


def run_native(step: Callable[..., None], device: torch.device, *shared: object, **fields: object) -> None:
    """`run_step` for addresses."""
    if device.type == "cuda":
        enqueue(step, device, *shared, **fields)
    else:
        step(*shared, **fields, stream=None)


def ints(*shape: int, device: torch.device) -> torch.Tensor:
    """An int32 tensor, its contents undefined."""
    return torch.empty(shape, dtype=torch.int32, device=device)


def maker(dtype: torch.dtype, device: torch.device) -> Callable[..., torch.Tensor]:
    """Makes tensors, their contents undefined, by shape: of a dtype and a device that need not be looked up again, in
    half the time of torch.empty."""
    return torch.empty(0, dtype=dtype, device=device).new_empty


def carve(device: torch.device, *lengths: int) -> tuple[torch.Tensor, ...]:
    """int32 tensors of these lengths, contents undefined, one behind the other in one allocation."""
    return torch.empty(sum(lengths), dtype=torch.int32, device=device).split_with_sizes(lengths)


def int32(name: str, tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """The tensor, contiguous; refuses another dtype or number of dimensions."""
    if tensor.dim() != dim:
        raise ArgumentError(name, tuple(tensor.shape), f"{dim} dimensions")
    if tensor.dtype != torch.int32:
        raise ArgumentError(name, tensor.dtype, "torch.int32")
    return tensor.contiguous()


def workspace_ints(experts: int, ranks: int, device: torch.device) -> int:
    """Integers of scratch memory that any step over that many experts and ranks can do with."""
    return _workspace_ints(experts, ranks, device.type == "cuda")


_workspace_ints = cache(_C.plan_workspace_ints)


def workspace(experts: int, ranks: int, device: torch.device) -> torch.Tensor:
    """The scratch memory itself."""
    return ints(workspace_ints(experts, ranks, device), device=device)
