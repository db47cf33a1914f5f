"""The row functors as torch custom ops: the only operations by which dispatchers and the permutation move
rows.

Shape letters: M source rows, N output rows, T tokens, K entries a token, H hidden. CPU and CUDA give the same bits.
None of these is differentiable by itself: the operations built on them (permute, unpermute, dispatch, combine) are.
All raise ArgumentError for a wrong dtype, device, shape or stride, on the CPU for an index out of range (on CUDA it
counts as -1, and nothing waits), and on CUDA for rows that are not aligned to 16 bytes.
"""

from __future__ import annotations

import torch

from flexep._native import rows as native


@torch.library.custom_op("flexep::gather_rows", mutates_args=(), device_types=("cpu", "cuda"))
def gather_rows(src: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    """out[n] = src[idx[n]]; a zero row (+0) where idx[n] is -1.

    Args:
        src: [M, H], rows contiguous (stride(1) == 1), any row stride, H * itemsize a multiple of 16. Any
            dtype without weights; fp32, fp16 or bf16 with.
        idx: int32 [N] in [-1, M).
        weights: fp32 [N]: out[n] = round(weights[n] * src[idx[n]]), the product taken in fp32.
    Returns:
        [N, H] in src's dtype.
    """
    return native.gather_rows(src, idx, weights)


@torch.library.custom_op("flexep::reduce_rows", mutates_args=(), device_types=("cpu", "cuda"))
def reduce_rows(
    src: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor | None,
    out_dtype: torch.dtype,
    sort: bool,
    groups: torch.Tensor | None = None,
    group_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """out[t] = sum over k of weights[t, k] * src[idx[t, k]], in fp32 and in a fixed order, rounded once.

    Products and sums round separately; a sum starts from its first term; entries of -1 are no terms, a weight
    of 0.0 is one; no term gives +0.

    Args:
        src: [M, H] fp32, fp16 or bf16; rows as in gather_rows.
        idx: int32 [T, K] in [-1, M).
        weights: fp32 [T, K], or None for the plain sum.
        out_dtype: fp32, fp16 or bf16.
        sort: visit entries by ascending index (equal ones by k) instead of by k.
        groups: int32 [T, K]. Visited entries that follow each other with equal groups are summed first, each
            such sum is rounded to `group_dtype`, then the rounded sums are added in order.
    Returns:
        [T, H] in out_dtype.
    """
    return native.reduce_rows(src, idx, weights, out_dtype, sort, groups, group_dtype)


@torch.library.custom_op("flexep::dot_rows", mutates_args=(), device_types=("cpu", "cuda"))
def dot_rows(a: torch.Tensor, b: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """out[m] = sum over h of a[m, h] * b[idx[m], h] in fp32; 0 where idx[m] is -1.

    Element h adds to lane h % 32 of 32 that start at +0, then lane i takes lane i + 16, + 8, + 4, + 2, + 1: the same
    bits on every processor and on CUDA.

    Args:
        a: [M, H] and b: [N, H], one dtype of fp32, fp16, bf16; rows as in gather_rows.
        idx: int32 [M] in [-1, N).
    Returns:
        fp32 [M].
    """
    return native.dot_rows(a, b, idx)


@torch.library.custom_op("flexep::dot_slots", mutates_args=(), device_types=("cpu", "cuda"))
def dot_slots(tokens: torch.Tensor, rows: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    """out[t, k] = sum over h of tokens[t, h] * rows[row_map[t, k], h] in fp32; 0 where row_map[t, k] is -1.

    The gradient of the weights of slots, in the order of dot_rows.

    Args:
        tokens: [T, H] and rows: [N, H], one dtype of fp32, fp16, bf16; rows as in gather_rows.
        row_map: int32 [T, K] in [-1, N).
    Returns:
        fp32 [T, K].
    """
    return native.dot_slots(tokens, rows, row_map)


@gather_rows.register_fake
def _gather_fake(src: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor | None = None) -> torch.Tensor:
    return src.new_empty(idx.shape[0], src.shape[1])


@reduce_rows.register_fake
def _reduce_fake(
    src: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor | None,
    out_dtype: torch.dtype,
    sort: bool,
    groups: torch.Tensor | None = None,
    group_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    return src.new_empty(idx.shape[0], src.shape[1], dtype=out_dtype)


@dot_rows.register_fake
def _dot_fake(a: torch.Tensor, b: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    return a.new_empty(a.shape[0], dtype=torch.float32)


@dot_slots.register_fake
def _dot_slots_fake(tokens: torch.Tensor, rows: torch.Tensor, row_map: torch.Tensor) -> torch.Tensor:
    return tokens.new_empty(row_map.shape, dtype=torch.float32)
