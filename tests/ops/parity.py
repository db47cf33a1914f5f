"""Arguments with which every operation of the registry gives on CUDA what it gives on the CPU, bit for bit.

CASES has an entry for each operation `flexep::<name>` that takes CUDA tensors: a function that yields tuples of CPU
arguments. test_cuda.py runs them on both devices; test_parity_registry.py fails where an operation has no entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from flexep import ops
from flexep.ops.cast import quantize_rows
from tests.ops.test_permute import make_routing
from tests.ops.test_rows import make_idx, make_rows

Arguments = tuple[object, ...]
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# One vector, odd numbers of them, less and more than a warp, a tile, several tiles; 2880 and 7168 are real models'.
HIDDEN = [8, 24, 264, 2880, 7168]


def registered() -> set[str]:
    """Names of the operations of flexep that have an implementation for CUDA tensors."""
    names = (name for name in torch._C._dispatch_get_all_op_names() if name.startswith("flexep::"))
    return {
        name.removeprefix("flexep::").split(".")[0]
        for name in names
        if torch._C._dispatch_has_computed_kernel_for_dispatch_key(name, "CUDA")
    }


def gather_rows() -> Iterator[Arguments]:
    for dtype in FLOATS:
        for hidden in HIDDEN:
            yield make_rows(40, hidden, dtype), make_idx((300,), 40)
            yield make_rows(40, hidden, dtype), make_idx((300,), 40), torch.randn(300)
    strided = make_rows(24, 64, torch.float16)[::2, 8:40]
    yield strided, make_idx((9,), 12), torch.randn(9)
    yield make_rows(7, 12, torch.float32).view(torch.int64), make_idx((20,), 7)
    yield make_rows(7, 16, torch.bfloat16).view(torch.uint8), make_idx((20,), 7)
    yield torch.randn(0, 16), torch.full((3,), -1, dtype=torch.int32)
    yield torch.randn(3, 16), torch.empty(0, dtype=torch.int32)


def reduce_rows() -> Iterator[Arguments]:
    for number, hidden in enumerate(HIDDEN):
        for dtype in FLOATS:
            for out_dtype in FLOATS:
                src, idx, weights = make_rows(50, hidden, dtype), make_idx((70, 6), 50), torch.randn(70, 6)
                sort = (number + FLOATS.index(out_dtype)) % 2 == 0
                yield src, idx, weights, out_dtype, sort
                yield src, idx, None, out_dtype, not sort
                groups = make_idx((70, 6), 3, seed=number, empty=0)
                yield src, idx, weights, out_dtype, sort, groups, FLOATS[number % 3]
    yield make_rows(50, 16, torch.bfloat16), make_idx((3, 2048), 50), None, torch.bfloat16, True
    yield make_rows(50, 16, torch.float16), make_idx((40, 1), 50, empty=1), None, torch.float32, True
    yield torch.randn(0, 16), torch.full((3, 2), -1, dtype=torch.int32), None, torch.float32, False
    yield torch.full((1, 8), -0.0), torch.tensor([[0], [-1]], dtype=torch.int32), None, torch.float32, False


def dot_rows() -> Iterator[Arguments]:
    for dtype in FLOATS:
        for hidden in HIDDEN:
            yield make_rows(300, hidden, dtype), make_rows(40, hidden, dtype, seed=1), make_idx((300,), 40)
            yield torch.randn(99, hidden).to(dtype), torch.randn(5, hidden).to(dtype), make_idx((99,), 5)
    yield torch.randn(0, 16), torch.randn(3, 16), torch.empty(0, dtype=torch.int32)


def dot_slots() -> Iterator[Arguments]:
    for dtype in FLOATS:
        for top_k in (1, 8):
            tokens, rows = torch.randn(90, 264).to(dtype), make_rows(40, 264, dtype)
            yield tokens, rows, make_idx((90, top_k), 40)
    yield torch.randn(3, 16), torch.randn(0, 16), torch.full((3, 2), -1, dtype=torch.int32)


def permutation(
    tokens: int, top_k: int, num_rows: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """row_map, row_src and weights."""
    p = ops.permute(
        torch.zeros(tokens, 16),
        make_routing(tokens, top_k, 12),
        num_experts=12,
        alignment=16,
        num_rows=num_rows,
    )
    return p.row_map, p.row_src, torch.rand(tokens, top_k)


def permute_rows() -> Iterator[Arguments]:
    for hidden in HIDDEN:
        for dtype in FLOATS:
            row_map, row_src, weights = permutation(99, 6, 1000)
            x = make_rows(99, hidden, dtype)
            yield x, row_map, row_src
            yield x, row_map, row_src, weights
    row_map, row_src, _ = permutation(257, 3)
    yield make_rows(257, 16, torch.bfloat16).view(torch.uint8), row_map, row_src
    row_map, row_src, _ = permutation(0, 3, 50)
    yield torch.randn(0, 16), row_map, row_src


def unpermute_rows() -> Iterator[Arguments]:
    for dtype in FLOATS:
        row_map, row_src, weights = permutation(99, 6, 400)
        y = make_rows(400, 72, dtype)
        yield y, row_map, row_src
        yield y, row_map, row_src, weights


def permute_with_weights() -> Iterator[Arguments]:
    for tokens, num_rows in ((99, 1000), (257, None), (0, 40)):
        row_map, row_src, weights = permutation(tokens, 6, num_rows)
        yield make_rows(tokens, 264, torch.bfloat16), weights, row_map, row_src


def permute_weights() -> Iterator[Arguments]:
    row_map, row_src, weights = permutation(257, 6, 1000)
    yield weights, row_map, row_src
    yield torch.rand(1000), row_src, row_map


def plan_permutation() -> Iterator[Arguments]:
    for num_rows in (None, 300, 5000):
        yield make_routing(257, 6, 12), 12, 16, num_rows


def quantize() -> Iterator[Arguments]:
    for dtype in FLOATS:
        for hidden in (16, 128, 272, 2880, 7168):
            yield (make_rows(33, hidden, dtype),)
    yield (torch.randn(40, 256).bfloat16() * 2.0 ** torch.randint(-140, 120, (40, 1)),)
    yield (torch.zeros(3, 144),)


def dequantize() -> Iterator[Arguments]:
    for dtype in FLOATS:
        for hidden in (16, 272, 7168):
            payload, scales = quantize_rows(make_rows(33, hidden, torch.float32))
            yield payload, scales, dtype
    every_code = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(1, 256)
    yield every_code, torch.tensor([[0.3, -1e30]]), torch.float32


def permute_quantized() -> Iterator[Arguments]:
    for dtype in FLOATS:
        for hidden in (16, 272, 7168):
            row_map, row_src, _ = permutation(99, 6, 1000)
            yield make_rows(99, hidden, dtype), row_map, row_src


def permute_scaled() -> Iterator[Arguments]:
    for tokens, hidden in ((99, 16), (99, 2880), (0, 128)):
        row_map, row_src, _ = permutation(tokens, 6, 1000)
        payload, scales = quantize_rows(torch.randn(tokens, hidden))
        yield payload, scales, row_map, row_src


def padding(num_rows: int) -> Iterator[Arguments]:
    counts = torch.tensor([5, 0, 17, 8])
    for rows in (None, num_rows):
        yield make_rows(80, 272, torch.bfloat16), counts, 16, rows
        yield make_rows(80, 16, torch.float32), counts.int(), 1, rows
    for experts in (300, 3000):  # one kernel makes the map of the first, torch that of the other
        counts = torch.randint(0, 4, (experts,), dtype=torch.int32)
        yield make_rows(16 * experts, 16, torch.bfloat16), counts, 16, None


def chunks() -> Iterator[Arguments]:
    yield make_rows(30, 16, torch.float32), torch.tensor([5, 0, 17, 8]), torch.tensor([2, 0, 3, 1])
    for number in (300, 3000):
        sizes = torch.randint(0, 4, (number,), dtype=torch.int32)
        yield make_rows(int(sizes.sum()), 16, torch.float16), sizes, torch.randperm(number).int()


def swap_chunks() -> Iterator[Arguments]:
    yield make_rows(30, 16, torch.float16), 5, 3


def choose() -> Iterator[tuple[torch.Tensor, Arguments]]:
    for score, groups in (("softmax", (1, 1)), ("sigmoid", (4, 2))):
        for dtype in (torch.float32, torch.bfloat16):
            yield torch.randn(130, 64).to(dtype), (score, 6, *groups, "top2", True, 2.5)


def choose_experts() -> Iterator[Arguments]:
    for logits, rule in choose():
        yield logits, torch.randn(64), torch.rand(130) < 0.2, *rule, True
        yield logits, None, None, *rule, False


def choose_experts_grad() -> Iterator[Arguments]:
    for logits, rule in choose():
        idx = torch.ops.flexep.choose_experts(logits, None, None, *rule, False)[2]
        yield logits, idx, torch.randn(idx.shape), torch.randn(logits.shape), *rule


def mask() -> torch.Tensor:
    return torch.rand(130, 9) < 0.4


CASES: dict[str, Callable[[], Iterator[Arguments]]] = {
    "gather_rows": gather_rows,
    "reduce_rows": reduce_rows,
    "dot_rows": dot_rows,
    "dot_slots": dot_slots,
    "permute_rows": permute_rows,
    "unpermute_rows": unpermute_rows,
    "permute_with_weights": permute_with_weights,
    "permute_weights": permute_weights,
    "plan_permutation": plan_permutation,
    "quantize_rows": quantize,
    "dequantize_rows": dequantize,
    "permute_quantized": permute_quantized,
    "permute_scaled": permute_scaled,
    "pad_rows": lambda: padding(90),
    "pad_quantized": lambda: padding(90),
    "unpad_rows": lambda: padding(33),
    "sort_chunks": chunks,
    "swap_chunks": swap_chunks,
    "choose_experts": choose_experts,
    "choose_experts_grad": choose_experts_grad,
    "multihot_mask": lambda: iter([(make_routing(130, 5, 9), 9)]),
    "multihot_probs": lambda: iter([(make_routing(130, 5, 9), torch.randn(130, 5), 9)]),
    "mask_indices": lambda: iter([(mask(), None), (mask(), 9)]),
    "mask_weights": lambda: iter([(torch.rand(130, 9), make_routing(130, 5, 9).int())]),
    "take_columns": lambda: iter([(torch.randn(130, 9), make_routing(130, 5, 9))]),
    "add_columns": lambda: iter([(torch.randn(130, 5), make_routing(130, 5, 9), 9)]),
    "pad_mask": lambda: iter([(mask(), 32)]),
}
