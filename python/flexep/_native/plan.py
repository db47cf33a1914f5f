"""The plan: integers that say where every row goes. Thin wrappers over csrc/plan; int32 in and out.

Shape letters: T tokens, K top-k, E experts (numbered by *place* unless said otherwise), R ranks, D domains, S send
positions. On a CUDA tensor every step is enqueued on the current stream and nothing waits for it (but see
`plan_permutation`, which lives in flexep._native.permutation). The receiver's side is in flexep._native.arrivals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from flexep._native._load import _C
from flexep._native._step import carve, int32, ints, maker, run_native, run_step, workspace, workspace_ints
from flexep._native.operands import INT32_MAX, address
from flexep._native.permutation import plan_permutation as plan_permutation
from flexep._native.table import PlanTable as PlanTable
from flexep.errors import ArgumentError
from flexep.types import Late

HEADER_INTS: int = _C.HEADER_INTS  # of what a rank says before its counts: what is wrong, and a stamp


class Counted(NamedTuple):
    """One rank's slots, counted.

    topk_idx [T, K]: as it came. memory: `said`, `number`, `place_counts`, which end at `ends`, and `room` behind them,
    an address; undefined until `step` has run, which needs `weights`.
    """

    topk_idx: torch.Tensor
    memory: torch.Tensor
    ends: tuple[int, int, int]
    room: int
    domains: int
    step: _C.CountSlots
    weights: torch.Tensor | None

    @property
    def said(self) -> torch.Tensor:
        """What the rank publishes: how many ids and weights are wrong, the stamp, then slots per place [E], distinct
        tokens per rank [R] and per domain [D]."""
        return self.memory[: self.ends[0]]

    @property
    def number(self) -> torch.Tensor:
        """[T * K], for `assign_rows`."""
        return self.memory[self.ends[0] : self.ends[1]]

    @property
    def place_counts(self) -> torch.Tensor:
        """For `assign_rows`."""
        return self.memory[self.ends[1] : self.ends[2]]


class Counting:
    """How one rank's slots of one shape are counted: `count_slots` without what is different in every call.

    Args: `wide`: whether ids are int64. `room`: ints behind what is counted, from a multiple of 16 bytes on.
    """

    def __init__(
        self,
        table: PlanTable,
        device: torch.device,
        shape: Sequence[int],
        wide: bool,
        domains: int,
        room: int,
    ) -> None:
        T, K = shape
        self._domains = domains
        self._new_ints = maker(torch.int32, device)
        self._native = _C.CountSlots(table.view(device), wide, T, K, domains)
        number = self._native.said_ints + T * K
        end = number + workspace_ints(table.num_experts, table.num_ranks, device)
        self._ends = (self._native.said_ints, number, end)
        self._room_at = 4 * aligned(end)
        self._ints = aligned(end) + room

    def of(
        self,
        topk_idx_TK: torch.Tensor,
        weights_TK: torch.Tensor | None,
        stamp: tuple[int, int, int, int],
        masked: torch.Tensor | None,
    ) -> Counted:
        """The step, which nobody has run yet. Tensors are contiguous."""
        memory = self._new_ints(self._ints)
        begin = memory.data_ptr()
        step = self._native.in_memory(
            topk_idx_TK.data_ptr(), address(weights_TK), stamp, begin, address(masked)
        )
        return Counted(
            topk_idx_TK, memory, self._ends, begin + self._room_at, self._domains, step, weights_TK
        )


@dataclass(frozen=True)
class PlaceRows(Late):
    """Expert-major rows of every place, the same on all ranks, int32 [E]: rows after the kept-set rule, the same
    padded, and the rest."""

    kept_E: torch.Tensor
    padded_E: torch.Tensor
    dropped_E: torch.Tensor


@dataclass(frozen=True)
class Resolved(PlaceRows):
    """Where they lie.

    rows_R (int64): padded rows in use. base_RE: rows of the place from lower source ranks. start_E: first row of the
    place on its rank. cut_R: rows kept per place.
    """

    rows_R: torch.Tensor
    base_RE: torch.Tensor
    start_E: torch.Tensor
    cut_R: torch.Tensor

    @property
    def kept_rows(self) -> PlaceRows:
        """Without where they lie, which nobody needs once slots have their rows."""
        return PlaceRows(self.kept_E, self.padded_E, self.dropped_E)


@dataclass(frozen=True)
class Assigned:
    """Where one source rank's tokens go. They leave for ranks, or with domains for those.

    slot_row, slot_rank [T, K]: the slot's row on its rank, and that rank (-1 empty or dropped). slot_send [T, K]: the
    send position that carries it. send_row, send_rank [T, K]: the token's send positions and their ranks (of a domain:
    its first), ascending, then -1. send_token [S]: token at each send position, -1 unused. send_counts [R (+ D)]:
    tokens with a row on each rank, in each domain. meta [S, 1 + K (+ K) (+ K)] or None: what travels ahead of them, see
    csrc/plan/records.h.
    """

    slot_row: torch.Tensor
    slot_rank: torch.Tensor
    slot_send: torch.Tensor
    send_row: torch.Tensor
    send_rank: torch.Tensor
    send_token: torch.Tensor
    send_counts: torch.Tensor
    meta: torch.Tensor | None


def aligned(ints: int) -> int:
    """Up to a multiple of 16 bytes."""
    return -(-ints // 4) * 4


def count_slots(
    topk_idx_TK: torch.Tensor,
    table: PlanTable,
    *,
    domains: int = 0,
    weights_TK: torch.Tensor | None = None,
    stamp: tuple[int, int, int, int] = (0, 0, 0, 0),
    masked: torch.Tensor | None = None,
) -> Counted:
    """Counts one rank's slots, and says so.

    Args:
        topk_idx_TK: int32 or int64 ids; those outside [-1, E) count as empty, and as wrong.
        domains: D, whose distinct tokens are counted too; 0: none.
        weights_TK: fp32 [T, K], of which each NaN counts as wrong. stamp: what else to say.
        masked: int64 scalar to which the number of wrong ones is added.
    """
    if topk_idx_TK.dim() != 2:
        raise ArgumentError("topk_idx", tuple(topk_idx_TK.shape), "2 dimensions")
    if topk_idx_TK.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("topk_idx", topk_idx_TK.dtype, "torch.int32 or torch.int64")
    device, wide = topk_idx_TK.device, topk_idx_TK.dtype == torch.int64
    counting = Counting(table, device, topk_idx_TK.shape, wide, domains, room=0)
    weights_TK = None if weights_TK is None else weights_TK.contiguous()
    counted = counting.of(topk_idx_TK.contiguous(), weights_TK, stamp, masked)
    run_native(_C.count_slots, device, counted.step)
    return counted


def resolve(counts_RE: torch.Tensor, table: PlanTable, alignment: int, capacity_rows: int | None) -> Resolved:
    """From everybody's counts (source rank x place) to every rank's row layout, by the kept-set rule."""
    if counts_RE.dim() != 2 or counts_RE.stride(1) != 1 or counts_RE.dtype != torch.int32:
        counts_RE = int32("counts", counts_RE, 2)
    if counts_RE.shape != (table.num_ranks, table.num_experts):
        raise ArgumentError("counts", tuple(counts_RE.shape), f"({table.num_ranks}, {table.num_experts})")
    if alignment < 1:
        raise ArgumentError("alignment", alignment, "at least 1")
    device, E, R = counts_RE.device, table.num_experts, table.num_ranks
    rows, base, start, cut = carve(device, 2 * R, R * E, E, R)
    kept, padded, dropped = carve(device, E, E, E)  # which handles keep
    out = Resolved(kept, padded, dropped, rows.view(torch.int64), base.view(R, E), start, cut)
    run_step(
        _C.resolve_rows,
        device,
        table.view(device),
        counts=counts_RE,
        stride=counts_RE.stride(0),
        alignment=alignment,
        capacity=-1 if capacity_rows is None else capacity_rows,
        base=base,
        start=start,
        kept=kept,
        padded=padded,
        dropped=dropped,
        cut=cut,
        num_rows=rows,
    )
    return out


def assign_rows(
    counted: Counted,
    source_rank: int,
    resolved: Resolved,
    table: PlanTable,
    *,
    num_send: int,
    split: int | None = None,
    records: bool = False,
    weights_TK: torch.Tensor | None = None,
) -> Assigned:
    """Rows of every slot, the send order of one source rank's tokens, and the records that go ahead of them.

    Args:
        num_send: S, positions in the send buffer (dense: at least what leaves).
        split: positions each destination owns, so that S = R * split; None packs destinations densely.
        records: whether to make `meta`, with fp32 `weights_TK` in it if given.
    """
    if num_send > INT32_MAX:
        raise ArgumentError("num_send", num_send, f"at most {INT32_MAX} send positions")
    device, (T, K), D = counted.memory.device, counted.topk_idx.shape, counted.domains
    E, R = table.num_experts, table.num_ranks
    slot_row, slot_rank, scratch, counting = carve(device, T * K, T * K, T * K, workspace_ints(E, R, device))
    slot_send, send_row, send_rank, send_token, send_counts = carve(
        device, T * K, T * K, T * K, num_send, R + D
    )
    width = 1 + K * (1 + (D > 0) + (weights_TK is not None))
    meta = ints(num_send, width, device=device) if records else None
    order = _C.SendOrder(
        rows=T, top_k=K, owners=D or R, unit=R // (D or R), split=-1 if split is None else split, num_send=num_send,
        order=scratch.data_ptr(), slot_send=slot_send.data_ptr(), send_row=send_row.data_ptr(),
        send_first=send_rank.data_ptr(), send_token=send_token.data_ptr(),
    )  # fmt: skip
    run_step(
        _C.assign_rows,
        device,
        table.view(device),
        _C.Integers(counted.topk_idx.data_ptr(), counted.topk_idx.dtype == torch.int64),
        number=counted.number,
        place_counts=counted.place_counts,
        base=resolved.base_RE.data_ptr() + 4 * E * source_rank,
        start=resolved.start_E,
        cut=resolved.cut_R,
        domains=D,
        weights=None if weights_TK is None else weights_TK.contiguous(),
        has_weights=weights_TK is not None,
        slot_row=slot_row,
        slot_rank=slot_rank,
        order=order,
        send_counts=send_counts,
        meta=meta,
        workspace=counting,
    )
    return Assigned(
        slot_row.view(T, K), slot_rank.view(T, K), slot_send.view(T, K), send_row.view(T, K), send_rank.view(T, K),
        send_token, send_counts, meta,
    )  # fmt: skip


def invert_rows(recv_rows_NK: torch.Tensor, num_rows: int) -> torch.Tensor:
    """The transpose of a row map: int32 [num_rows], n * K + k of the entry that fills the row, -1 padding."""
    recv_rows_NK = int32("recv_rows", recv_rows_NK, 2)
    if recv_rows_NK.numel() > INT32_MAX:
        raise ArgumentError("recv_rows", tuple(recv_rows_NK.shape), f"at most {INT32_MAX} entries")
    device = recv_rows_NK.device
    row_src = ints(num_rows, device=device)
    run_step(
        _C.invert_rows,
        device,
        rows=recv_rows_NK,
        received=recv_rows_NK.shape[0],
        top_k=recv_rows_NK.shape[1],
        num_rows=num_rows,
        row_src=row_src,
    )
    return row_src


def compact_rows(
    rows_MK: torch.Tensor, num_compact: int, *, rows_rank_MK: torch.Tensor | None = None, rank: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keeps, in order, the rows that hold a token with a slot on `rank`.

    Returns source [num_compact] (row of `rows_MK` behind each kept one, -1 tail) and the kept rows
    [num_compact, K] with entries on other ranks set to -1. Without `rows_rank_MK` all entries are on `rank`.
    """
    rows_MK = int32("rows", rows_MK, 2)
    device, (M, K) = rows_MK.device, rows_MK.shape
    source, compact = ints(num_compact, device=device), ints(num_compact, K, device=device)
    scratch = workspace(1, 1, device)
    run_step(
        _C.compact_rows,
        device,
        rows=rows_MK,
        rows_rank=rows_rank_MK,
        rank=rank,
        padded=M,
        top_k=K,
        num_compact=num_compact,
        source=source,
        compact=compact,
        workspace=scratch,
    )
    return source, compact
