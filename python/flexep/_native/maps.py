"""Routing maps on CPU tensors: thin wrappers over csrc/ops/maps.h. Arguments are checked by
flexep.ops.maps."""

from __future__ import annotations

import torch

from flexep._native._load import _C


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def indices_to_multihot(
    idx_TK: torch.Tensor, weights_TK: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Mask bool [T, E] and, with weights, probs fp32 [T, E]. idx: contiguous int32 in [-1, E)."""
    T, K = idx_TK.shape
    mask_TE = torch.empty(T, num_experts, dtype=torch.bool)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    probs_TE = None if weights_TK is None else torch.empty(T, num_experts)
    _C.indices_to_multihot(
        mask=mask_TE.data_ptr(), probs=_address(probs_TE), idx=idx_TK.data_ptr(),
        weights=_address(weights_TK), tokens=T, top_k=K, experts=num_experts,
    )  # fmt: skip
    return mask_TE, probs_TE


def multihot_to_indices(
    mask_TE: torch.Tensor, probs_TE: torch.Tensor | None, top_k: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """Indices int32 [T, K], weights fp32 [T, K] with probs, and the first token with more than K experts or
    -1."""
    (T, E), mask_TE = mask_TE.shape, mask_TE.contiguous()
    idx_TK = torch.empty(T, top_k, dtype=torch.int32)
    probs_TE = None if probs_TE is None else probs_TE.contiguous()
    weights_TK = None if probs_TE is None else torch.empty(T, top_k)
    too_wide = _C.multihot_to_indices(
        idx=idx_TK.data_ptr(), weights=_address(weights_TK), mask=mask_TE.data_ptr(),
        probs=_address(probs_TE), tokens=T, top_k=top_k, experts=E,
    )  # fmt: skip
    return idx_TK, weights_TK, too_wide


def widest_row(mask_TE: torch.Tensor) -> int:
    """The largest number of experts in a row of a bool mask."""
    mask_TE = mask_TE.contiguous()
    return _C.widest_row(mask=mask_TE.data_ptr(), tokens=mask_TE.shape[0], experts=mask_TE.shape[1])


def pad_routing_map(mask_TE: torch.Tensor, multiple: int) -> torch.Tensor:
    """The mask with its column sums lifted to a multiple: bool [align_up(T, multiple), E]."""
    (T, E), mask_TE = mask_TE.shape, mask_TE.contiguous()
    out = torch.empty(-(-T // multiple) * multiple, E, dtype=torch.bool)
    _C.pad_routing_map(
        out=out.data_ptr(), mask=mask_TE.data_ptr(), tokens=T, experts=E, multiple=multiple
    )  # fmt: skip
    return out
