"""From a plan to what the caller gets: the handle and the result of one rank."""

from __future__ import annotations

import torch

from flexep.dispatchers.backend import Planned
from flexep.indexing import take_rows
from flexep.types import HANDLE_VERSION, DispatchResult, Handle


def make_handle(planned: Planned, places: slice, dispatcher_id: str, rank: int) -> Handle:
    """The handle of one rank, whose experts are at `places`."""
    route, rows = planned.route, planned.rows
    recv_rows = route.part_rows
    if route.flat_part is not None:
        recv_rows = take_rows(recv_rows, route.flat_part, -1)
    return Handle(
        version=HANDLE_VERSION,
        dispatcher_id=dispatcher_id,
        rank=rank,
        counts=rows.kept_E[places],  # nobody else's: places are of one rank
        padded_counts=rows.padded_E[places],
        dropped=rows.dropped_E[places],
        recv_rows=recv_rows,
        route=route,
    )


def make_result(
    handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None, flat: bool
) -> DispatchResult:
    """What dispatch returns for one rank."""
    return DispatchResult(
        x=rows,
        weights=weights,
        counts=handle.counts,
        padded_counts=handle.padded_counts,
        dropped=handle.dropped,
        handle=handle,
        expert_idx=_local_experts(handle) if flat else None,
        row_map=handle.row_map if flat else None,
    )


def _local_experts(handle: Handle) -> torch.Tensor:
    """int32 [N, K]: local expert of each slot of the flat rows, -1 empty: the segment its row falls into."""
    if handle.route.flat_expert is not None:
        return handle.route.flat_expert
    ends = handle.padded_counts.cumsum(0)
    expert = torch.searchsorted(ends, handle.recv_rows.contiguous(), right=True).to(torch.int32)
    return torch.where(handle.recv_rows >= 0, expert, -1)
