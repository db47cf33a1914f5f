"""Rows in fp8: quantised, read back, and permuted with their scales.

A row of H columns is e4m3 payload [H] and one fp32 scale for each block of 128 columns, the last one short.
scale = amax / 448, with amax the block's largest magnitude that is not NaN, and 1 where that quotient is 0.
payload = x / scale, rounded to nearest even and never past +-448. A NaN stays a NaN; an Inf makes its block NaN when it
is read back. CPU and CUDA give the same bits. Padding rows are +0 in payload and scales. None of this is
differentiable: a layer that quantises its rows passes gradients straight through.

Shape letters: T tokens, K slots a token, N rows, H hidden, B blocks of a row.
"""

from __future__ import annotations

import torch

from flexep._native import cast as native
from flexep._native import rows as native_rows
from flexep._native.operands import check_operand, check_vector
from flexep.errors import ArgumentError


@torch.library.custom_op("flexep::quantize_rows", mutates_args=(), device_types=("cpu", "cuda"))
def quantize_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Casts rows to fp8.

    Args:
        x: [N, H] fp32, fp16 or bf16; rows contiguous, H a multiple of 16.
    Returns:
        payload float8_e4m3fn [N, H]; scales fp32 [N, B].
    """
    return native.quantize_rows(x)


@torch.library.custom_op("flexep::dequantize_rows", mutates_args=(), device_types=("cpu", "cuda"))
def dequantize_rows(payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """payload * scale in fp32, rounded once.

    Args:
        payload: float8_e4m3fn [N, H], H a multiple of 16. scales: fp32 [N, B].
        dtype: fp32, fp16 or bf16.
    Returns:
        [N, H] in dtype.
    """
    return native.dequantize_rows(payload, scales, dtype)


@torch.library.custom_op("flexep::permute_quantized", mutates_args=(), device_types=("cpu", "cuda"))
def permute_quantized(
    x: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """permute_scaled of quantize_rows(x), in one pass: each token is cast once. payload [N, H], scales [N, B]."""
    return native.quantize_rows(x, row_map, row_src)


@torch.library.custom_op("flexep::permute_scaled", mutates_args=(), device_types=("cpu", "cuda"))
def permute_scaled(
    payload: torch.Tensor, scales: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of any dtype and the fp32 scales [T, B] that belong to them, both to the rows of a permutation.

    On CUDA in one pass. [N, H] like payload, [N, B]; padding +0.
    """
    if scales.dim() != 2:
        raise ArgumentError("scales", tuple(scales.shape), "2 dimensions, [tokens, blocks]")
    check_vector("scales", scales, torch.float32, (payload.shape[0], scales.shape[1]), payload)
    if check_operand("payload", payload, floats=False):
        rows, _, permuted = native_rows.expand_rows_carrying(payload, row_map, row_src, None, scales)
        return rows, permuted
    token = token_of_row(row_src, row_map.shape[1])
    permuted = torch.cat([scales, scales.new_zeros(1, scales.shape[1])])[token.long()]  # -1 names the zeros
    return native_rows.expand_rows(payload, row_map, row_src), permuted


def token_of_row(row_src: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32 [N]: the token of each row, -1 on padding (the floor of -1 / K is -1)."""
    return torch.div(row_src, max(top_k, 1), rounding_mode="floor")


def _scales(x: torch.Tensor, rows: int) -> torch.Tensor:
    return x.new_empty(rows, (x.shape[1] + native.SCALE_BLOCK - 1) // native.SCALE_BLOCK, dtype=torch.float32)


@quantize_rows.register_fake
def _quantize_fake(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape, dtype=native.PAYLOAD), _scales(x, x.shape[0])


@dequantize_rows.register_fake
def _dequantize_fake(payload: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return payload.new_empty(payload.shape, dtype=dtype)


@permute_quantized.register_fake
def _permute_quantized_fake(
    x: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = row_src.shape[0]
    return x.new_empty(rows, x.shape[1], dtype=native.PAYLOAD), _scales(x, rows)


@permute_scaled.register_fake
def _permute_scaled_fake(
    payload: torch.Tensor, scales: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = row_src.shape[0]
    return payload.new_empty(rows, payload.shape[1]), scales.new_empty(rows, scales.shape[1])
