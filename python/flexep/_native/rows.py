"""The row functors: thin wrappers over csrc/ops/rows.h and rows_cuda.h that check, allocate and pass pointers.

Shape letters: M source rows, N output rows, T tokens, K entries a token, H hidden. Indices are int32, -1 is
"none". Every function raises ArgumentError, naming the argument, before anything moves. On the CPU that includes an
index out of range. On CUDA, where values cannot be judged without waiting for the device, such an index counts as -1;
work is enqueued on the current stream of the tensors' device and nothing waits for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from flexep._native._load import _C
from flexep._native.operands import (
    CODES,
    FLOATS,
    address,
    check_operand,
    check_vector,
    enqueue,
    index,
    output,
    rows_of,
    slot_index,
    weights_like,
    width,
)
from flexep.errors import ArgumentError

MOST_TERMS = 2048  # entries a token that reduce_rows takes on CUDA


@contextmanager
def forced_isa(name: str) -> Iterator[None]:
    """Takes one of `isa_names()` for every call inside, in the whole process: for tests and comparisons."""
    before = _C.set_isa(name)
    try:
        yield
    finally:
        _C.set_isa(before)


def isa_names() -> list[str]:
    """Vector paths that this CPU runs, slowest first."""
    return _C.isa_names()


def gather_rows(
    src_MH: torch.Tensor, idx_N: torch.Tensor, weights_N: torch.Tensor | None = None
) -> torch.Tensor:
    """See flexep.ops.rows.gather_rows."""
    on_cuda = check_operand("src", src_MH, floats=weights_N is not None)
    idx_N = index("idx", idx_N, 1, src_MH.shape[0], src_MH)
    weights_N = weights_like(weights_N, idx_N)
    out_NH = output(idx_N.shape[0], src_MH.shape[1], src_MH.dtype, src_MH.device)
    if on_cuda:
        enqueue(
            _C.gather_rows_cuda, src_MH.device, out=out_NH.data_ptr(), src=rows_of(src_MH),
            src_rows=src_MH.shape[0], idx=idx_N.data_ptr(), weights=address(weights_N), rows=idx_N.shape[0],
            hidden=width(src_MH),
        )  # fmt: skip
    else:
        _C.gather_rows(
            out=out_NH.data_ptr(), src=rows_of(src_MH), idx=idx_N.data_ptr(), weights=address(weights_N),
            rows=idx_N.shape[0], hidden=width(src_MH), threads=torch.get_num_threads(),
        )  # fmt: skip
    return out_NH


def expand_rows(
    src_TH: torch.Tensor,
    row_map_TK: torch.Tensor,
    row_src_N: torch.Tensor,
    weights_TK: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[row_map[t, k]] = src[t] (times weights[t, k]); zero rows where row_src is -1. Reads each source row
    once.

    row_map and row_src are inverses of each other (flexep.ops.permute makes them); [N, H] in src's dtype.
    """
    if check_operand("src", src_TH, floats=weights_TK is not None):
        return _expand_cuda(src_TH, row_map_TK, row_src_N, weights_TK)[0]
    row_map_TK, row_src_N = slot_index(row_map_TK, row_src_N, src_TH)
    weights_TK = weights_like(weights_TK, row_map_TK)
    (tokens, top_k), rows = row_map_TK.shape, row_src_N.shape[0]
    out_NH = output(rows, src_TH.shape[1], src_TH.dtype, src_TH.device)
    _C.expand_rows(
        out=out_NH.data_ptr(), src=rows_of(src_TH), row_map=row_map_TK.data_ptr(),
        row_src=row_src_N.data_ptr(), weights=address(weights_TK), tokens=tokens, top_k=top_k, rows=rows,
        hidden=width(src_TH), threads=torch.get_num_threads(),
    )  # fmt: skip
    return out_NH


def expand_rows_carrying(
    src_TH: torch.Tensor,
    row_map_TK: torch.Tensor,
    row_src_N: torch.Tensor,
    carried_TK: torch.Tensor | None,
    words_TW: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """expand_rows of CUDA tensors, in the same pass fp32 numbers of slots to rows ([N]) and fp32 numbers of tokens
    to their rows ([N, W]); +0 on padding. What is not given comes back empty."""
    if not check_operand("src", src_TH, floats=False):
        raise ArgumentError("src", str(src_TH.device), "a CUDA tensor")
    return _expand_cuda(src_TH, row_map_TK, row_src_N, None, carried_TK, words_TW)


def _expand_cuda(
    src_TH: torch.Tensor,
    row_map_TK: torch.Tensor,
    row_src_N: torch.Tensor,
    weights_TK: torch.Tensor | None,
    carried_TK: torch.Tensor | None = None,
    words_TW: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    row_map_TK, row_src_N = slot_index(row_map_TK, row_src_N, src_TH)
    weights_TK, carried_TK = weights_like(weights_TK, row_map_TK), weights_like(carried_TK, row_map_TK)
    (tokens, top_k), rows, words = row_map_TK.shape, row_src_N.shape[0], 0
    if words_TW is not None:
        words = words_TW.shape[1]
        check_vector("words", words_TW, torch.float32, (tokens, words), src_TH)
        words_TW = words_TW.contiguous()
    out_NH = output(rows, src_TH.shape[1], src_TH.dtype, src_TH.device)
    carried_N = out_NH.new_empty(0 if carried_TK is None else rows, dtype=torch.float32)
    words_NW = out_NH.new_empty(rows if words else 0, words, dtype=torch.float32)
    enqueue(
        _C.expand_rows_cuda, src_TH.device, out=out_NH.data_ptr(), src=rows_of(src_TH),
        row_map=row_map_TK.data_ptr(), row_src=row_src_N.data_ptr(), weights=address(weights_TK),
        carried=address(carried_TK), carried_out=carried_N.data_ptr(), words=address(words_TW),
        words_out=words_NW.data_ptr(), words_a_row=words, tokens=tokens, top_k=top_k, rows=rows,
        hidden=width(src_TH),
    )  # fmt: skip
    return out_NH, carried_N, words_NW


def reduce_rows(
    src_MH: torch.Tensor,
    idx_TK: torch.Tensor,
    weights_TK: torch.Tensor | None,
    out_dtype: torch.dtype,
    sort: bool,
    groups_TK: torch.Tensor | None = None,
    group_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """See flexep.ops.rows.reduce_rows."""
    on_cuda = check_operand("src", src_MH, floats=True)
    idx_TK = index("idx", idx_TK, 2, src_MH.shape[0], src_MH)
    weights_TK = weights_like(weights_TK, idx_TK)
    check_reduce_dtypes(out_dtype, groups_TK, group_dtype)
    if groups_TK is not None:
        check_vector("groups", groups_TK, torch.int32, tuple(idx_TK.shape), src_MH)
        groups_TK = groups_TK.contiguous()
    (tokens, top_k), hidden = idx_TK.shape, src_MH.shape[1]
    if on_cuda and top_k > MOST_TERMS:
        raise ArgumentError("idx", tuple(idx_TK.shape), f"at most {MOST_TERMS} entries a token on CUDA")
    out_TH = output(tokens, hidden, out_dtype, src_MH.device)
    fields: dict[str, Any] = {
        "out": out_TH.data_ptr(), "out_dtype": CODES[out_dtype], "src": rows_of(src_MH),
        "idx": idx_TK.data_ptr(), "weights": address(weights_TK), "groups": address(groups_TK),
        "group_dtype": CODES[group_dtype or torch.float32], "sort": sort, "tokens": tokens, "top_k": top_k,
        "hidden": hidden,
    }  # fmt: skip
    if on_cuda:
        enqueue(_C.reduce_rows_cuda, src_MH.device, src_rows=src_MH.shape[0], **fields)
    else:
        _C.reduce_rows(**fields, threads=torch.get_num_threads())
    return out_TH


def check_reduce_dtypes(
    out_dtype: torch.dtype, groups_TK: torch.Tensor | None, group_dtype: torch.dtype | None
) -> None:
    """The dtype arguments of reduce_rows; groups and group_dtype come together."""
    if out_dtype not in FLOATS:
        raise ArgumentError("out_dtype", out_dtype, "float32, float16 or bfloat16")
    if (groups_TK is None) != (group_dtype is None):
        raise ArgumentError("group_dtype", group_dtype, "a dtype exactly when groups is given")
    if group_dtype is not None and group_dtype not in FLOATS:
        raise ArgumentError("group_dtype", group_dtype, "float32, float16 or bfloat16")


def dot_rows(a_MH: torch.Tensor, b_NH: torch.Tensor, idx_M: torch.Tensor) -> torch.Tensor:
    """See flexep.ops.rows.dot_rows."""
    on_cuda = _check_dot("a", a_MH, "b", b_NH)
    idx_M = index("idx", idx_M, 1, b_NH.shape[0], a_MH)
    check_vector("idx", idx_M, torch.int32, (a_MH.shape[0],), a_MH)
    if on_cuda:
        return _dots_cuda(a_MH, b_NH, idx_M, repeat=1)
    out_M = torch.empty(a_MH.shape[0], dtype=torch.float32)
    _C.dot_rows(
        out=out_M.data_ptr(), a=rows_of(a_MH), b=rows_of(b_NH), idx=idx_M.data_ptr(),
        rows=a_MH.shape[0], hidden=a_MH.shape[1], threads=torch.get_num_threads(),
    )  # fmt: skip
    return out_M


def dot_slots(tokens_TH: torch.Tensor, rows_NH: torch.Tensor, row_map_TK: torch.Tensor) -> torch.Tensor:
    """See flexep.ops.rows.dot_slots."""
    on_cuda = _check_dot("tokens", tokens_TH, "rows", rows_NH)
    row_map_TK = index("row_map", row_map_TK, 2, rows_NH.shape[0], tokens_TH)
    check_vector("row_map", row_map_TK, torch.int32, (tokens_TH.shape[0], row_map_TK.shape[1]), tokens_TH)
    if on_cuda:
        return _dots_cuda(tokens_TH, rows_NH, row_map_TK, repeat=row_map_TK.shape[1])
    out_TK = torch.empty(row_map_TK.shape, dtype=torch.float32)
    for k in range(row_map_TK.shape[1]):
        out_TK[:, k] = dot_rows(tokens_TH, rows_NH, row_map_TK[:, k].contiguous())
    return out_TK


def _check_dot(a_name: str, a: torch.Tensor, b_name: str, b: torch.Tensor) -> bool:
    on_cuda = check_operand(a_name, a, floats=True)
    check_operand(b_name, b, floats=True)
    check_vector(b_name, b, a.dtype, (b.shape[0], a.shape[1]), a)
    return on_cuda


def _dots_cuda(a: torch.Tensor, b: torch.Tensor, idx: torch.Tensor, repeat: int) -> torch.Tensor:
    out = torch.empty(idx.shape, dtype=torch.float32, device=a.device)
    enqueue(
        _C.dot_rows_cuda, a.device, out=out.data_ptr(), a=rows_of(a), b=rows_of(b), b_rows=b.shape[0],
        idx=idx.data_ptr(), count=idx.numel(), repeat=repeat, hidden=a.shape[1],
    )  # fmt: skip
    return out


def take(values: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """fp32 values.flatten()[place], +0 where an int32 place is -1 (on CUDA: is none of them); the shape of `place`."""
    if not values.is_cuda:  # the place -1 is the zero put at the end
        return torch.cat([values.reshape(-1), values.new_zeros(1)])[place.long()]
    check_vector("place", place, torch.int32, tuple(place.shape), values)
    values, place = values.contiguous(), place.contiguous()
    out = torch.empty(place.shape, dtype=torch.float32, device=values.device)
    enqueue(
        _C.take_cuda, values.device, out=out.data_ptr(), values=values.data_ptr(),
        num_values=values.numel(), index=place.data_ptr(), count=place.numel(),
    )  # fmt: skip
    return out
