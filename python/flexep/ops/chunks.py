"""Chunks of rows in another order: sorting chunks of any size, and the transpose of chunks of one size.

Both stand between an all-to-all, which leaves rows rank-major, and the experts, which want them expert-major.
"""

from __future__ import annotations

from typing import Any

import torch

from flexep._native.maps import transposed_map
from flexep.errors import ArgumentError
from flexep.ops import _check
from flexep.ops.rows import gather_rows
from flexep.ops.segments import segment_map


def sort_chunks_by_index(
    x: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    """Cuts x into chunks and lays them out as chunk sorted_index[0], sorted_index[1], and so on.
    Differentiable.

    Args:
        x: [sum(split_sizes), H] of any dtype, H * itemsize a multiple of 16.
        split_sizes: int32 or int64 [C], rows of each chunk, 0 allowed.
        sorted_index: int32 or int64 [C], a permutation of 0..C-1.
    Returns:
        [N, H] like x.
    """
    _check.rows("x", x)
    _check.tensor("split_sizes", split_sizes, dim=1, dtypes=_check.IDS, like=x)
    _check.tensor("sorted_index", sorted_index, dim=1, dtypes=_check.IDS, like=x)
    return sort_chunks(x, split_sizes, sorted_index)


def transpose_chunks(x: torch.Tensor, num_outer: int, num_inner: int) -> torch.Tensor:
    """Rows [outer, inner, C, H] to [inner, outer, C, H], all flattened to [rows, H]. Differentiable.

    Drop-and-pad sends the same C rows from each of R ranks to each of L local experts: `transpose_chunks(x,
    R, L)` turns what arrived, rank-major, into expert-major rows, and `transpose_chunks(y, L, R)` turns it
    back.

    Args:
        x: [num_outer * num_inner * C, H] of any dtype, H * itemsize a multiple of 16.
    """
    _check.rows("x", x)
    _check.at_least("num_outer", num_outer, 1)
    _check.at_least("num_inner", num_inner, 1)
    return swap_chunks(x, num_outer, num_inner)


@torch.library.custom_op("flexep::sort_chunks", mutates_args=())
def sort_chunks(x: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    """See sort_chunks_by_index."""
    _check.same_device("split_sizes", split_sizes, x)
    _check.same_device("sorted_index", sorted_index, x)
    sizes = _check.sizes("split_sizes", split_sizes, x.shape[0])
    if sorted_index.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("sorted_index", sorted_index.dtype, "int32 or int64")
    if sorted_index.shape != sizes.shape:
        raise ArgumentError("sorted_index", tuple(sorted_index.shape), f"shape {tuple(sizes.shape)}")
    order = sorted_index.long()
    if order.device.type == "cpu" and not torch.equal(order.sort().values, torch.arange(order.shape[0])):
        raise ArgumentError("sorted_index", order.tolist(), f"a permutation of 0..{order.shape[0] - 1}")
    return gather_rows(x, segment_map(sizes, x.shape[0], order_S=order))


@torch.library.custom_op("flexep::swap_chunks", mutates_args=())
def swap_chunks(x: torch.Tensor, num_outer: int, num_inner: int) -> torch.Tensor:
    """See transpose_chunks."""
    _check.at_least("num_outer", num_outer, 1)
    _check.at_least("num_inner", num_inner, 1)
    if x.shape[0] % (num_outer * num_inner):
        raise ArgumentError("x", tuple(x.shape), f"a multiple of {num_outer} * {num_inner} rows")
    return gather_rows(x, transposed_map(x.shape[0], num_outer, num_inner, x.device))


@sort_chunks.register_fake
def _sort_fake(x: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape)


@swap_chunks.register_fake
def _swap_fake(x: torch.Tensor, num_outer: int, num_inner: int) -> torch.Tensor:
    return x.new_empty(x.shape)


def _sort_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(inputs[1], inputs[2])


def _sort_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    sizes, order = ctx.saved_tensors
    return sort_chunks(grad.contiguous(), sizes[order.long()], order.argsort()), None, None


def _swap_setup(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.num_outer, ctx.num_inner = inputs


def _swap_backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    return swap_chunks(grad.contiguous(), ctx.num_inner, ctx.num_outer), None, None


sort_chunks.register_autograd(_sort_backward, setup_context=_sort_setup)
swap_chunks.register_autograd(_swap_backward, setup_context=_swap_setup)
