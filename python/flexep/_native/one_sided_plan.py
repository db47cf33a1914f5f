"""The whole plan of a dispatch over windows without relays: csrc/kernels/one_sided_plan.h.

Shape letters: T tokens, K top-k, R ranks, N received rows, M expert-major rows.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from flexep._native._load import _C
from flexep._native._step import ints
from flexep._native.arrivals import Sizes
from flexep._native.operands import INT32_MAX, address
from flexep._native.plan import Counted, PlanTable
from flexep.errors import ArgumentError

MOST_SIZES = 64  # whose lengths are remembered


class Lists(NamedTuple):
    """What a plan leaves, int32: fields as in Route, OneSided and PlaceRows, of one dimension and in one memory."""

    slot_send: torch.Tensor
    send_row: torch.Tensor
    send_rank: torch.Tensor
    send_token: torch.Tensor
    kept: torch.Tensor
    padded: torch.Tensor
    dropped: torch.Tensor
    tokens_of: torch.Tensor
    send: torch.Tensor
    recv: torch.Tensor
    recv_base: torch.Tensor
    token: torch.Tensor
    part_rows: torch.Tensor
    row_src: torch.Tensor
    row_map: torch.Tensor
    expert: torch.Tensor


class RankPlan(NamedTuple):
    """One rank's plan, which a window is to run: until then its lists and weights are undefined.

    weights: those that will have arrived, fp32 [M] or flat [N, K], or None. scratch: what the plan works in.
    """

    native: _C.OneSidedPlan
    lists: Lists
    weights: torch.Tensor | None
    scratch: torch.Tensor
    record_bytes: int


class OneSidedPlanner:
    """Prepares the plans of one dispatcher.

    Args: `capacity_rows`: expert-major rows of a rank, None: exact. `flat`: the layout. `tokens_at`: where T is in what
    a rank has said.
    """

    def __init__(
        self,
        table: PlanTable,
        top_k: int,
        alignment: int,
        capacity_rows: int | None,
        flat: bool,
        tokens_at: int,
        device: torch.device,
    ) -> None:
        self._table, self._top_k, self._flat, self._device = table, top_k, flat, device
        self._setup = _C.OneSidedSetup(
            table=table.view(device), top_k=top_k, alignment=alignment,
            capacity=-1 if capacity_rows is None else capacity_rows, flat=flat,
            on_device=device.type == "cuda", tokens_at=tokens_at,
        )  # fmt: skip
        self._record_bytes = (4 * (1 + top_k), 4 * (1 + 2 * top_k))  # without weights and with them
        self._ints = lru_cache(MOST_SIZES)(self._count_ints)  # with a capacity always the same few

    def prepare(
        self,
        counted: Counted,
        rank: int,
        sizes: Sizes,
        said_Rn: torch.Tensor,
        weights_TK: torch.Tensor | None,
    ) -> RankPlan:
        """The plan of `rank`, from its own slots and what everybody has said, int32 [R, n]."""
        T, K, device = counted.topk_idx.shape[0], self._top_k, self._device
        lengths, in_all, scratch_ints = self._ints(T, sizes, weights_TK is not None)
        memory, scratch = ints(in_all, device=device), ints(scratch_ints, device=device)
        weights = None  # the caller's in the end, so not of one memory with the plan
        if weights_TK is not None:
            shape = (sizes.flat, K) if self._flat else (sizes.rows,)
            weights = torch.empty(shape, dtype=torch.float32, device=device)
        places = self._table.places(rank)
        native = _C.OneSidedPlan(
            self._setup, rank, places.start, places.stop - places.start, T, counted.topk_idx.data_ptr(),
            counted.topk_idx.dtype == torch.int64, weights is not None, address(weights_TK),
            counted.number.data_ptr(), counted.place_counts.data_ptr(), said_Rn.data_ptr(), said_Rn.shape[1],
            sizes.left, sizes.flat, sizes.rows, memory.data_ptr(), scratch.data_ptr(), address(weights),
        )  # fmt: skip
        return RankPlan(
            native,
            Lists(*memory.split_with_sizes(lengths)),
            weights,
            scratch,
            self._record_bytes[weights is not None],
        )

    def _count_ints(self, tokens: int, sizes: Sizes, has_weights: bool) -> tuple[list[int], int, int]:
        """Lengths of the lists, their sum, and ints of scratch memory."""
        if sizes.flat * self._top_k > INT32_MAX:
            raise ArgumentError("received", sizes.flat, f"at most {INT32_MAX} slots")
        if sizes.left > INT32_MAX:
            raise ArgumentError("num_send", sizes.left, f"at most {INT32_MAX} send positions")
        lengths = _C.kept_ints(self._setup, tokens, sizes.left, sizes.flat, sizes.rows)
        scratch = _C.scratch_ints(self._setup, tokens, sizes.left, sizes.flat, has_weights)
        return lengths, sum(lengths), scratch
