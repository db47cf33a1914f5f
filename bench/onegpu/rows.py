"""Moving rows on one GPU: `python -m bench.onegpu.rows [--sweep]` prints one JSON line a measurement.

The permutation's maps are made beforehand, and inputs rotate among sets larger than the L2 cache. `bytes` is the least
that an operation can move: each input row read once, each output row (padding included) written once; maps and weights
not counted. `ratio_to_copy` is the time of a device-to-device copy of as many bytes, read and written, over the median.
Beside ours: torch's index_select and index_add_ (which know no padding and round every sum), Transformer Engine's
permutation if it is there, and torch's fill, since a permutation mostly writes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from bench.onegpu.timing import copy_us, emit, median_us
from flexep.ops.cast import permute_quantized, quantize_rows
from flexep.ops.permute_rows import permute_rows, permute_with_weights, unpermute_rows
from flexep.ops.rows import dot_slots, gather_rows

E, K = 256, 8
SETS = 3
SWEEP = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 2880, 4096, 5120, 7168, 8192, 12288)
SWEEP_BYTES = 400 << 20  # of a permutation of the sweep, until it would take more than a million tokens


@dataclass(frozen=True)
class Shape:
    """T tokens of H bf16 elements to K of E experts, each expert's rows padded to `alignment`; uniform routing."""

    tokens: int
    hidden: int
    alignment: int


class Inputs:
    """One set of inputs: rows x [T, H] and dz, expert-major rows y [N, H], maps, weights."""

    def __init__(self, shape: Shape, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        T, H = shape.tokens, shape.hidden
        idx = torch.rand(T, E, device="cuda", generator=generator).topk(K, dim=1).indices.int()
        _, self.row_map, self.row_src, *_ = torch.ops.flexep.plan_permutation(idx, E, shape.alignment, None)
        self.rows = self.row_src.shape[0]
        self.x = torch.randn(T, H, device="cuda", generator=generator, dtype=torch.bfloat16)
        self.y = torch.randn(self.rows, H, device="cuda", generator=generator, dtype=torch.bfloat16)
        self.weights = torch.rand(T, K, device="cuda", generator=generator)
        self.kept_tokens = self.row_src[self.row_src >= 0].long() // K
        self.token_of_row = torch.where(self.row_src < 0, -1, self.row_src // K)
        self.y_unpadded = self.y[: T * K]
        self.added = torch.zeros_like(self.x)


def timed(
    op: str, shape: Shape, library: str, nbytes: int, sets: list[Inputs], call: Callable[[Inputs], object]
) -> None:
    took = median_us([lambda each=each: call(each) for each in sets])
    emit(
        op=op, tokens=shape.tokens, hidden=shape.hidden, alignment=shape.alignment, median_us=took,
        ratio_to_copy=copy_us(nbytes) / took, library=library, bytes=nbytes, gb_per_s=nbytes / took / 1e3,
    )  # fmt: skip


def main_shape(shape: Shape) -> None:
    sets = [Inputs(shape, seed) for seed in range(SETS)]
    T, N, row = shape.tokens, sum(s.rows for s in sets) // SETS, 2 * shape.hidden
    moved, back = (T + N) * row, (T * K + T) * row
    half = (T * row) + N * (shape.hidden + 4 * -(-shape.hidden // 128))

    def ours(op: str, nbytes: int, call: Callable[[Inputs], object]) -> None:
        timed(op, shape, "flexep", nbytes, sets, call)

    ours("permute", moved, lambda s: permute_rows(s.x, s.row_map, s.row_src))
    ours("permute with weights", moved, lambda s: permute_with_weights(s.x, s.weights, s.row_map, s.row_src))
    ours("permute, scaled", moved, lambda s: permute_rows(s.x, s.row_map, s.row_src, s.weights))
    ours("permute to fp8", half, lambda s: permute_quantized(s.x, s.row_map, s.row_src))
    ours("gather_rows", moved, lambda s: gather_rows(s.x, s.token_of_row))
    ours("unpermute", back, lambda s: unpermute_rows(s.y, s.row_map, s.row_src))
    ours("unpermute, weighted", back, lambda s: unpermute_rows(s.y, s.row_map, s.row_src, s.weights))
    ours("gradient of weights", back, lambda s: dot_slots(s.x, s.y, s.row_map))
    ours("quantize_rows", T * (3 * shape.hidden + shape.hidden // 32), lambda s: quantize_rows(s.x))
    if shape.alignment == 16:
        select, add = (T + T * K) * row, (T * K + T) * row
        timed(
            "permute", shape, "torch index_select", select, sets, lambda s: s.x.index_select(0, s.kept_tokens)
        )
        timed("unpermute", shape, "torch index_add_", add, sets,
              lambda s: s.added.zero_().index_add_(0, s.kept_tokens, s.y_unpadded))  # fmt: skip
        timed("fill", shape, "torch", N * row, sets, lambda s: s.y.zero_())
        transformer_engine(shape, sets)


def transformer_engine(shape: Shape, sets: list[Inputs]) -> None:
    try:
        from transformer_engine.pytorch import moe_permute, moe_unpermute
    except ImportError:
        return
    T, row = shape.tokens, 2 * shape.hidden
    experts = [torch.rand(T, E, device="cuda").topk(K, dim=1).indices.int() for _ in sets]
    permuted = [moe_permute(s.x, idx, map_type="index") for s, idx in zip(sets, experts, strict=True)]
    place = {id(s): i for i, s in enumerate(sets)}
    timed("permute", shape, "transformer_engine", (T + T * K) * row, sets,
          lambda s: moe_permute(s.x, experts[place[id(s)]], map_type="index"))  # fmt: skip
    timed("unpermute", shape, "transformer_engine", (T + T * K) * row, sets,
          lambda s: moe_unpermute(*permuted[place[id(s)]], s.weights, map_type="index"))  # fmt: skip


def sweep(hidden: int) -> None:
    tokens = min(1 << 20, SWEEP_BYTES // (2 * hidden * (K + 1)))
    shape = Shape(tokens, hidden, 1)
    sets = [Inputs(shape, 0)]
    nbytes = (tokens + sets[0].rows) * 2 * hidden
    timed("permute", shape, "flexep", nbytes, sets, lambda s: permute_rows(s.x, s.row_map, s.row_src))
    timed(
        "permute, scaled",
        shape,
        "flexep",
        nbytes,
        sets,
        lambda s: permute_rows(s.x, s.row_map, s.row_src, s.weights),
    )
    timed("gather_rows", shape, "flexep", nbytes, sets, lambda s: gather_rows(s.x, s.token_of_row))
    timed(
        "unpermute",
        shape,
        "flexep",
        nbytes,
        sets,
        lambda s: unpermute_rows(s.y, s.row_map, s.row_src, s.weights),
    )
    timed("gradient of weights", shape, "flexep", nbytes, sets, lambda s: dot_slots(s.x, s.y, s.row_map))
    if hidden % 16 == 0:
        half = tokens * 2 * hidden + sets[0].rows * (hidden + 4 * -(-hidden // 128))
        timed(
            "permute to fp8",
            shape,
            "flexep",
            half,
            sets,
            lambda s: permute_quantized(s.x, s.row_map, s.row_src),
        )


def host_time() -> None:
    """Microseconds that one call keeps the host, at a size where the device is never the slower."""
    s = Inputs(Shape(64, 512, 16), 0)
    for op, call in (
        ("permute_rows", lambda: permute_rows(s.x, s.row_map, s.row_src)),
        ("unpermute_rows", lambda: unpermute_rows(s.y, s.row_map, s.row_src, s.weights)),
    ):
        for _ in range(100):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(1000):
            call()
        emit(op=op, host_us=(time.perf_counter() - start) * 1e3, library="flexep")


def main() -> None:
    torch.manual_seed(0)
    for tokens in (4096, 8192):
        for alignment in (16, 128):
            main_shape(Shape(tokens, 7168, alignment))
    host_time()
    if "--sweep" in sys.argv[1:]:
        for hidden in SWEEP:
            sweep(hidden)


if __name__ == "__main__":
    with torch.no_grad():
        main()
