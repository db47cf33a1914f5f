"""Index maps between two layouts of the same segments of rows; pad, unpad and sort_chunks are gathers by them."""

from __future__ import annotations

import torch

from flexep._native import segments as native


def segment_map(
    sizes_S: torch.Tensor,
    rows: int,
    *,
    order_S: torch.Tensor | None = None,
    out_alignment: int = 1,
    src_alignment: int = 1,
) -> torch.Tensor:
    """int32 [rows]: the source row of each output row, -1 where a segment is padding and past the last segment.

    Segment c has sizes[c] rows. The source holds the segments in order, each lifted to a multiple of src_alignment; the
    output holds order[0], order[1], ... (left out: in order), each lifted to a multiple of out_alignment. Both int64
    [S]. No step waits for the device; on CUDA it is one kernel for up to 2048 segments.
    """
    if sizes_S.is_cuda and sizes_S.shape[0] <= native.MOST_SEGMENTS:
        return native.segment_map(sizes_S, rows, order_S, out_alignment, src_alignment)
    if sizes_S.shape[0] == 0:
        return torch.full((rows,), -1, dtype=torch.int32, device=sizes_S.device)
    src_begin_S = _begins(lifted(sizes_S, src_alignment))
    if order_S is not None:
        sizes_S, src_begin_S = sizes_S[order_S], src_begin_S[order_S]
    out_sizes_S = lifted(sizes_S, out_alignment)
    position = torch.arange(rows, device=sizes_S.device)
    ends_S = out_sizes_S.cumsum(0)
    segment = torch.searchsorted(ends_S, position, right=True)
    inside = segment < ends_S.shape[0]
    segment = segment.clamp(max=ends_S.shape[0] - 1)
    offset = position - _begins(out_sizes_S)[segment]
    inside &= offset < sizes_S[segment]
    return torch.where(inside, src_begin_S[segment] + offset, -1).to(torch.int32)


def lifted(sizes: torch.Tensor, alignment: int) -> torch.Tensor:
    """sizes, each rounded up to a multiple of `alignment`."""
    return torch.div(sizes + (alignment - 1), alignment, rounding_mode="floor") * alignment


def _begins(sizes_S: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the first row of each segment, laid one after another."""
    return sizes_S.cumsum(0) - sizes_S
