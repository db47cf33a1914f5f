"""The plan of one rank, as permute needs it. Shape letters: T tokens, K slots a token, E experts, N rows."""

from __future__ import annotations

from functools import partial

import torch

from flexep._native._load import _C
from flexep._native._step import ints, run_step, workspace
from flexep._native.operands import INT32_MAX
from flexep.errors import ArgumentError


def plan_permutation(
    topk_idx_TK: torch.Tensor,
    num_experts: int,
    alignment: int,
    num_rows: int | None,
    *,
    ids_TK: torch.Tensor | None = None,
    outside: torch.Tensor | None = None,
    blocks: int = 0,
    lanes: int = 0,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The plan of one rank: count, layout, rows and their inverse, in two kernels on CUDA.

    Args:
        topk_idx_TK: int32 or int64 [T, K] expert ids, -1 empty. Ids outside [-1, E) count as empty.
        alignment: each expert's rows are padded to a multiple of it.
        num_rows: N, rows that may be used (the kept-set rule drops what does not fit); None: as many as
            needed, for which CUDA waits once. T * K + E * (alignment - 1) is at most INT32_MAX.
        ids_TK: int32 [T, K] contiguous, written: the ids, those outside as -1.
        outside: int32 [1], written: how many ids are neither -1 nor an expert.
        blocks, lanes: of the launches on CUDA, 0: chosen. For tuning; they change no result.
    Returns:
        row_map int32 [T, K], row of each slot or -1; row_src int32 [N], t * K + k of each row's slot, -1
        padding; counts, padded_counts, dropped int32 [E]: rows kept, the same padded, rows without room.
    """
    if topk_idx_TK.dim() != 2:
        raise ArgumentError("topk_idx", tuple(topk_idx_TK.shape), "2 dimensions")
    if topk_idx_TK.dtype not in (torch.int32, torch.int64):
        raise ArgumentError("topk_idx", topk_idx_TK.dtype, "torch.int32 or torch.int64")
    topk_idx_TK, device, (T, K) = topk_idx_TK.contiguous(), topk_idx_TK.device, topk_idx_TK.shape
    most = T * K + num_experts * (alignment - 1)
    if most > INT32_MAX:
        raise ArgumentError("alignment", alignment, f"at most {INT32_MAX} rows with padding, not {most}")
    # Experts without a row get no padding, so that at most T * K of them have some.
    at_most = T * K + min(T * K, num_experts) * (alignment - 1)
    row_map = ints(T, K, device=device)
    row_src = ints(at_most if num_rows is None else num_rows, device=device)
    counts, padded, dropped = (ints(num_experts, device=device) for _ in range(3))
    used = torch.empty(1, dtype=torch.int64, device=device)
    run_step(
        partial(_C.plan_permutation, _C.Integers(topk_idx_TK.data_ptr(), topk_idx_TK.dtype == torch.int64)),
        device,
        tokens=T,
        top_k=K,
        experts=num_experts,
        alignment=alignment,
        capacity=-1 if num_rows is None else num_rows,
        ids=ids_TK,
        row_map=row_map,
        row_src=row_src,
        counts=counts,
        padded=padded,
        dropped=dropped,
        outside=ints(1, device=device) if outside is None else outside,
        num_rows=used,
        workspace=workspace(num_experts, 1, device),
        blocks=blocks,
        lanes=lanes,
    )
    return row_map, row_src if num_rows is not None else row_src[: int(used)], counts, padded, dropped
