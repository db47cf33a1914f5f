"""Quantised rows: thin wrappers over csrc/ops/cast.h. On CUDA tensors work is enqueued and nothing waits."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexep._native._load import _C
from flexep._native.operands import CODES, check_operand, check_vector, enqueue, output, rows_of, slot_index
from flexep.errors import ArgumentError

SCALE_BLOCK = 128  # columns that share a scale
CAST_COLUMNS = 16  # rows are whole multiples of this, so that the payload's are of 16 bytes
PAYLOAD = torch.float8_e4m3fn


def scale_columns(hidden: int) -> int:
    """Scales of a row."""
    return -(-hidden // SCALE_BLOCK)


def quantize_rows(
    x_TH: torch.Tensor, row_map_TK: torch.Tensor | None = None, row_src_N: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """payload e4m3 [N, H] and scales fp32 [N, ceil(H / 128)] of x; with both maps, of its expanded rows
    (expand_rows), each cast once, padding +0 in both."""
    check_operand("x", x_TH, floats=True)
    tokens, hidden = x_TH.shape
    if hidden % CAST_COLUMNS:
        raise ArgumentError(
            "hidden", hidden, f"a multiple of {CAST_COLUMNS}, so that fp8 rows are of 16 bytes"
        )
    top_k, rows = 1, tokens
    if row_map_TK is not None and row_src_N is not None:
        row_map_TK, row_src_N = slot_index(row_map_TK, row_src_N, x_TH)
        top_k, rows = row_map_TK.shape[1], row_src_N.shape[0]
    payload_NH = output(rows, hidden, PAYLOAD, x_TH.device)
    scales_NB = output(rows, scale_columns(hidden), torch.float32, x_TH.device)
    _run(
        _C.quantize_rows, x_TH.device, payload=payload_NH.data_ptr(), scales=scales_NB.data_ptr(),
        src=rows_of(x_TH), row_map=0 if row_map_TK is None else row_map_TK.data_ptr(),
        row_src=0 if row_src_N is None else row_src_N.data_ptr(), tokens=tokens, top_k=top_k, rows=rows,
        hidden=hidden,
    )  # fmt: skip
    return payload_NH, scales_NB


def dequantize_rows(payload_NH: torch.Tensor, scales_NB: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """See flexep.ops.cast.dequantize_rows."""
    check_operand("payload", payload_NH, floats=False)
    if payload_NH.dtype != PAYLOAD:
        raise ArgumentError("payload", payload_NH.dtype, str(PAYLOAD))
    if dtype not in CODES:
        raise ArgumentError("dtype", dtype, "float32, float16 or bfloat16")
    rows, hidden = payload_NH.shape
    check_vector("scales", scales_NB, torch.float32, (rows, scale_columns(hidden)), payload_NH)
    scales_NB = scales_NB.contiguous()
    out_NH = output(rows, hidden, dtype, payload_NH.device)
    _run(
        _C.dequantize_rows, payload_NH.device, out=out_NH.data_ptr(), out_dtype=CODES[dtype],
        payload=rows_of(payload_NH), scales=scales_NB.data_ptr(), rows=rows, hidden=hidden,
    )  # fmt: skip
    return out_NH


def _run(call: Callable[..., None], device: torch.device, **fields: object) -> None:
    if device.type == "cuda":
        enqueue(call, device, threads=0, **fields)
    else:
        call(**fields, threads=torch.get_num_threads(), stream=None)
