"""The map between two layouts of segments on CUDA: a thin wrapper over csrc/ops/segments.h."""

from __future__ import annotations

import torch

from flexep._native._load import _C
from flexep._native.operands import address, enqueue

MOST_SEGMENTS = 2048


def segment_map(
    sizes_S: torch.Tensor, rows: int, order_S: torch.Tensor | None, out_alignment: int, src_alignment: int
) -> torch.Tensor:
    """See flexep.ops.segments.segment_map; its caller has checked dtypes, shapes and devices."""
    sizes_S = sizes_S.to(torch.int32).contiguous()
    order_S = None if order_S is None else order_S.to(torch.int32).contiguous()
    out = torch.empty(rows, dtype=torch.int32, device=sizes_S.device)
    enqueue(
        _C.segment_map_cuda, sizes_S.device, map=out.data_ptr(), sizes=sizes_S.data_ptr(), order=address(order_S),
        rows=rows, segments=sizes_S.shape[0], out_alignment=out_alignment, src_alignment=src_alignment,
    )  # fmt: skip
    return out
