"""How fast permute and unpermute move rows on this CPU, beside its own large memcpy and torch's indexing.

    python -m bench.permute --tokens 4096 --hidden 2048 --top-k 8 --json out.json

All operations take turns in every round, and the best round of each counts, so that a neighbour on the machine slows
all alike. Bytes are the least that the operation can move: each input row read once, each output row (padding included)
written once, maps and weights not counted. `copy` is memcpy with one thread a core, 256 MB each, counted read plus
written, so a ratio of 1 is a plain copy of the same bytes.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import typer

from flexep.benchmark.machine import COPY_BYTES, copier, cores
from flexep.ops import permute, unpermute


@dataclass(frozen=True)
class Shape:
    """What is permuted: T tokens of H elements to K of E experts, each padded to `alignment`; uniform routing."""

    tokens: int = 4096
    hidden: int = 2048
    top_k: int = 8
    experts: int = 64
    alignment: int = 16
    dtype: str = "bfloat16"


@dataclass(frozen=True)
class Row:
    """One operation: best and median time, least bytes, and its bandwidth over that of the copy."""

    op: str
    best_us: float
    median_us: float
    bytes: int
    gb_per_s: float
    ratio_to_copy: float


def operations(shape: Shape) -> dict[str, tuple[Callable[[], object], int]]:
    """Name -> (call, least bytes). `permute` makes its plan in every call; the torch calls get theirs ready-made."""
    generator = torch.Generator().manual_seed(0)
    dtype = getattr(torch, shape.dtype)
    T, H, K = shape.tokens, shape.hidden, shape.top_k
    x = torch.randn(T, H, generator=generator).to(dtype)
    topk_idx = torch.rand(T, shape.experts, generator=generator).topk(K, dim=1).indices
    p = permute(x, topk_idx, num_experts=shape.experts, alignment=shape.alignment)
    token_of_row = (p.row_src[p.row_src >= 0] // K).long()
    weights = torch.rand(T, K, generator=generator)
    y_rows = x[token_of_row]
    selected, added = torch.zeros_like(y_rows), torch.zeros_like(x)
    row, padded = H * x.element_size(), p.x.shape[0]
    move, back = torch.ops.flexep.permute_rows, torch.ops.flexep.unpermute_rows
    return {
        "permute": (
            lambda: permute(x, topk_idx, num_experts=shape.experts, alignment=shape.alignment),
            (T + padded) * row,
        ),
        "permute, plan ready": (lambda: move(x, p.row_map, p.row_src), (T + padded) * row),
        "unpermute": (lambda: unpermute(p.x, p), (T * K + T) * row),
        "unpermute, weighted": (lambda: back(p.x, p.row_map, p.row_src, weights), (T * K + T) * row),
        "permute backward of weights": (lambda: move(x, p.row_map, p.row_src, weights), (T + padded) * row),
        "index_select": (lambda: torch.index_select(x, 0, token_of_row), (T + T * K) * row),
        "index_select, out=": (
            lambda: torch.index_select(x, 0, token_of_row, out=selected),
            (T + T * K) * row,
        ),
        "index_add_": (lambda: added.zero_().index_add_(0, token_of_row, y_rows), (T * K + T) * row),
    }


def measure(shape: Shape, rounds: int = 7, copy_bytes: int = COPY_BYTES) -> list[Row]:
    """One row an operation, "copy" first."""
    threads = cores()
    calls = {"copy": (copier(threads, copy_bytes), 2 * threads * copy_bytes), **operations(shape)}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for call, _ in calls.values():
        call()  # first touch of every page, and every lazy initialisation
    for _ in range(rounds):
        for name, (call, _) in calls.items():
            start = time.perf_counter()
            result = call()
            seconds[name].append(time.perf_counter() - start)
            del result
    copy_rate = calls["copy"][1] / min(seconds["copy"])
    rows = []
    for name, (_, moved) in calls.items():
        best, median = min(seconds[name]), sorted(seconds[name])[rounds // 2]
        rows.append(Row(name, best * 1e6, median * 1e6, moved, moved / best / 1e9, moved / best / copy_rate))
    return rows


def main(
    tokens: int = 4096,
    hidden: int = 2048,
    top_k: int = 8,
    experts: int = 64,
    alignment: int = 16,
    dtype: str = "bfloat16",
    rounds: int = 7,
    json_path: str = typer.Option("", "--json", help='where to write the numbers, "-" for standard output'),
) -> None:
    """Measure, print a table, and write JSON if asked."""
    shape = Shape(tokens, hidden, top_k, experts, alignment, dtype)
    rows = measure(shape, rounds)
    out = sys.stderr if json_path == "-" else sys.stdout
    print(f"{'':30}{'best us':>10}{'median us':>11}{'GB/s':>8}{'of copy':>9}", file=out)
    for row in rows:
        print(
            f"{row.op:30}{row.best_us:10.0f}{row.median_us:11.0f}{row.gb_per_s:8.1f}{row.ratio_to_copy:9.2f}",
            file=out,
        )
    if json_path:
        report = {
            "shape": asdict(shape),
            "threads": torch.get_num_threads(),
            "rows": [asdict(r) for r in rows],
        }
        text = json.dumps(report, indent=2) + "\n"
        if json_path == "-":
            sys.stdout.write(text)
        else:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(text)


if __name__ == "__main__":
    typer.run(main)
