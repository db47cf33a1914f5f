"""From a plan to what the caller gets: the handle and the result of one rank."""

from __future__ import annotations

from functools import partial

import torch

from flexep.dispatchers.backend import Planned
from flexep.indexing import take_rows
from flexep.types import HANDLE_VERSION, DispatchResult, Handle

_OF_PLACES = {"counts": "kept_E", "padded_counts": "padded_E", "dropped": "dropped_E"}


def make_handle(planned: Planned, places: slice, dispatcher_id: str, rank: int) -> Handle:
    """The handle of one rank, whose experts are at `places`."""
    route, rows = planned.route, planned.rows

    def view(name: str) -> torch.Tensor:
        if name == "recv_rows":
            return route.part_rows
        every: torch.Tensor = getattr(rows, _OF_PLACES[name])
        return every[places]  # nobody else's: places are of one rank

    now: dict[str, torch.Tensor] = {}
    if route.flat_part is not None:
        now["recv_rows"] = take_rows(route.part_rows, route.flat_part, -1)
    return Handle.late(
        view, version=HANDLE_VERSION, dispatcher_id=dispatcher_id, rank=rank, route=route, **now
    )


def make_result(
    handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None, flat: bool
) -> DispatchResult:
    """What dispatch returns for one rank."""
    maps: dict[str, torch.Tensor | None] = {}
    if not flat:
        maps = {"expert_idx": None, "row_map": None}
    elif handle.route.has("flat_expert"):  # else both are views of the plan
        maps = {"expert_idx": _local_experts(handle), "row_map": handle.row_map}
    return DispatchResult.late(partial(_of_handle, handle), x=rows, weights=weights, handle=handle, **maps)


def _of_handle(handle: Handle, name: str) -> torch.Tensor | None:
    return handle.route.flat_expert if name == "expert_idx" else getattr(handle, name)


def _local_experts(handle: Handle) -> torch.Tensor:
    """int32 [N, K]: local expert of each slot of the flat rows, -1 empty: the segment its row falls into."""
    if handle.route.flat_expert is not None:
        return handle.route.flat_expert
    ends = handle.padded_counts.cumsum(0)
    expert = torch.searchsorted(ends, handle.recv_rows.contiguous(), right=True).to(torch.int32)
    return torch.where(handle.recv_rows >= 0, expert, -1)
