"""The plan: integers that say where every row goes. Thin wrappers over csrc/plan; int32 in and out.

Shape letters: T tokens, K top-k, E experts (numbered by *place* unless said otherwise), R ranks, N received tokens,
S send positions. On a CUDA tensor every step is enqueued on the current stream and nothing waits for it (but see
`plan_permutation`, which lives in flexep._native.permutation).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep._native._load import _C
from flexep._native._step import int32, ints, run_step, workspace
from flexep._native.operands import INT32_MAX
from flexep._native.permutation import plan_permutation as plan_permutation
from flexep._native.table import PlanTable as PlanTable
from flexep.errors import ArgumentError


@dataclass(frozen=True)
class Resolved:
    """Layout of every rank's expert-major rows, the same on all ranks.

    base_RE: rows of the place from lower source ranks. start_E: first row of the place on its rank. kept_E,
    dropped_E: rows after the kept-set rule, and the rest. cut_R: rows kept per place. rows_R (int64): padded
    rows in use.
    """

    base_RE: torch.Tensor
    start_E: torch.Tensor
    kept_E: torch.Tensor
    dropped_E: torch.Tensor
    cut_R: torch.Tensor
    rows_R: torch.Tensor


@dataclass(frozen=True)
class Assigned:
    """Where one source rank's tokens go.

    slot_row, slot_rank, slot_send [T, K]: the slot's row on its rank, that rank, and the send position that
    carries it (-1 empty or dropped). send_row, send_rank [T, K]: the token's send positions and their ranks,
    ascending, then -1. send_token [S]: token at each send position, -1 unused. send_counts [R].
    """

    slot_row: torch.Tensor
    slot_rank: torch.Tensor
    slot_send: torch.Tensor
    send_row: torch.Tensor
    send_rank: torch.Tensor
    send_token: torch.Tensor
    send_counts: torch.Tensor


def count_slots(topk_idx_TK: torch.Tensor, table: PlanTable) -> tuple[torch.Tensor, torch.Tensor]:
    """What one rank publishes: rows per place [E] and distinct tokens per rank [R], both int32."""
    topk_idx_TK = int32("topk_idx", topk_idx_TK, 2)
    device = topk_idx_TK.device
    counts_E, tokens_R = ints(table.num_experts, device=device), ints(table.num_ranks, device=device)
    scratch = workspace(table.num_experts, table.num_ranks, device)
    run_step(
        _C.count_slots,
        device,
        table.view(device),
        topk_idx=topk_idx_TK,
        tokens=topk_idx_TK.shape[0],
        top_k=topk_idx_TK.shape[1],
        counts=counts_E,
        rank_tokens=tokens_R,
        workspace=scratch,
    )
    return counts_E, tokens_R


def resolve(counts_RE: torch.Tensor, table: PlanTable, alignment: int, capacity_rows: int | None) -> Resolved:
    """From everybody's counts (source rank x place) to every rank's row layout, by the kept-set rule."""
    counts_RE = int32("counts", counts_RE, 2)
    if counts_RE.shape != (table.num_ranks, table.num_experts):
        raise ArgumentError("counts", tuple(counts_RE.shape), f"({table.num_ranks}, {table.num_experts})")
    if alignment < 1:
        raise ArgumentError("alignment", alignment, "at least 1")
    device, E, R = counts_RE.device, table.num_experts, table.num_ranks
    out = Resolved(
        base_RE=ints(R, E, device=device),
        start_E=ints(E, device=device),
        kept_E=ints(E, device=device),
        dropped_E=ints(E, device=device),
        cut_R=ints(R, device=device),
        rows_R=torch.empty(R, dtype=torch.int64, device=device),
    )
    run_step(
        _C.resolve_rows,
        device,
        table.view(device),
        counts=counts_RE,
        alignment=alignment,
        capacity=-1 if capacity_rows is None else capacity_rows,
        base=out.base_RE,
        start=out.start_E,
        kept=out.kept_E,
        dropped=out.dropped_E,
        cut=out.cut_R,
        num_rows=out.rows_R,
    )
    return out


def assign_rows(
    topk_idx_TK: torch.Tensor,
    source_rank: int,
    resolved: Resolved,
    table: PlanTable,
    *,
    num_send: int,
    split: int | None = None,
) -> Assigned:
    """Rows of every slot and the send order of one source rank's tokens.

    Args:
        num_send: S, positions in the send buffer (dense: at least the rank's tokens per rank, summed).
        split: positions each destination owns, so that S = R * split; None packs destinations densely.
    """
    topk_idx_TK = int32("topk_idx", topk_idx_TK, 2)
    if num_send > INT32_MAX:
        raise ArgumentError("num_send", num_send, f"at most {INT32_MAX} send positions")
    device, (T, K) = topk_idx_TK.device, topk_idx_TK.shape
    slot_row, slot_rank, slot_send, send_row, send_rank = (ints(T, K, device=device) for _ in range(5))
    send_token, send_counts = ints(num_send, device=device), ints(table.num_ranks, device=device)
    out = Assigned(slot_row, slot_rank, slot_send, send_row, send_rank, send_token, send_counts)
    scratch = workspace(table.num_experts, table.num_ranks, device)
    run_step(
        _C.assign_rows,
        device,
        table.view(device),
        topk_idx=topk_idx_TK,
        tokens=T,
        top_k=K,
        base=resolved.base_RE[source_rank],
        start=resolved.start_E,
        cut=resolved.cut_R,
        split=-1 if split is None else split,
        num_send=num_send,
        slot_row=out.slot_row,
        slot_rank=out.slot_rank,
        slot_send=out.slot_send,
        send_row=out.send_row,
        send_rank=out.send_rank,
        send_token=out.send_token,
        send_counts=out.send_counts,
        workspace=scratch,
    )
    return out


def pack_meta(assigned: Assigned, weights_TK: torch.Tensor | None) -> torch.Tensor:
    """Row metadata in send order: int32 [S, 1 + K (+ K)] = token, row of each slot or -1 [, weight bits]."""
    (T, K), S, device = assigned.slot_row.shape, assigned.send_token.shape[0], assigned.send_token.device
    bits = None if weights_TK is None else weights_TK.contiguous().view(torch.int32)
    meta = ints(S, 1 + K * (1 if bits is None else 2), device=device)
    run_step(
        _C.pack_meta,
        device,
        slot_row=assigned.slot_row,
        slot_send=assigned.slot_send,
        send_token=assigned.send_token,
        weights=bits,
        has_weights=bits is not None,
        tokens=T,
        top_k=K,
        num_send=S,
        meta=meta,
    )
    return meta


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
