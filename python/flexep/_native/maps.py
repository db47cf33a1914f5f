"""Routing maps: thin wrappers over csrc/ops/maps.h and maps_cuda.h, and the map of transposed chunks. Arguments are
checked by flexep.ops. CUDA tensors: work is enqueued, nothing waits.

Shape letters: T tokens, K slots a token, E experts.
"""

from __future__ import annotations

import torch

from flexep._native._load import _C
from flexep._native._step import ints, run_step
from flexep._native.operands import address, enqueue


def _integers(tensor: torch.Tensor | None) -> _C.Integers:
    return _C.Integers(address(tensor), tensor is not None and tensor.dtype == torch.int64)


def indices_to_multihot(
    idx_TK: torch.Tensor, weights_TK: torch.Tensor | None, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """CPU: mask bool [T, E] and, with weights, probs fp32 [T, E]. idx: contiguous int32 in [-1, E)."""
    T, K = idx_TK.shape
    mask_TE = torch.empty(T, num_experts, dtype=torch.bool)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    probs_TE = None if weights_TK is None else torch.empty(T, num_experts)
    _C.indices_to_multihot(
        mask=mask_TE.data_ptr(), probs=address(probs_TE), idx=idx_TK.data_ptr(),
        weights=address(weights_TK), tokens=T, top_k=K, experts=num_experts,
    )  # fmt: skip
    return mask_TE, probs_TE


def multihot_to_indices(
    mask_TE: torch.Tensor, probs_TE: torch.Tensor | None, top_k: int
) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """CPU: indices int32 [T, K], weights fp32 [T, K] with probs, and the first token with more than K experts or
    -1."""
    (T, E), mask_TE = mask_TE.shape, mask_TE.contiguous()
    idx_TK = torch.empty(T, top_k, dtype=torch.int32)
    probs_TE = None if probs_TE is None else probs_TE.contiguous()
    weights_TK = None if probs_TE is None else torch.empty(T, top_k)
    too_wide = _C.multihot_to_indices(
        idx=idx_TK.data_ptr(), weights=address(weights_TK), mask=mask_TE.data_ptr(),
        probs=address(probs_TE), tokens=T, top_k=top_k, experts=E,
    )  # fmt: skip
    return idx_TK, weights_TK, too_wide


def widest_row(mask_TE: torch.Tensor) -> int:
    """CPU: the largest number of experts in a row of a bool mask."""
    mask_TE = mask_TE.contiguous()
    return _C.widest_row(mask=mask_TE.data_ptr(), tokens=mask_TE.shape[0], experts=mask_TE.shape[1])


def pad_routing_map(mask_TE: torch.Tensor, multiple: int) -> torch.Tensor:
    """The mask with its column sums lifted to a multiple: bool [align_up(T, multiple), E]."""
    (T, E), mask_TE, device = mask_TE.shape, mask_TE.contiguous(), mask_TE.device
    out = torch.empty(-(-T // multiple) * multiple, E, dtype=torch.bool, device=device)
    sizes = {"tokens": T, "experts": E, "multiple": multiple}
    if device.type == "cpu":
        _C.pad_routing_map(out=out.data_ptr(), mask=mask_TE.data_ptr(), **sizes)
        return out
    counts = ints(_C.MAP_BANDS, E, device=device)
    enqueue(
        _C.pad_routing_map_cuda, device, out=out.data_ptr(), mask=mask_TE.data_ptr(),
        counts=counts.data_ptr(), **sizes,
    )  # fmt: skip
    return out


def multihot_mask_cuda(idx_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """bool [T, E] of int32 or int64 ids; those outside [0, E) are empty slots."""
    mask_TE = torch.empty(idx_TK.shape[0], num_experts, dtype=torch.bool, device=idx_TK.device)
    _multihot_cuda(mask_TE, None, idx_TK, None)
    return mask_TE


def multihot_probs_cuda(idx_TK: torch.Tensor, weights_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    """fp32 [T, E]: the weight of each expert, those of repeated ids added by ascending k; ids as in
    multihot_mask_cuda."""
    probs_TE = torch.empty(idx_TK.shape[0], num_experts, dtype=torch.float32, device=idx_TK.device)
    _multihot_cuda(None, probs_TE, idx_TK, weights_TK.contiguous())
    return probs_TE


def _multihot_cuda(
    mask_TE: torch.Tensor | None,
    probs_TE: torch.Tensor | None,
    idx_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
) -> None:
    idx_TK, (T, K) = idx_TK.contiguous(), idx_TK.shape
    out = mask_TE if probs_TE is None else probs_TE
    assert out is not None
    enqueue(
        _C.indices_to_multihot_cuda, idx_TK.device, mask=address(mask_TE), probs=address(probs_TE),
        idx=_integers(idx_TK), weights=address(weights_TK), tokens=T, top_k=K, experts=out.shape[1],
    )  # fmt: skip


def mask_indices_cuda(mask_TE: torch.Tensor, top_k: int) -> torch.Tensor:
    """int32 [T, K]: the first K experts of each row of the mask, ascending, then -1."""
    (T, E), mask_TE = mask_TE.shape, mask_TE.contiguous()
    idx_TK = ints(T, top_k, device=mask_TE.device)
    enqueue(
        _C.multihot_to_indices_cuda, mask_TE.device, idx=idx_TK.data_ptr(), mask=mask_TE.data_ptr(),
        tokens=T, top_k=top_k, experts=E,
    )  # fmt: skip
    return idx_TK


def take_columns_cuda(values_TE: torch.Tensor, idx_TK: torch.Tensor) -> torch.Tensor:
    """fp32 [T, K]: values[t, idx[t, k]], 0 where the id is outside [0, E)."""
    values_TE, idx_TK = values_TE.contiguous(), idx_TK.contiguous()
    out_TK = torch.empty(idx_TK.shape, dtype=torch.float32, device=values_TE.device)
    enqueue(
        _C.take_columns_cuda, values_TE.device, out=out_TK.data_ptr(), values=values_TE.data_ptr(),
        idx=_integers(idx_TK), tokens=idx_TK.shape[0], top_k=idx_TK.shape[1], experts=values_TE.shape[1],
    )  # fmt: skip
    return out_TK


def transposed_map(rows: int, num_outer: int, num_inner: int, device: torch.device) -> torch.Tensor:
    """int32 [rows]: the source row of each output row where chunks [outer, inner] become [inner, outer]."""
    out = ints(rows, device=device)
    run_step(_C.transpose_chunks, device, num_rows=rows, outer=num_outer, inner=num_inner, map=out)
    return out
