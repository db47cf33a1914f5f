"""Index maps between two layouts of the same segments of rows; pad, unpad and sort_chunks are gathers by
them."""

from __future__ import annotations

import torch


def begins(sizes_S: torch.Tensor) -> torch.Tensor:
    """int64 [S]: the first row of each segment, laid one after another."""
    return sizes_S.cumsum(0) - sizes_S


def segment_map(
    src_begin_S: torch.Tensor, lengths_S: torch.Tensor, out_sizes_S: torch.Tensor, rows: int
) -> torch.Tensor:
    """int32 [rows]: the source row of each output row, -1 where a segment is padding and past the last
    segment.

    Output segment s takes out_sizes[s] rows, of which the first lengths[s] come from source row src_begin[s]
    on. All int64 [S]. No step waits for the device.
    """
    if lengths_S.shape[0] == 0:
        return torch.full((rows,), -1, dtype=torch.int32, device=lengths_S.device)
    position = torch.arange(rows, device=lengths_S.device)
    ends_S = out_sizes_S.cumsum(0)
    segment = torch.searchsorted(ends_S, position, right=True)
    inside = segment < ends_S.shape[0]
    segment = segment.clamp(max=ends_S.shape[0] - 1)
    offset = position - (ends_S - out_sizes_S)[segment]
    inside &= offset < lengths_S[segment]
    return torch.where(inside, src_begin_S[segment] + offset, -1).to(torch.int32)
