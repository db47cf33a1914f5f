"""Bad input to flexep.ops on a GPU is refused by name, or harmless: never an illegal access."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flexep import ops
from flexep.errors import ArgumentError
from tests.gpu.odd_tensors import (
    DEVICE,
    Change,
    E,
    H,
    K,
    T,
    check_device,
    ids,
    rand,
    same,
    shifted,
    strided,
    wild_ids,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def the_device_still_works() -> Iterator[None]:
    yield
    check_device()


def parts(p: ops.Permuted) -> list[torch.Tensor | None]:
    return [p.x, p.weights, p.row_map, p.row_src, p.counts, p.padded_counts, p.dropped, p.scales]


def operations() -> dict[str, tuple[Callable[..., Any], list[torch.Tensor]]]:
    """Every public operation of tensors, with good arguments."""
    x, idx, counts = rand(T, H, dtype=torch.bfloat16), ids(T, E), torch.tensor([5, 0, 15], device=DEVICE)
    rows, slots = idx[:, 0].int().contiguous(), idx.int()
    p = ops.permute(x, idx, num_experts=E, num_rows=200)
    payload, scales = ops.quantize_rows(x)
    order = torch.tensor([2, 0, 1], device=DEVICE)
    return {
        "permute": (lambda x, i, w: parts(ops.permute(x, i, w, num_experts=E, num_rows=200)), [x, idx, rand(T, K)]),
        "unpermute": (lambda y, w: ops.unpermute(y, p, w), [p.x, rand(200)]),
        "gather_rows": (ops.gather_rows, [x, rows, rand(T)]),
        "reduce_rows": (lambda x, i, w: ops.reduce_rows(x, i, w, x.dtype, True), [x, slots, rand(T, K)]),
        "dot_rows": (ops.dot_rows, [x, rand(E, H, dtype=x.dtype), rows]),
        "quantize_rows": (ops.quantize_rows, [x]),
        "dequantize_rows": (lambda q, s: ops.dequantize_rows(q, s, x.dtype), [payload, scales]),
        "pad": (lambda x, c: ops.pad(x, c, 8, num_rows=48), [x, counts]),
        "unpad": (lambda x, c: ops.unpad(x, c, 1, num_rows=T), [x, counts]),
        "quantize_and_pad": (lambda x, c: ops.quantize_and_pad(x, c, 8, num_rows=48), [x, counts]),
        "sort_chunks_by_index": (ops.sort_chunks_by_index, [x, counts, order]),
        "transpose_chunks": (lambda x: ops.transpose_chunks(x, 5, 4), [x]),
        "indices_to_multihot": (lambda i, w: ops.indices_to_multihot(i, w, num_experts=E), [slots, rand(T, K)]),
        "multihot_to_indices": (lambda m, w: ops.multihot_to_indices(m, w, top_k=E), [rand(T, E) < 0.5, rand(T, E)]),
        "pad_routing_map": (lambda m: ops.pad_routing_map(m, 8), [rand(T, E) < 0.5]),
    }  # fmt: skip


NAMES = sorted(set(ops.__all__) - {"Permuted", "release_memory"})


def test_every_operation_is_here() -> None:
    assert sorted(operations()) == NAMES


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("change", [strided, shifted])
def test_an_odd_tensor_is_refused_or_gives_the_same_bits(name: str, change: Change) -> None:
    call, good = operations()[name]
    want = call(*good)
    for i, tensor in enumerate(good):
        try:
            got = call(*good[:i], change(tensor), *good[i + 1 :])
        except ArgumentError:
            continue
        assert same(got, want), f"argument {i}"


@pytest.mark.parametrize("name", NAMES)
def test_tensors_of_two_devices_are_refused(name: str) -> None:
    call, good = operations()[name]
    if len(good) == 1:  # a lone tensor on the CPU is the CPU's operation
        assert same(call(good[0].cpu()), call(good[0]))
        return
    for i, tensor in enumerate(good):
        with pytest.raises(ArgumentError):
            call(*good[:i], tensor.cpu(), *good[i + 1 :])


def test_rows_that_a_gpu_cannot_read_are_refused() -> None:
    for name, bad in (
        ("permute", "x"),
        ("gather_rows", "src"),
        ("reduce_rows", "src"),
        ("quantize_rows", "x"),
    ):
        call, good = operations()[name]
        for change in (strided, shifted):
            with pytest.raises(ArgumentError) as caught:
                call(change(good[0]), *good[1:])
            assert caught.value.argument in (bad, "src"), name


def test_sizes_over_int32_are_refused() -> None:
    x, idx = rand(T, H, dtype=torch.bfloat16), ids(T, E)
    many = x[:1].expand(2**31, H)
    for argument, call in (
        ("num_rows", lambda: ops.permute(x, idx, num_experts=E, num_rows=2**31)),
        ("alignment", lambda: ops.permute(x, idx, num_experts=E, alignment=2**31)),
        ("alignment", lambda: ops.permute(x, idx, num_experts=2**20, alignment=2**12)),
        ("num_experts", lambda: ops.permute(x, idx, num_experts=2**31)),
        ("num_rows", lambda: ops.pad(x, torch.tensor([T], device=DEVICE), 8, num_rows=2**31)),
        ("src", lambda: ops.gather_rows(many, idx[:, 0].int())),
        ("src", lambda: ops.reduce_rows(many, idx.int(), None, x.dtype, True)),
        ("x", lambda: ops.quantize_rows(many)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument


def test_operations_take_ids_outside_as_empty_and_refuse_them_in_debug(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, weights = rand(T, H, dtype=torch.bfloat16), rand(T, K)
    nan = weights.clone()
    nan[3, 2] = float("nan")
    for dtype in (torch.int32, torch.int64):
        wild, tame, _ = wild_ids(dtype)

        def permuted(idx: torch.Tensor, w: torch.Tensor = weights) -> list[torch.Tensor | None]:
            return parts(ops.permute(x, idx, w, num_experts=E, num_rows=200))

        def multihot(idx: torch.Tensor, w: torch.Tensor = weights) -> Any:
            return ops.indices_to_multihot(idx, w, num_experts=E)

        for call, argument in ((permuted, "routing"), (multihot, "topk_idx")):
            want = call(tame)
            assert same(call(wild), want)
            with monkeypatch.context() as patched:
                patched.setenv("FLEXEP_DEBUG", "1")
                assert same(call(tame), want)
                for bad, given in ((argument, (wild,)), ("weights", (tame, nan))):
                    with pytest.raises(ArgumentError) as caught:
                        call(*given)
                    assert caught.value.argument == bad
