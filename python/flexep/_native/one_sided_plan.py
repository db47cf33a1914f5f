"""The whole plan of a dispatch over windows without relays: csrc/kernels/one_sided_plan.h.

Shape letters: T tokens, K top-k, E experts, R ranks, N received rows, M expert-major rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

from flexep._native._load import _C
from flexep._native._step import maker
from flexep._native.arrivals import Sizes
from flexep._native.operands import INT32_MAX, address
from flexep._native.plan import HEADER_INTS, Counted, Counting, PlanTable, aligned
from flexep.errors import ArgumentError

MOST_SIZES = 256  # that are remembered: some for each rank that this process plays

# What a plan leaves, in the order of the compiled module: fields of Route, OneSided and PlaceRows. The last two are of
# the flat layout, and empty without it.
_LISTS = (
    "home_slot", "home_row", "home_rank", "send_token", "kept_E", "padded_E", "dropped_E", "tokens_of", "send_R",
    "recv_R", "recv_base", "recv_token", "part_rows", "row_src", "row_map", "flat_expert",
)  # fmt: skip
_PER_SLOT = ("home_slot", "home_row", "home_rank", "part_rows", "flat_expert")  # [..., K]


class Layout(NamedTuple):
    """One rank's plan in no memory yet. at: begin, end and shape of each list. ints: of all lists. scratch: ints that
    it works in. record_bytes: of a record that travels."""

    native: _C.OneSidedPlan
    sizes: Sizes
    at: dict[str, tuple[int, int, tuple[int, ...]]]
    ints: int
    scratch: int
    record_bytes: int


class Lists(NamedTuple):
    """The lists of a plan, in one memory."""

    memory: torch.Tensor
    layout: Layout

    def tensor(self, name: str) -> torch.Tensor:
        """One of them, int32."""
        begin, end, shape = self.layout.at[name]
        return self.memory[begin:end].view(shape)


class RankPlan(NamedTuple):
    """One rank's plan, which a window is to run: until then its lists and weights are undefined.

    weights: those that will have arrived, fp32 [M] or flat [N, K], or None. scratch: what the plan works in.
    """

    native: _C.OneSidedPlan
    lists: Lists
    weights: torch.Tensor | None
    scratch: torch.Tensor


class OneSidedPlanner:
    """Prepares the plans of one dispatcher.

    Args: `capacity_rows`: expert-major rows of a rank, None: exact. `most_sizes`: with a capacity, the sizes of a rank
    with so many tokens. `flat`: the layout. `tokens_at`: where T is in what a rank has said. `domains`: that tokens
    leave for; 0: none. With them slots are counted here, and the plan is made elsewhere.
    """

    def __init__(
        self,
        table: PlanTable,
        top_k: int,
        alignment: int,
        capacity_rows: int | None,
        most_sizes: Callable[[int], Sizes],
        flat: bool,
        tokens_at: int,
        domains: int,
        device: torch.device,
    ) -> None:
        self._table, self._top_k, self._flat = table, top_k, flat
        self._new_ints, self._new_weights = maker(torch.int32, device), maker(torch.float32, device)
        self._static = capacity_rows is not None
        self._setup = _C.OneSidedSetup(
            table=table.view(device), top_k=top_k, alignment=alignment,
            capacity=-1 if capacity_rows is None else capacity_rows, flat=flat,
            on_device=device.type == "cuda", tokens_at=tokens_at,
        )  # fmt: skip
        self.said_ints = HEADER_INTS + table.num_experts + table.num_ranks + domains  # of a rank
        in_room = self._static and not domains  # what a plan works in
        self._board = aligned(table.num_ranks * self.said_ints)

        def counting(tokens: int, wide: bool, has_weights: bool) -> Counting:
            room = self._board + (self.static_layout(0, tokens, has_weights).scratch if in_room else 0)
            return Counting(table, device, (tokens, top_k), wide, domains, room)

        def static_layout(rank: int, tokens: int, has_weights: bool) -> Layout:
            return self.layout(rank, tokens, has_weights, most_sizes(tokens))

        self._counting = lru_cache(MOST_SIZES)(counting)
        self.static_layout = lru_cache(MOST_SIZES)(static_layout)

    def count(
        self,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        stamp: tuple[int, int, int, int],
        masked: torch.Tensor | None,
        has_weights: bool,
    ) -> Counted:
        """Slots to be counted, with room for what everybody says, [R, said], and behind it, with a capacity, for what
        the plan works in. has_weights: whether some will travel."""
        counting = self._counting(topk_idx.shape[0], topk_idx.dtype == torch.int64, has_weights)
        return counting.of(topk_idx, weights, stamp, masked)

    def board(self, counted: Counted) -> torch.Tensor:
        """int32 [R, said]: what everybody has said, in the room of `count`."""
        begin, R = aligned(counted.ends[2]), self._table.num_ranks
        return counted.memory[begin : begin + R * self.said_ints].view(R, self.said_ints)

    def prepare(self, counted: Counted, layout: Layout, weights_TK: torch.Tensor | None) -> RankPlan:
        """A rank's plan, from its own slots and what everybody has said."""
        memory = self._new_ints(layout.ints)
        if self._static:
            scratch, scratch_at = counted.memory, counted.room + 4 * self._board
        else:
            scratch = self._new_ints(layout.scratch)
            scratch_at = scratch.data_ptr()
        weights = None  # the caller's in the end, so not of one memory with the plan
        if weights_TK is not None:
            weights = self._new_weights(
                (layout.sizes.flat, self._top_k) if self._flat else (layout.sizes.rows,)
            )
        native = layout.native.in_memory(
            counted.step, address(weights_TK), counted.room, memory.data_ptr(), scratch_at, address(weights)
        )
        return RankPlan(native, Lists(memory, layout), weights, scratch)

    def layout(self, rank: int, tokens: int, has_weights: bool, sizes: Sizes) -> Layout:
        """Of a rank with so many tokens and `sizes`."""
        K, places = self._top_k, self._table.places(rank)
        if sizes.flat * K > INT32_MAX:
            raise ArgumentError("received", sizes.flat, f"at most {INT32_MAX} slots")
        if sizes.left > INT32_MAX:
            raise ArgumentError("num_send", sizes.left, f"at most {INT32_MAX} send positions")
        lengths = _C.kept_ints(self._setup, tokens, sizes.left, sizes.flat, sizes.rows)
        at: dict[str, tuple[int, int, tuple[int, ...]]] = {}
        end = 0
        for name, length in zip(_LISTS, lengths, strict=True):
            at[name] = end, end + length, (length // K, K) if name in _PER_SLOT else (length,)
            end += length
        scratch = _C.scratch_ints(self._setup, tokens, sizes.left, sizes.flat, has_weights)
        native = _C.OneSidedPlan(
            self._setup, rank, places.start, places.stop - places.start, tokens, has_weights, sizes.left,
            sizes.flat, sizes.rows,
        )  # fmt: skip
        return Layout(native, sizes, at, end, scratch, 4 * (1 + K * (1 + has_weights)))
