"""Routing maps: top-k indices <-> multihot masks (with weights), and the padding of a mask's columns.

Shape letters: T tokens, K slots a token, E experts. All raise ArgumentError for a wrong dtype, device or shape, and on
the CPU (on CUDA with FLEXEP_DEBUG=1) for ids out of range and NaN weights; elsewhere on CUDA, where values cannot be
judged without a wait, an id out of range is an empty slot.
"""

from __future__ import annotations

from typing import Any

import torch

from flexep._native import maps as native
from flexep.errors import ArgumentError
from flexep.ops import _check


def indices_to_multihot(
    topk_idx: torch.Tensor, weights: torch.Tensor | None = None, *, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A mask of the experts that each token names.

    Args:
        topk_idx: int32 or int64 [T, K], -1 empty.
        weights: fp32 [T, K], no NaN; differentiable.
    Returns:
        mask bool [T, E]; probs fp32 [T, E] (0 where the mask is not set) or None. An expert that a token
        names twice is one entry of the mask, and its weights are added by ascending k.
    """
    _check.tensor("topk_idx", topk_idx, dim=2, dtypes=_check.IDS)
    _check.at_least("num_experts", num_experts, 1)
    if weights is not None:
        _check.tensor("weights", weights, dim=2, dtypes=(torch.float32,), like=topk_idx)
    if weights is None:
        return multihot_mask(topk_idx, num_experts), None
    return multihot_mask(topk_idx, num_experts), multihot_probs(topk_idx, weights, num_experts)


def multihot_to_indices(
    mask: torch.Tensor, probs: torch.Tensor | None = None, *, top_k: int | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The experts of each token, ascending, filled up with -1.

    Args:
        mask: bool [T, E].
        probs: fp32 [T, E], no NaN; differentiable. Entries outside the mask are ignored.
        top_k: K, at least the most experts of a token (on the CPU a larger row is refused; on CUDA its first
            K are taken). Left out, it is the most experts of a token, for which CUDA waits.
    Returns:
        topk_idx int32 [T, K]; weights fp32 [T, K] (0 in empty slots) or None.
    """
    return mask_to_indices(mask, probs, top_k, "mask", "probs")


def pad_routing_map(routing_map: torch.Tensor, multiple: int) -> torch.Tensor:
    """A routing map whose every expert has a multiple of `multiple` tokens, for GEMMs on quantised blocks.

    Each column with a count between multiples gains the first tokens that it lacks; columns without a token
    stay empty. So that this is possible for any T, T < multiple included, the result has align_up(T,
    multiple) rows: those past T stand for tokens to be appended to the batch (zero rows), and there are none
    if T is a multiple already. Give added entries the weight 0. The argument is not changed.

    Args:
        routing_map: bool [T, E]. multiple: at least 1; 16, 32, 128 and 256 are usual.
    Returns:
        bool [align_up(T, multiple), E].
    """
    _check_mask("routing_map", routing_map)
    _check.at_least("multiple", multiple, 1)
    return pad_mask(routing_map, multiple)


def mask_to_indices(
    mask: torch.Tensor, probs: torch.Tensor | None, top_k: int | None, mask_name: str, probs_name: str
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """multihot_to_indices, with the names by which its caller knows the mask and the weights."""
    _check_mask(mask_name, mask)
    if top_k is not None:
        _check.at_least("top_k", top_k, 1)
    if probs is None:
        return mask_indices(mask, top_k), None
    _check.tensor(probs_name, probs, dim=2, dtypes=(torch.float32,), like=mask)
    if probs.shape != mask.shape:
        raise ArgumentError(probs_name, tuple(probs.shape), f"the shape of {mask_name}, {tuple(mask.shape)}")
    topk_idx = mask_indices(mask, top_k)
    return topk_idx, mask_weights(probs, topk_idx, probs_name)


def _check_mask(name: str, mask: torch.Tensor) -> None:
    _check.tensor(name, mask, dim=2, dtypes=(torch.bool,))


def check_ids(name: str, idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Where values are judged, int32 ids in [-1, E); elsewhere the ids as they are, for kernels that take any value."""
    if _check.judges_values(idx):
        return _check.expert_ids(name, idx, num_experts)
    _check.tensor(name, idx, dim=2, dtypes=_check.IDS)
    _check.at_least("num_experts", num_experts, 1)
    return idx


def _take_columns(values: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """fp32 [T, K]: values[t, idx[t, k]], 0 where the index is -1."""
    if values.device.type != "cpu":
        return native.take_columns_cuda(values, idx)
    taken = values.gather(1, idx.clamp(min=0).long())
    return torch.where(idx < 0, torch.zeros_like(taken), taken)


def _add_columns(values: torch.Tensor, idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """fp32 [T, E]: the values [T, K] of each expert, added by ascending k. `idx` has been checked."""
    if idx.device.type != "cpu":
        return native.multihot_probs_cuda(idx, values, num_experts)
    probs = native.indices_to_multihot(idx.to(torch.int32).contiguous(), values, num_experts)[1]
    assert probs is not None
    return probs


def _check_weights(name: str, weights: torch.Tensor, like: torch.Tensor) -> None:
    _check.no_nan(name, weights)
    _check.same_device(name, weights, like)
    if weights.shape[0] != like.shape[0] or weights.dim() != 2:
        raise ArgumentError(name, tuple(weights.shape), f"2 dimensions, {like.shape[0]} rows")


@torch.library.custom_op("flexep::multihot_mask", mutates_args=())
def multihot_mask(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """bool [T, E]: the experts that each token names."""
    idx_TK = check_ids("topk_idx", topk_idx, num_experts)
    if idx_TK.device.type == "cpu":
        return native.indices_to_multihot(idx_TK, None, num_experts)[0]
    return native.multihot_mask_cuda(idx_TK, num_experts)


@multihot_mask.register_fake
def _multihot_mask_fake(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    return topk_idx.new_empty(topk_idx.shape[0], num_experts, dtype=torch.bool)


@torch.library.custom_op("flexep::multihot_probs", mutates_args=())
def multihot_probs(topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    """fp32 [T, E]: the weight of each expert, those of repeated ids added by ascending k."""
    idx_TK = check_ids("topk_idx", topk_idx, num_experts)
    _check_weights("weights", weights, topk_idx)
    if weights.shape != topk_idx.shape:
        raise ArgumentError(
            "weights", tuple(weights.shape), f"the shape of topk_idx, {tuple(topk_idx.shape)}"
        )
    return _add_columns(weights, idx_TK, num_experts)


@multihot_probs.register_fake
def _multihot_probs_fake(topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int) -> torch.Tensor:
    return weights.new_empty(topk_idx.shape[0], num_experts)


@torch.library.custom_op("flexep::mask_indices", mutates_args=())
def mask_indices(mask: torch.Tensor, top_k: int | None) -> torch.Tensor:
    """int32 [T, K]: the experts of each row of the mask, ascending, then -1."""
    _check_mask("mask", mask)
    on_cpu = mask.device.type == "cpu"
    if top_k is None:
        widest = native.widest_row(mask) if on_cpu else int(mask.sum(1).max()) if mask.numel() else 0
        top_k = max(1, widest)
    _check.at_least("top_k", top_k, 1)
    if mask.shape[0] * top_k > _check.INT32_MAX:
        raise ArgumentError("top_k", top_k, f"at most {_check.INT32_MAX} slots for {mask.shape[0]} tokens")
    if not on_cpu:
        return native.mask_indices_cuda(mask, top_k)
    idx_TK, _, too_wide = native.multihot_to_indices(mask, None, top_k)
    if too_wide >= 0:
        raise ArgumentError(
            "top_k", top_k, f"at least the {int(mask[too_wide].sum())} experts of token {too_wide}"
        )
    return idx_TK


@mask_indices.register_fake
def _mask_indices_fake(mask: torch.Tensor, top_k: int | None) -> torch.Tensor:
    width = torch.library.get_ctx().new_dynamic_size(min=1) if top_k is None else top_k
    return mask.new_empty(mask.shape[0], width, dtype=torch.int32)


@torch.library.custom_op("flexep::mask_weights", mutates_args=())
def mask_weights(probs: torch.Tensor, topk_idx: torch.Tensor, name: str = "probs") -> torch.Tensor:
    """fp32 [T, K]: probs[t, topk_idx[t, k]], 0 in empty slots. `name` is what errors call probs."""
    _check_weights(name, probs, topk_idx)
    check_ids("topk_idx", topk_idx, probs.shape[1])
    return _take_columns(probs, topk_idx)


@mask_weights.register_fake
def _mask_weights_fake(probs: torch.Tensor, topk_idx: torch.Tensor, name: str = "probs") -> torch.Tensor:
    return probs.new_empty(topk_idx.shape)


@torch.library.custom_op("flexep::pad_mask", mutates_args=())
def pad_mask(mask: torch.Tensor, multiple: int) -> torch.Tensor:
    """See pad_routing_map."""
    _check_mask("routing_map", mask)
    _check.at_least("multiple", multiple, 1)
    if -(-mask.shape[0] // multiple) * multiple > _check.INT32_MAX:
        raise ArgumentError("multiple", multiple, f"at most {_check.INT32_MAX} rows with padding")
    return native.pad_routing_map(mask, multiple)


@pad_mask.register_fake
def _pad_mask_fake(mask: torch.Tensor, multiple: int) -> torch.Tensor:
    return mask.new_empty((mask.shape[0] + multiple - 1) // multiple * multiple, mask.shape[1])


@torch.library.custom_op("flexep::take_columns", mutates_args=())
def take_columns(values: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """fp32 [T, K]: values[t, idx[t, k]], 0 in empty slots. Of gradients: NaN is one, and the ids have been checked."""
    return _take_columns(values, idx)


@take_columns.register_fake
def _take_columns_fake(values: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    return values.new_empty(idx.shape)


@torch.library.custom_op("flexep::add_columns", mutates_args=())
def add_columns(values: torch.Tensor, idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """fp32 [T, E]: the values [T, K] of each expert, added by ascending k. Of gradients, as take_columns."""
    return _add_columns(values, idx, num_experts)


@add_columns.register_fake
def _add_columns_fake(values: torch.Tensor, idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    return values.new_empty(idx.shape[0], num_experts)


def _probs_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[0])


def _probs_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return None, take_columns(grad, ctx.saved_tensors[0]), None


def _weights_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1])
    ctx.num_experts = inputs[0].shape[1]


def _weights_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return add_columns(grad, ctx.saved_tensors[0], ctx.num_experts), None, None


multihot_probs.register_autograd(_probs_backward, setup_context=_probs_setup)
mask_weights.register_autograd(_weights_backward, setup_context=_weights_setup)
