"""The row functors on CPU tensors: thin wrappers over csrc/ops/rows.h that check, allocate and pass pointers.

Shape letters: M source rows, N output rows, T tokens, K entries a token, H hidden. Indices are int32, -1 is
"none". Every function raises ArgumentError, naming the argument, before anything moves.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from flexep._native._load import _C
from flexep._native.memory import empty
from flexep.errors import ArgumentError

ROW_BYTES = 16  # rows are whole multiples of this
FLOATS = (torch.float32, torch.float16, torch.bfloat16)
_CODE = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_BYTES = 3


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


def check_rows(name: str, rows: torch.Tensor, *, floats: bool) -> None:
    """A row matrix: 2-D, contiguous rows of a multiple of 16 bytes, fp32/fp16/bf16 if `floats`. Any
    device."""
    if rows.dim() != 2:
        raise ArgumentError(name, tuple(rows.shape), "2 dimensions, [rows, hidden]")
    if floats and rows.dtype not in FLOATS:
        raise ArgumentError(name, rows.dtype, "float32, float16 or bfloat16")
    if rows.shape[1] * rows.element_size() % ROW_BYTES or rows.shape[1] == 0:
        raise ArgumentError(
            "hidden", rows.shape[1], f"rows of a multiple of {ROW_BYTES} bytes ({name}: {rows.dtype})"
        )
    if rows.stride(1) != 1 and rows.shape[0]:
        raise ArgumentError(name, rows.stride(), "contiguous rows: stride(1) == 1")


def check_vector(
    name: str, tensor: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...], like: torch.Tensor
) -> None:
    """An index or weight tensor of exactly this dtype and shape, on the device of `like`."""
    if tensor.dtype != dtype:
        raise ArgumentError(name, tensor.dtype, str(dtype))
    if tuple(tensor.shape) != shape:
        raise ArgumentError(name, tuple(tensor.shape), f"shape {shape}")
    if tensor.device != like.device:
        raise ArgumentError(name, str(tensor.device), f"the device of the rows, {like.device}")


def check_range(name: str, values: torch.Tensor, low: int, high: int) -> torch.Tensor:
    """A CPU tensor of int32 or int64 as contiguous int32; refuses a value outside [low, high)."""
    values, count = values.contiguous(), values.numel()
    if values.dtype == torch.int32:
        narrow, bad = values, _C.first_outside(values.data_ptr(), count, low, high)
    else:
        narrow = torch.empty(values.shape, dtype=torch.int32)
        bad = _C.narrow(narrow.data_ptr(), values.data_ptr(), count, low, high)
    if bad >= 0:
        raise ArgumentError(name, int(values.view(-1)[bad]), f"values in [{low}, {high}) (position {bad})")
    return narrow


def _index(name: str, idx: torch.Tensor, dim: int, high: int, like: torch.Tensor) -> torch.Tensor:
    if idx.dim() != dim:
        raise ArgumentError(name, tuple(idx.shape), f"{dim} dimension{'s' * (dim > 1)}")
    check_vector(name, idx, torch.int32, tuple(idx.shape), like)
    return check_range(name, idx, -1, high)


def _weights(weights: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor | None:
    if weights is None:
        return None
    check_vector("weights", weights, torch.float32, tuple(like.shape), like)
    return weights.contiguous()


def _rows(rows: torch.Tensor, code: int) -> tuple[int, int, int]:
    return rows.data_ptr(), rows.stride(0) * rows.element_size(), code


def _address(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _on_cpu(name: str, tensor: torch.Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ArgumentError(name, str(tensor.device), "a CPU tensor")


def gather_rows(
    src_MH: torch.Tensor, idx_N: torch.Tensor, weights_N: torch.Tensor | None = None
) -> torch.Tensor:
    """See flexep.ops.rows.gather_rows."""
    _on_cpu("src", src_MH)
    check_rows("src", src_MH, floats=weights_N is not None)
    idx_N = _index("idx", idx_N, 1, src_MH.shape[0], src_MH)
    weights_N = _weights(weights_N, idx_N)
    hidden, code = src_MH.shape[1], _CODE.get(src_MH.dtype, _BYTES)
    out_NH = empty(idx_N.shape[0], hidden, src_MH.dtype)
    _C.gather_rows(
        out=out_NH.data_ptr(), src=_rows(src_MH, code), idx=idx_N.data_ptr(), weights=_address(weights_N),
        rows=idx_N.shape[0], hidden=hidden if code != _BYTES else hidden * src_MH.element_size(),
        threads=torch.get_num_threads(),
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
    _on_cpu("src", src_TH)
    check_rows("src", src_TH, floats=weights_TK is not None)
    row_map_TK = _index("row_map", row_map_TK, 2, row_src_N.shape[0], src_TH)
    if row_map_TK.shape[0] != src_TH.shape[0]:
        raise ArgumentError(
            "row_map", tuple(row_map_TK.shape), f"{src_TH.shape[0]} rows, one for each row of src"
        )
    row_src_N = _index("row_src", row_src_N, 1, row_map_TK.numel(), src_TH)
    weights_TK = _weights(weights_TK, row_map_TK)
    (tokens, top_k), hidden, code = row_map_TK.shape, src_TH.shape[1], _CODE.get(src_TH.dtype, _BYTES)
    out_NH = empty(row_src_N.shape[0], hidden, src_TH.dtype)
    _C.expand_rows(
        out=out_NH.data_ptr(), src=_rows(src_TH, code), row_map=row_map_TK.data_ptr(),
        row_src=row_src_N.data_ptr(), weights=_address(weights_TK), tokens=tokens, top_k=top_k,
        rows=row_src_N.shape[0], hidden=hidden if code != _BYTES else hidden * src_TH.element_size(),
        threads=torch.get_num_threads(),
    )  # fmt: skip
    return out_NH


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
    _on_cpu("src", src_MH)
    check_rows("src", src_MH, floats=True)
    idx_TK = _index("idx", idx_TK, 2, src_MH.shape[0], src_MH)
    weights_TK = _weights(weights_TK, idx_TK)
    check_reduce_dtypes(out_dtype, groups_TK, group_dtype)
    if groups_TK is not None:
        check_vector("groups", groups_TK, torch.int32, tuple(idx_TK.shape), src_MH)
        groups_TK = groups_TK.contiguous()
    (tokens, top_k), hidden = idx_TK.shape, src_MH.shape[1]
    out_TH = empty(tokens, hidden, out_dtype)
    _C.reduce_rows(
        out=out_TH.data_ptr(), out_dtype=_CODE[out_dtype], src=_rows(src_MH, _CODE[src_MH.dtype]),
        idx=idx_TK.data_ptr(), weights=_address(weights_TK), groups=_address(groups_TK),
        group_dtype=_CODE[group_dtype or torch.float32], sort=sort, tokens=tokens, top_k=top_k, hidden=hidden,
        threads=torch.get_num_threads(),
    )  # fmt: skip
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
    _on_cpu("a", a_MH)
    check_rows("a", a_MH, floats=True)
    check_rows("b", b_NH, floats=True)
    check_vector("b", b_NH, a_MH.dtype, (b_NH.shape[0], a_MH.shape[1]), a_MH)
    idx_M = _index("idx", idx_M, 1, b_NH.shape[0], a_MH)
    check_vector("idx", idx_M, torch.int32, (a_MH.shape[0],), a_MH)
    out_M = torch.empty(a_MH.shape[0], dtype=torch.float32)
    code = _CODE[a_MH.dtype]
    _C.dot_rows(
        out=out_M.data_ptr(), a=_rows(a_MH, code), b=_rows(b_NH, code), idx=idx_M.data_ptr(),
        rows=a_MH.shape[0], hidden=a_MH.shape[1], threads=torch.get_num_threads(),
    )  # fmt: skip
    return out_M
