"""What dispatch and combine refuse, by argument and value, before anything moves."""

from __future__ import annotations

import torch

from flexep.config import ROW_BYTES, DispatcherConfig
from flexep.errors import ArgumentError, HandleMismatch
from flexep.types import HANDLE_VERSION, Handle


def check_tensor(
    name: str,
    value: object,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> torch.Tensor:
    """A dense tensor of the given shape (None: any), dtype, device and row stride 1, or ArgumentError."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(name, type(value).__name__, "a torch.Tensor")
    if (
        value.dtype in dtypes and value.shape == shape and value.device == device
        and value.layout is torch.strided and not value.is_nested and value.is_contiguous()
    ):  # fmt: skip
        return value  # what follows would find nothing, and takes longer
    if value.layout != torch.strided or value.is_nested:
        raise ArgumentError(f"{name}.layout", value.layout, "a dense tensor")
    if value.dtype not in dtypes:
        raise ArgumentError(f"{name}.dtype", value.dtype, " or ".join(map(str, dtypes)))
    if value.device.type != device.type or (device.index is not None and value.device != device):
        raise ArgumentError(f"{name}.device", str(value.device), str(device))
    fits = value.dim() == len(shape) and all(
        want in (None, have) for want, have in zip(shape, value.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ArgumentError(f"{name}.shape", tuple(value.shape), f"({wanted}{',' * (len(shape) == 1)})")
    if not value.is_contiguous():
        raise ArgumentError(f"{name}.stride()", value.stride(), "a contiguous tensor; call .contiguous()")
    return value


def check_rows(
    name: str,
    value: object,
    shape: tuple[int | None, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor:
    """`check_tensor` for rows, which a GPU reads 16 bytes at a time."""
    tensor = check_tensor(name, value, shape, (dtype,), device)
    if not is_aligned(tensor):
        raise ArgumentError(
            f"{name}.data_ptr()", tensor.data_ptr(), f"a multiple of {ROW_BYTES}; call .clone()"
        )
    return tensor


def is_aligned(tensor: torch.Tensor) -> bool:
    """Whether rows can be read where they lie; any address serves a CPU."""
    return not tensor.is_cuda or not tensor.numel() or tensor.data_ptr() % ROW_BYTES == 0


def dense(rows: torch.Tensor) -> torch.Tensor:
    """The rows contiguous and aligned: themselves, or a copy."""
    return rows.contiguous() if is_aligned(rows) else rows.clone(memory_format=torch.contiguous_format)


def check_x(
    x: object, config: DispatcherConfig, device: torch.device, num_tokens: int | None = None
) -> torch.Tensor:
    """x: [T, H] of the dispatcher's dtype with T <= max_tokens, or exactly a handle's T."""
    if num_tokens is None and isinstance(x, torch.Tensor) and x.dim() == 2:
        num_tokens = x.shape[0]
    tensor = check_rows("x", x, (num_tokens, config.hidden), config.dtype, device)
    if num_tokens is not None and num_tokens > config.max_tokens:
        raise ArgumentError("x.shape[0]", num_tokens, f"at most max_tokens = {config.max_tokens}")
    return tensor


def check_topk_idx(
    topk_idx: object, config: DispatcherConfig, device: torch.device, num_tokens: int
) -> torch.Tensor:
    """Expert ids [T, K], int32 or int64. Their range is judged where they are counted."""
    shape = (num_tokens, config.top_k)
    return check_tensor("topk_idx", topk_idx, shape, (torch.int64, torch.int32), device)


def outside(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Bool tensor: ids that are neither an expert nor -1."""
    return topk_idx != topk_idx.clamp(-1, num_experts - 1)


def raise_bad_routing(topk_idx: torch.Tensor, topk_weights: torch.Tensor | None, num_experts: int) -> None:
    """Raises ArgumentError naming the first offending value, if there is one. Waits for the device."""
    strays = outside(topk_idx, num_experts).nonzero()
    if strays.numel():
        token, slot = strays[0].tolist()
        expected = f"expert ids in [0, {num_experts}), or -1 for an empty slot (token {token}, slot {slot})"
        raise ArgumentError("topk_idx", int(topk_idx[token, slot]), expected)
    if topk_weights is not None:
        raise_nan(topk_weights)


def raise_nan(topk_weights: torch.Tensor) -> None:
    """Raises ArgumentError naming the first NaN, if there is one. Waits for the device."""
    if bool(topk_weights.isnan().any()):
        at = topk_weights.isnan().nonzero()[0].tolist()
        raise ArgumentError("topk_weights", float("nan"), f"numbers (token {at[0]}, slot {at[1]} is NaN)")


def check_handle(handle: object, dispatcher_id: str, rank: int) -> Handle:
    """A handle that this dispatcher made for this rank, or HandleMismatch."""
    if not isinstance(handle, Handle):
        raise ArgumentError("handle", type(handle).__name__, "the handle of a dispatch")
    if handle.version != HANDLE_VERSION:
        raise HandleMismatch(
            f"handle version {handle.version}, this FlexEP makes and reads version {HANDLE_VERSION}"
        )
    if handle.dispatcher_id != dispatcher_id:
        raise HandleMismatch(f"this handle was made by {handle.dispatcher_id}; this is {dispatcher_id}")
    if handle.rank != rank:
        raise HandleMismatch(f"this handle belongs to rank {handle.rank}, not to rank {rank}")
    return handle
