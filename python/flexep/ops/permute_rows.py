"""The custom ops beneath permute and unpermute: schema, CPU and CUDA implementation, fake kernel, autograd.

row_map int32 [T, K] and row_src int32 [N] are inverses of each other (see flexep.ops.permute.Permuted); each
op's backward is the other op, so what one direction needs the other has already.
"""

from __future__ import annotations

from typing import Any

import torch

from flexep._native import rows as native
from flexep._native.permutation import plan_permutation as native_plan
from flexep.errors import ArgumentError
from flexep.ops import _check
from flexep.ops.maps import check_ids
from flexep.ops.rows import dot_slots, reduce_rows


@torch.library.custom_op("flexep::plan_permutation", mutates_args=())
def plan_permutation(
    topk_idx: torch.Tensor, num_experts: int, alignment: int, num_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The one-rank plan: topk_idx int32, row_map, row_src, counts, padded_counts, dropped (Permuted has the
    words)."""
    idx_TK = check_ids("routing", topk_idx, num_experts)
    _check.at_least("alignment", alignment, 1)
    if num_rows is not None:
        _check.at_least("num_rows", num_rows, 0)
    ids_TK = torch.empty(topk_idx.shape, dtype=torch.int32, device=topk_idx.device)
    return ids_TK, *native_plan(idx_TK, num_experts, alignment, num_rows, ids_TK=ids_TK)


@plan_permutation.register_fake
def _plan_fake(
    topk_idx: torch.Tensor, num_experts: int, alignment: int, num_rows: int | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    rows = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    ints = [topk_idx.new_empty(num_experts, dtype=torch.int32) for _ in range(3)]
    maps = [
        torch.empty_like(topk_idx, dtype=torch.int32, memory_format=torch.contiguous_format) for _ in range(2)
    ]
    return maps[0], maps[1], topk_idx.new_empty(rows, dtype=torch.int32), ints[0], ints[1], ints[2]


@torch.library.custom_op("flexep::permute_rows", mutates_args=(), device_types=("cpu", "cuda"))
def permute_rows(
    x: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """out[row_map[t, k]] = x[t], or round(weights[t, k] * x[t]); padding rows +0. [N, H] in x's dtype."""
    return native.expand_rows(x, row_map, row_src, weights)


@permute_rows.register_fake
def _permute_fake(
    x: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    return x.new_empty(row_src.shape[0], x.shape[1])


@torch.library.custom_op("flexep::permute_with_weights", mutates_args=(), device_types=("cpu", "cuda"))
def permute_with_weights(
    x: torch.Tensor, weights: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """permute_rows(x) and permute_weights(weights), on CUDA in one pass: [N, H] like x, fp32 [N]."""
    _check_weights(weights, row_map, nan=False)
    if x.is_cuda:
        rows, permuted, _ = native.expand_rows_carrying(x, row_map, row_src, weights, None)
        return rows, permuted
    return native.expand_rows(x, row_map, row_src), native.take(weights, row_src)


@permute_with_weights.register_fake
def _permute_with_weights_fake(
    x: torch.Tensor, weights: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(row_src.shape[0], x.shape[1]), weights.new_empty(row_src.shape)


@torch.library.custom_op("flexep::unpermute_rows", mutates_args=())
def unpermute_rows(
    y: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    """out[t] = sum of (weights[t, k] *) y[row_map[t, k]] by ascending row, as reduce_rows; [T, H] in y's
    dtype."""
    return reduce_rows(y, row_map, weights, y.dtype, True)


@unpermute_rows.register_fake
def _unpermute_fake(
    y: torch.Tensor, row_map: torch.Tensor, row_src: torch.Tensor, weights: torch.Tensor | None = None
) -> torch.Tensor:
    return y.new_empty(row_map.shape[0], y.shape[1])


@torch.library.custom_op("flexep::permute_weights", mutates_args=())
def permute_weights(
    weights: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, nan: bool = False
) -> torch.Tensor:
    """fp32 weights to the places that `inverse` describes: out[i] = weights.flatten()[inverse[i]], 0 where
    -1.

    `index`, of the shape of `weights`, holds where each weight goes. (row_map, row_src) takes weights of
    slots to rows, (row_src, row_map) of rows to slots. `nan` allows NaN, which gradients may hold.
    """
    _check_weights(weights, index, nan)
    return native.take(weights, inverse)


def _check_weights(weights: torch.Tensor, index: torch.Tensor, nan: bool) -> None:
    _check.same_device("weights", weights, index)
    _check.tensor("weights", weights, dtypes=(torch.float32,))
    if not nan:
        _check.no_nan("weights", weights)
    if weights.shape != index.shape:
        raise ArgumentError("weights", tuple(weights.shape), f"shape {tuple(index.shape)}")


@permute_weights.register_fake
def _permute_weights_fake(
    weights: torch.Tensor, index: torch.Tensor, inverse: torch.Tensor, nan: bool = False
) -> torch.Tensor:
    return weights.new_empty(inverse.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    rows, row_map, row_src, weights = inputs
    # The rows are kept for the weights' gradient alone.
    keep = rows if weights is not None and ctx.needs_input_grad[3] else None
    ctx.save_for_backward(row_map, row_src, weights, keep)


def _permute_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    row_map, row_src, weights, x = ctx.saved_tensors
    grad = grad.contiguous()
    grad_x = unpermute_rows(grad, row_map, row_src, weights) if ctx.needs_input_grad[0] else None
    grad_weights = None
    if x is not None:
        grad_weights = dot_slots(x, grad, row_map)
    return grad_x, None, None, grad_weights


def _unpermute_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    row_map, row_src, weights, y = ctx.saved_tensors
    grad = grad.contiguous()
    grad_y = permute_rows(grad, row_map, row_src, weights) if ctx.needs_input_grad[0] else None
    grad_weights = None
    if y is not None:
        grad_weights = dot_slots(grad, y, row_map)
    return grad_y, None, None, grad_weights


def _save_maps(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[2:])
    ctx.set_materialize_grads(False)


def _permute_with_weights_backward(
    ctx: Any, grad: torch.Tensor | None, grad_weights: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    row_map, row_src = ctx.saved_tensors
    grad_x, grad_slots = None, None
    if grad is not None and ctx.needs_input_grad[0]:
        grad_x = unpermute_rows(grad.contiguous(), row_map, row_src)
    if grad_weights is not None and ctx.needs_input_grad[1]:
        grad_slots = permute_weights(grad_weights, row_src, row_map, nan=True)
    return grad_x, grad_slots, None, None


def _save_index(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[1:3])


def _permute_weights_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    index, inverse = ctx.saved_tensors
    return permute_weights(grad, inverse, index, nan=True), None, None, None


permute_rows.register_autograd(_permute_backward, setup_context=_save)
unpermute_rows.register_autograd(_unpermute_backward, setup_context=_save)
permute_with_weights.register_autograd(_permute_with_weights_backward, setup_context=_save_maps)
permute_weights.register_autograd(_permute_weights_backward, setup_context=_save_index)
