"""Padding of expert-major rows: each expert's rows lifted to a multiple of `alignment`, and back.
Differentiable.

permute pads while it moves the rows; these are for rows that are expert-major already.
"""

from __future__ import annotations

from typing import Any

import torch

from flexep._native import cast as native_cast
from flexep.errors import ArgumentError
from flexep.ops import _check
from flexep.ops.rows import gather_rows
from flexep.ops.segments import lifted, segment_map


def pad(
    x: torch.Tensor, counts: torch.Tensor, alignment: int, *, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Puts zero rows behind each expert's rows.

    Args:
        x: [sum(counts), H] expert-major rows of any dtype, H * itemsize a multiple of 16.
        counts: int32 or int64 [E], rows of each expert.
        alignment: at least 1. An expert without rows gets none.
        num_rows: rows of the result, at least the padded counts' sum, for a static shape; the tail is zero.
            Left out, it is that sum (on CUDA: a host wait).
    Returns:
        padded x [N, H]; padded_counts int32 [E].
    """
    _check_arguments(x, counts, alignment, num_rows)
    padded = pad_rows(x, counts, alignment, num_rows)
    return padded, lifted(counts.long(), alignment).to(torch.int32)


def quantize_and_pad(
    x: torch.Tensor, counts: torch.Tensor, alignment: int, *, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """pad of rows that are cast to fp8 on their way, as flexep.ops.quantize_rows does; not differentiable.

    Args:
        x: fp32, fp16 or bf16, H a multiple of 16; the others as in pad.
    Returns:
        payload float8_e4m3fn [N, H]; scales fp32 [N, ceil(H / 128)], padding +0 in both; padded_counts int32 [E].
    """
    _check_arguments(x, counts, alignment, num_rows)
    payload, scales = pad_quantized(x, counts, alignment, num_rows)
    return payload, scales, lifted(counts.long(), alignment).to(torch.int32)


def unpad(
    x: torch.Tensor, counts: torch.Tensor, alignment: int, *, num_rows: int | None = None
) -> torch.Tensor:
    """Takes the padding out again.

    Args:
        x: [N, H], as pad returns it. counts: int32 or int64 [E], rows of each expert without padding.
        num_rows: rows of the result, at least sum(counts), the tail zero; left out, it is that sum (on CUDA:
            a wait).
    Returns:
        [sum(counts) or num_rows, H].
    """
    _check_arguments(x, counts, alignment, num_rows)
    return unpad_rows(x, counts, alignment, num_rows)


def _check_arguments(x: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int | None) -> None:
    _check.rows("x", x)
    _check.tensor("counts", counts, dim=1, dtypes=_check.IDS, like=x)
    _check.at_least("alignment", alignment, 1)
    if num_rows is not None:
        _check.at_least("num_rows", num_rows, 0)


def _result_rows(sizes: torch.Tensor, alignment: int, num_rows: int | None) -> int:
    """Rows of a result that lifts sizes to `alignment`."""
    if num_rows is not None and sizes.device.type != "cpu":
        return num_rows
    needed = int(lifted(sizes, alignment).sum())
    if needed > _check.INT32_MAX:
        raise ArgumentError(
            "alignment", alignment, f"at most {_check.INT32_MAX} rows with padding, not {needed}"
        )
    if num_rows is not None and num_rows < needed:
        raise ArgumentError("num_rows", num_rows, f"at least {needed} rows")
    return needed if num_rows is None else num_rows


@torch.library.custom_op("flexep::pad_rows", mutates_args=())
def pad_rows(x: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int | None) -> torch.Tensor:
    """See pad. x may have more rows than sum(counts): the tail is not read."""
    _check.same_device("counts", counts, x)
    sizes = _check.sizes("counts", counts, None)
    _check_rows_of("x", x, sizes, 1)
    rows = _result_rows(sizes, alignment, num_rows)
    return gather_rows(x, segment_map(sizes, rows, out_alignment=alignment))


@torch.library.custom_op("flexep::unpad_rows", mutates_args=())
def unpad_rows(x: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int | None) -> torch.Tensor:
    """See unpad. x may have more rows than the padded counts' sum: the tail is not read."""
    _check.same_device("counts", counts, x)
    sizes = _check.sizes("counts", counts, None)
    _check_rows_of("x", x, sizes, alignment)
    rows = _result_rows(sizes, 1, num_rows)
    return gather_rows(x, segment_map(sizes, rows, src_alignment=alignment))


@torch.library.custom_op("flexep::pad_quantized", mutates_args=())
def pad_quantized(
    x: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See quantize_and_pad. x may have more rows than sum(counts): the tail goes nowhere."""
    _check.same_device("counts", counts, x)
    sizes = _check.sizes("counts", counts, None)
    _check_rows_of("x", x, sizes, 1)
    row_map = segment_map(sizes, x.shape[0], src_alignment=alignment)
    row_src = segment_map(sizes, _result_rows(sizes, alignment, num_rows), out_alignment=alignment)
    return native_cast.quantize_rows(x, row_map.unsqueeze(1), row_src)


def _check_rows_of(name: str, x: torch.Tensor, sizes: torch.Tensor, alignment: int) -> None:
    if x.device.type != "cpu":
        return
    needed = int(lifted(sizes, alignment).sum())
    if needed > x.shape[0]:
        raise ArgumentError(name, tuple(x.shape), f"the {needed} rows that counts describes")


def _fake(x: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int | None) -> torch.Tensor:
    rows = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    return x.new_empty(rows, x.shape[1])


def _quantized_fake(
    x: torch.Tensor, counts: torch.Tensor, alignment: int, num_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    blocks = (x.shape[1] + native_cast.SCALE_BLOCK - 1) // native_cast.SCALE_BLOCK
    payload = x.new_empty(rows, x.shape[1], dtype=native_cast.PAYLOAD)
    return payload, x.new_empty(rows, blocks, dtype=torch.float32)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    x, counts, alignment, _ = inputs
    ctx.save_for_backward(counts)
    ctx.alignment, ctx.rows = alignment, x.shape[0]


def _pad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    return unpad_rows(grad.contiguous(), counts, ctx.alignment, ctx.rows), None, None, None


def _unpad_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    (counts,) = ctx.saved_tensors
    return pad_rows(grad.contiguous(), counts, ctx.alignment, ctx.rows), None, None, None


pad_rows.register_fake(_fake)
unpad_rows.register_fake(_fake)
pad_quantized.register_fake(_quantized_fake)
pad_rows.register_autograd(_pad_backward, setup_context=_setup)
unpad_rows.register_autograd(_unpad_backward, setup_context=_setup)
