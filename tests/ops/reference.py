"""Loops that say what the operations mean, one row at a time; and the comparison that all tests here use."""

from __future__ import annotations

import torch


def assert_bits(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal shapes, dtypes and bits; a NaN equals any NaN."""
    assert (got.dtype, got.shape) == (want.dtype, want.shape)
    ints = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.element_size()]
    same = got.contiguous().view(ints) == want.contiguous().view(ints)
    if got.is_floating_point():
        same |= got.isnan() & want.isnan()
    bad = (~same).nonzero()
    if bad.shape[0]:
        first = tuple(bad[0].tolist())
        raise AssertionError(
            f"{bad.shape[0]} elements differ, first at {first}: {got[first]} != {want[first]}"
        )


def loop_gather(src: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    out = torch.zeros(idx.shape[0], src.shape[1], dtype=src.dtype)
    for n, row in enumerate(idx.tolist()):
        if row >= 0:
            out[n] = src[row] if weights is None else (weights[n] * src[row].float()).to(src.dtype)
    return out


def loop_reduce(
    src: torch.Tensor,
    idx: torch.Tensor,
    weights: torch.Tensor | None,
    out_dtype: torch.dtype,
    sort: bool,
    groups: torch.Tensor | None = None,
    group_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    out = torch.zeros(idx.shape[0], src.shape[1], dtype=out_dtype)
    for t, entries in enumerate(idx.tolist()):
        visits = [(row, k) for k, row in enumerate(entries) if row >= 0]
        visits = sorted(visits) if sort else visits
        runs: list[list[torch.Tensor]] = []
        last = None
        for row, k in visits:
            term = src[row].float() if weights is None else weights[t, k] * src[row].float()
            group = None if groups is None else groups[t, k].item()
            if not runs or group != last:
                runs.append([])
            runs[-1].append(term)
            last = group
        parts = [_sum(run) for run in runs]
        if group_dtype is not None:
            parts = [part.to(group_dtype).float() for part in parts]
        if parts:
            out[t] = _sum(parts).to(out_dtype)
    return out


def _sum(terms: list[torch.Tensor]) -> torch.Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def loop_dot(a: torch.Tensor, b: torch.Tensor, idx: torch.Tensor) -> torch.Tensor:
    """The 32 lanes and the tree of csrc/ops/rows.h."""
    out = torch.zeros(a.shape[0])
    for m, row in enumerate(idx.tolist()):
        if row < 0:
            continue
        product = a[m].float() * b[row].float()
        product = torch.nn.functional.pad(product, (0, -product.numel() % 32)).view(-1, 32)
        lanes = torch.zeros(32)
        for step in product:
            lanes = lanes + step
        for half in (16, 8, 4, 2, 1):
            lanes = lanes[:half] + lanes[half : 2 * half]
        out[m] = lanes[0]
    return out


def loop_permute(
    idx: torch.Tensor, num_experts: int, alignment: int, num_rows: int | None
) -> dict[str, list]:
    """Expert-major rows by the definition: every row listed, the kept set found by trying each cut from above."""
    slots = [
        [(t, k) for t, row in enumerate(idx.tolist()) for k, e in enumerate(row) if e == expert]
        for expert in range(num_experts)
    ]

    def padded(count: int) -> int:
        return -(-count // alignment) * alignment

    cut = max(map(len, slots), default=0)
    if num_rows is not None:
        while sum(padded(min(len(s), cut)) for s in slots) > num_rows:
            cut -= 1
    top_k = idx.shape[1]
    row_map = [[-1] * top_k for _ in range(idx.shape[0])]
    row_src: list[int] = []
    for s in slots:
        for t, k in s[:cut]:
            row_map[t][k] = len(row_src)
            row_src.append(t * top_k + k)
        row_src += [-1] * (padded(min(len(s), cut)) - min(len(s), cut))
    row_src += [-1] * ((len(row_src) if num_rows is None else num_rows) - len(row_src))
    return {
        "row_map": row_map,
        "row_src": row_src,
        "counts": [min(len(s), cut) for s in slots],
        "padded_counts": [padded(min(len(s), cut)) for s in slots],
        "dropped": [len(s) - min(len(s), cut) for s in slots],
    }
