"""Permutation on one rank: tokens to expert-major rows and back, padding fused, both directions
differentiable.

The plan is the dispatchers' own (one rank): expert-major, inside an expert by (token, slot), each expert
padded to `alignment`. The row map is compact: K entries a token, whatever the number of experts. Shape
letters: T tokens, K slots a token, E experts, H hidden, N rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep.errors import ArgumentError
from flexep.ops import _check
from flexep.ops.cast import permute_quantized, permute_scaled
from flexep.ops.maps import mask_to_indices
from flexep.ops.permute_rows import (
    permute_rows,
    permute_weights,
    permute_with_weights,
    plan_permutation,
    unpermute_rows,
)


@dataclass(frozen=True)
class Permuted:
    """What permute returns and unpermute needs.

    x: [N, H] expert-major rows, padding rows zero. weights: fp32 [N] (0 on padding), or None.
    row_map: int32 [T, K], the row of each slot; -1 where the slot is empty or its row was dropped.
    row_src: int32 [N], t * K + k of the slot that fills the row; -1 on padding.
    counts, padded_counts, dropped: int32 [E]: rows kept, the same padded, and rows that num_rows had no room
        for.
    topk_idx: int32 [T, K], the expert of each slot (ascending, where a routing map was given).
    scales: fp32 [N, B], those of x's rows (0 on padding), if x came with scales or was quantised; or None.
    """

    x: torch.Tensor
    weights: torch.Tensor | None
    row_map: torch.Tensor
    row_src: torch.Tensor
    counts: torch.Tensor
    padded_counts: torch.Tensor
    dropped: torch.Tensor
    topk_idx: torch.Tensor
    scales: torch.Tensor | None = None


def permute(
    x: torch.Tensor,
    routing: torch.Tensor,
    weights: torch.Tensor | None = None,
    *,
    num_experts: int | None = None,
    top_k: int | None = None,
    alignment: int = 1,
    num_rows: int | None = None,
    scales: torch.Tensor | None = None,
    quantize: bool = False,
) -> Permuted:
    """Copies each token's row once for each of its slots, grouped by expert.

    Args:
        x: [T, H], rows contiguous, H * itemsize a multiple of 16; any dtype.
        routing: expert ids, int32 or int64 [T, K], -1 empty, a repeated id a slot of its own; or a mask, bool
            [T, E].
        weights: fp32, the shape of `routing`, no NaN; differentiable. A weight of 0.0 is a weight.
        num_experts: E; required with ids, and a mask says it.
        top_k: for a mask: K, at least the most experts of a token; left out, it is that (on CUDA: a host
            wait).
        alignment: each expert's rows are padded to a multiple of this.
        num_rows: N of a static output. Left out, N is exact (on CUDA: a host wait). If the padded rows do not
            fit, the largest count c is taken such that all experts fit with their first c rows, and the rest
            are dropped.
        scales: fp32 [T, B] that belong to the rows of x (fp8, or any bytes) and are permuted with them; not
            differentiable.
        quantize: casts the rows to fp8 while they move, as flexep.ops.quantize_rows does, H a multiple of 16: x of the
            result is float8_e4m3fn; not differentiable.
    Raises:
        ArgumentError: a wrong dtype, device, shape or stride, and on the CPU an id outside [-1, E) or a NaN
            weight (on CUDA an id outside counts as -1).
    """
    _check.rows("x", x)
    _check.tensor("routing", routing, dim=2, dtypes=(*_check.IDS, torch.bool), like=x)
    if weights is not None:
        _check.tensor("weights", weights, dim=2, dtypes=(torch.float32,), like=x)
    _check.at_least("alignment", alignment, 1)
    if num_rows is not None:
        _check.at_least("num_rows", num_rows, 0)
    if routing.shape[0] != x.shape[0]:
        raise ArgumentError(
            "routing", tuple(routing.shape), f"one row for each of the {x.shape[0]} rows of x"
        )
    if weights is not None and weights.shape != routing.shape:
        raise ArgumentError("weights", tuple(weights.shape), f"the shape of routing, {tuple(routing.shape)}")
    if routing.dtype == torch.bool:
        if num_experts not in (None, routing.shape[1]):
            raise ArgumentError(
                "num_experts", num_experts, f"the mask's {routing.shape[1]} columns, or nothing"
            )
        num_experts = routing.shape[1]
        routing, weights = mask_to_indices(routing, weights, top_k, "routing", "weights")
    elif num_experts is None:
        raise ArgumentError("num_experts", num_experts, "the number of experts, as routing holds ids")
    elif top_k not in (None, routing.shape[1]):
        raise ArgumentError("top_k", top_k, f"the {routing.shape[1]} columns of routing, or nothing")
    _check.at_least("num_experts", num_experts, 1)
    if scales is not None:
        _check.tensor("scales", scales, dim=2, dtypes=(torch.float32,), like=x)
        if quantize:
            raise ArgumentError("quantize", quantize, "False, as x comes with scales")
    topk_idx, row_map, row_src, counts, padded_counts, dropped = plan_permutation(
        routing, num_experts, alignment, num_rows
    )
    rows_scales: torch.Tensor | None = None
    rows_weights: torch.Tensor | None = None
    if quantize:
        rows, rows_scales = permute_quantized(x, row_map, row_src)
    elif scales is not None:
        rows, rows_scales = permute_scaled(x, scales, row_map, row_src)
    elif weights is not None:
        rows, rows_weights = permute_with_weights(x, weights, row_map, row_src)
    else:
        rows = permute_rows(x, row_map, row_src)
    if weights is not None and rows_weights is None:
        rows_weights = permute_weights(weights, row_map, row_src)
    return Permuted(
        x=rows,
        weights=rows_weights,
        row_map=row_map,
        row_src=row_src,
        counts=counts,
        padded_counts=padded_counts,
        dropped=dropped,
        topk_idx=topk_idx,
        scales=rows_scales,
    )


def unpermute(y: torch.Tensor, permuted: Permuted, weights: torch.Tensor | None = None) -> torch.Tensor:
    """Adds each token's rows: z[t] = sum of (weight times) y over the rows of t, by ascending row.

    Products and sums are fp32 and round separately, the sum rounds once to y's dtype; a token without rows
    gives +0.

    Args:
        y: [N, H] fp32, fp16 or bf16: one row for each row of `permuted.x`. Padding rows are not read.
        weights: fp32, differentiable: [N], one for each row (`permuted.weights`), or [T, K], one for each
            slot.
    Returns:
        [T, H] in y's dtype.
    """
    row_map, row_src = permuted.row_map, permuted.row_src
    _check.rows("y", y, floats=True)
    _check.same_device("y", y, row_src)
    if weights is not None:
        _check.tensor("weights", weights, dtypes=(torch.float32,), like=y)
    if y.shape[0] != row_src.shape[0]:
        raise ArgumentError("y", tuple(y.shape), f"{row_src.shape[0]} rows, as permuted.x has")
    if weights is not None and weights.dim() == 1:
        weights = permute_weights(weights, row_src, row_map)
    return unpermute_rows(y, row_map, row_src, weights)
