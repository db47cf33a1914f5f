"""Operands of the row functors: what a tensor must be, and the pointer that the compiled module gets of it.

Everything raises ArgumentError with the argument's name and value. Indices out of range are refused on the CPU alone;
on CUDA, where values cannot be judged without waiting for the device, they count as -1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexep._native._load import _C
from flexep._native.memory import empty
from flexep.errors import ArgumentError

ROW_BYTES = 16  # rows are whole multiples of this
INT32_MAX = 2**31 - 1  # row numbers are int32
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}  # of csrc/base/dtype.h
BYTES = 3


def check_rows(name: str, rows: torch.Tensor, *, floats: bool) -> None:
    """A row matrix: 2-D, contiguous rows of a multiple of 16 bytes, fp32/fp16/bf16 if `floats`. Any
    device."""
    if rows.dim() != 2:
        raise ArgumentError(name, tuple(rows.shape), "2 dimensions, [rows, hidden]")
    if floats and rows.dtype not in FLOATS:
        raise ArgumentError(name, rows.dtype, "float32, float16 or bfloat16")
    if rows.shape[1] * rows.element_size() % ROW_BYTES or rows.shape[1] == 0:
        raise ArgumentError(
            "hidden", rows.shape[1], f"rows of a multiple of {ROW_BYTES} bytes ({name}: {rows.dtype})"
        )
    if rows.stride(1) != 1 and rows.shape[0]:
        raise ArgumentError(name, rows.stride(), "contiguous rows: stride(1) == 1")


def check_vector(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    """An index or weight tensor of exactly this dtype and shape, on the device of `like`."""
    if tensor.dtype != dtype:
        raise ArgumentError(name, tensor.dtype, str(dtype))
    if tuple(tensor.shape) != shape:
        raise ArgumentError(name, tuple(tensor.shape), f"shape {shape}")
    if tensor.device != like.device:
        raise ArgumentError(name, str(tensor.device), f"the device of the rows, {like.device}")


def check_range(name: str, values: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A CPU tensor of int32 or int64 as contiguous int32; refuses a value outside [low, high)."""
    values, count = values.contiguous(), values.numel()
    if values.dtype == torch.int32:
        narrow, bad = values, _C.first_outside(values.data_ptr(), count, low, high)
    else:
        narrow = torch.empty(values.shape, dtype=torch.int32)
        bad = _C.narrow(narrow.data_ptr(), values.data_ptr(), count, low, high)
    if bad >= 0:
        raise ArgumentError(name, int(values.view(-1)[bad]), f"values in [{low}, {high}) (position {bad})")
    return narrow


def check_operand(name: str, rows: torch.Tensor, *, floats: bool) -> bool:
    """check_rows, and what only a real tensor can show: its device, its size and where its rows lie.

    Returns whether it is a CUDA tensor.
    """
    if rows.device.type not in ("cpu", "cuda"):
        raise ArgumentError(name, str(rows.device), "a CPU or CUDA tensor")
    check_rows(name, rows, floats=floats)
    for size in rows.shape:
        if size > INT32_MAX:
            raise ArgumentError(name, tuple(rows.shape), f"at most {INT32_MAX} rows and columns")
    if not rows.is_cuda:
        return False
    steps = rows.stride(0) * rows.element_size() if rows.shape[0] > 1 else 0
    if rows.numel() and (rows.data_ptr() % ROW_BYTES or steps % ROW_BYTES):
        raise ArgumentError(
            name,
            f"address {rows.data_ptr():#x}, strides {rows.stride()}",
            f"rows aligned to {ROW_BYTES} bytes",
        )
    return True


def enqueue(call: Callable[..., None], device: torch.device, *shared: object, **fields: object) -> None:
    """Calls a function of the compiled module with the current stream of a CUDA device as `stream`, on that device; one
    without an index is the current one. Without `fields` the stream is the last argument, which is faster to pass."""
    here = torch._C._cuda_getDevice()  # CUDA runs: there are tensors on it
    there = here if device.index is None else device.index
    stream = torch._C._cuda_getCurrentRawStream(there)  # a Stream would take longer to make than a launch
    if there == here:
        if fields:
            call(*shared, **fields, stream=stream)
        else:
            call(*shared, stream)
    else:
        with torch.cuda.device(there):
            call(*shared, **fields, stream=stream)


def index(name: str, idx: torch.Tensor, dim: int, high: int, like: torch.Tensor) -> torch.Tensor:
    """int32 indices of `dim` dimensions in [-1, high), contiguous; their range is judged on the CPU alone."""
    if idx.dim() != dim:
        raise ArgumentError(name, tuple(idx.shape), f"{dim} dimension{'s' * (dim > 1)}")
    check_vector(name, idx, torch.int32, tuple(idx.shape), like)
    if idx.numel() > INT32_MAX:
        raise ArgumentError(name, tuple(idx.shape), f"at most {INT32_MAX} entries")
    return idx.contiguous() if idx.is_cuda else check_range(name, idx, -1, high)


def slot_index(
    row_map_TK: torch.Tensor, row_src_N: torch.Tensor, src_TH: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The two maps of a permutation of src's rows, checked."""
    row_map_TK = index("row_map", row_map_TK, 2, row_src_N.shape[0], src_TH)
    if row_map_TK.shape[0] != src_TH.shape[0]:
        raise ArgumentError(
            "row_map", tuple(row_map_TK.shape), f"{src_TH.shape[0]} rows, one for each row of src"
        )
    return row_map_TK, index("row_src", row_src_N, 1, row_map_TK.numel(), src_TH)


def weights_like(weights: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    """fp32 weights of the shape of an index, contiguous; or None."""
    if weights is None:
        return None
    check_vector("weights", weights, torch.float32, tuple(like.shape), like)
    return weights.contiguous()


def rows_of(rows: torch.Tensor) -> tuple[int, int, int]:
    """What csrc calls RowsIn: address, bytes between rows, dtype code; a dtype without a code is bytes."""
    return rows.data_ptr(), rows.stride(0) * rows.element_size(), CODES.get(rows.dtype, BYTES)


def width(rows: torch.Tensor) -> int:
    """Columns of `rows_of(rows)`."""
    return rows.shape[1] if rows.dtype in CODES else rows.shape[1] * rows.element_size()


def address(tensor: torch.Tensor | None) -> int:
    """0 is csrc's "not given"."""
    return 0 if tensor is None else tensor.data_ptr()


def output(rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An uninitialised [rows, hidden] that every element of is about to be written."""
    if device.type == "cpu":
        return empty(rows, hidden, dtype)
    return torch.empty(rows, hidden, dtype=dtype, device=device)


def output_beside(like: torch.Tensor, rows: int, dtype: torch.dtype) -> torch.Tensor:
    """`output` as wide as `like`, where that lies."""
    if like.is_cuda and like.dtype == dtype:
        return like.new_empty((rows, like.shape[1]))  # takes half as long
    return output(rows, like.shape[1], dtype, like.device)
