"""CUDA: the CPU's bits from every operation; nothing written beside the outputs, nothing left unwritten; determinism;
wrong arguments refused, wrong indices harmless."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

import flexep.moe
from bench.onegpu.rows import Shape, main_shape
from flexep import ops
from flexep._native import cast as native_cast
from flexep._native import rows as native_rows
from flexep.errors import ArgumentError
from flexep.ops.rows import dot_rows, dot_slots, gather_rows, reduce_rows
from tests.ops.parity import CASES, permutation
from tests.ops.reference import assert_bits
from tests.ops.test_permute import make_routing
from tests.ops.test_rows import make_idx, make_rows

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.float16, torch.bfloat16]
POISON = 0xA5


def tensors(result: object) -> tuple[torch.Tensor, ...]:
    assert isinstance(result, (torch.Tensor, tuple))
    return result if isinstance(result, tuple) else (result,)


def on_cuda(args: tuple[object, ...]) -> list[object]:
    return [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]


def assert_same(got: object, want: object) -> None:
    for g, w in zip(tensors(got), tensors(want), strict=True):
        assert g.is_cuda
        if w.dtype == torch.float8_e4m3fn:
            g, w = g.view(torch.uint8), w.view(torch.uint8)
        assert_bits(g.cpu(), w)


@pytest.mark.parametrize("name", CASES)
def test_parity(name: str) -> None:
    assert flexep.moe.__name__  # registers the router's operations
    op = getattr(torch.ops.flexep, name)
    for args in CASES[name]():
        assert_same(op(*on_cuda(args)), op(*args))


@pytest.mark.parametrize("name", CASES)
def test_twenty_runs_are_equal(name: str) -> None:
    op = getattr(torch.ops.flexep, name)
    for args in list(CASES[name]())[::7]:
        given = on_cuda(args)
        first = [t.view(torch.uint8) for t in tensors(op(*given))]
        for _ in range(19):
            assert all(
                torch.equal(a, b.view(torch.uint8)) for a, b in zip(first, tensors(op(*given)), strict=True)
            )


class Guarded:
    """Outputs in the middle of poisoned buffers."""

    BAND = 4096

    def __init__(self) -> None:
        self.buffers: list[torch.Tensor] = []

    def output(self, rows: int, hidden: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        nbytes = rows * hidden * dtype.itemsize
        buffer = torch.full((nbytes + 2 * self.BAND,), POISON, dtype=torch.uint8, device=device)
        self.buffers.append(buffer)
        return buffer[self.BAND : self.BAND + nbytes].view(dtype).view(rows, hidden)

    def assert_bands_untouched(self) -> None:
        for buffer in self.buffers:
            assert bool((buffer[: self.BAND] == POISON).all())
            assert bool((buffer[buffer.numel() - self.BAND :] == POISON).all())


@pytest.mark.parametrize(
    "name",
    ["gather_rows", "reduce_rows", "permute_rows", "unpermute_rows", "quantize_rows", "dequantize_rows",
     "permute_quantized", "permute_scaled", "pad_rows", "swap_chunks"],
)  # fmt: skip
def test_outputs_are_written_whole_and_nothing_beside_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    guarded = Guarded()
    op = getattr(torch.ops.flexep, name)
    for args in CASES[name]():
        want = op(*args)
        with monkeypatch.context() as patched:
            patched.setattr(native_rows, "output", guarded.output)
            patched.setattr(native_cast, "output", guarded.output)
            assert_same(op(*on_cuda(args)), want)
    assert guarded.buffers
    guarded.assert_bands_untouched()


def test_indices_out_of_range_count_as_empty() -> None:
    src, weights = make_rows(40, 72, torch.bfloat16), torch.randn(300, 4)
    wild = make_idx((300, 4), 40)
    wild[::3] = torch.randint(-(2**31), 2**31, wild[::3].shape).int()
    wild[0, 0], wild[1, 1], wild[2, 2] = 40, 2**31 - 1, -2
    tame = torch.where((wild < 0) | (wild >= 40), -1, wild)
    assert not torch.equal(wild, tame)
    for op, before, after in (
        (lambda s, i: gather_rows(s, i), wild[:, 0], tame[:, 0]),
        (lambda s, i: gather_rows(s, i, weights[:, 0].to(s.device)), wild[:, 0], tame[:, 0]),
        (lambda s, i: reduce_rows(s, i, weights.to(s.device), torch.bfloat16, True), wild, tame),
        (lambda s, i: reduce_rows(s, i, None, torch.float32, False, i, torch.float16), wild, tame),
        (lambda s, i: dot_rows(src.repeat(8, 1)[:300].to(s.device), s, i), wild[:, 0], tame[:, 0]),
        (lambda s, i: dot_slots(src.repeat(8, 1)[:300].to(s.device), s, i), wild, tame),
    ):
        assert_same(op(src.cuda(), before.contiguous().cuda()), op(src, after.contiguous()))


def test_a_row_map_out_of_range_drops_its_slots() -> None:
    row_map, row_src, weights = permutation(99, 6, 1000)
    dropped = torch.rand(row_map.shape) < 0.3
    kept_map = torch.where(dropped, -1, row_map)
    kept_src = torch.where(
        row_src >= 0, torch.where(dropped.flatten()[row_src.clamp(min=0)], -1, row_src), -1
    )
    wild = torch.where(dropped, torch.randint(1000, 2**31, row_map.shape).int(), row_map)
    x = make_rows(99, 272, torch.bfloat16)
    for op in (
        lambda x, row_map, w: torch.ops.flexep.permute_rows(x, row_map, kept_src.to(x.device)),
        lambda x, row_map, w: torch.ops.flexep.permute_rows(x, row_map, kept_src.to(x.device), w),
        lambda x, row_map, w: torch.ops.flexep.permute_quantized(x, row_map, kept_src.to(x.device)),
        lambda x, row_map, w: torch.ops.flexep.permute_with_weights(x, w, row_map, kept_src.to(x.device)),
    ):
        assert_same(op(x.cuda(), wild.cuda(), weights.cuda()), op(x, kept_map, weights))


@pytest.mark.parametrize("num_rows", [None, 300, 5000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permute_and_backwards(dtype: torch.dtype, num_rows: int | None) -> None:
    """With the gradients of weights, whose dots have one order on both devices."""

    def through(
        x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        p = ops.permute(x, idx, weights, num_experts=12, alignment=16, num_rows=num_rows)
        z = ops.unpermute(p.x, p, p.weights)
        grads = torch.autograd.grad(z, (x, weights), up)
        assert p.weights is not None
        return p.x, p.weights, p.row_map, p.row_src, p.counts, p.padded_counts, p.dropped, z, *grads

    args = (torch.randn(257, 72).to(dtype), make_routing(257, 6, 12), torch.rand(257, 6))
    args = (*args, torch.randn(257, 72).to(dtype))
    assert_same(through(*(a.cuda() for a in args)), through(*args))


def test_public_functions() -> None:
    idx, weights, mask, probs = (
        make_routing(130, 5, 9),
        torch.randn(130, 5),
        torch.rand(130, 9) < 0.4,
        torch.rand(130, 9),
    )
    counts, rows = torch.tensor([5, 0, 17, 8]), torch.randn(30, 16)
    for call, args in (
        (lambda i, w: ops.indices_to_multihot(i, w, num_experts=9), (idx, weights)),
        (lambda m, p: ops.multihot_to_indices(m, p, top_k=9), (mask, probs)),
        (lambda m: ops.pad_routing_map(m, 32), (mask,)),
        (lambda x, m, p: ops.permute(x, m, p, alignment=8).x, (torch.randn(130, 8), mask, probs)),
        (lambda x, c: ops.pad(x, c, 16), (rows, counts)),
        (lambda x, c: ops.quantize_and_pad(x, c, 16, num_rows=90), (rows, counts)),
        (lambda x, c: ops.unpad(ops.pad(x, c, 16, num_rows=80)[0], c, 16, num_rows=33), (rows, counts)),
        (ops.sort_chunks_by_index, (rows, counts, torch.tensor([2, 0, 3, 1]))),
        (lambda x: ops.transpose_chunks(x, 5, 3), (rows,)),
    ):
        assert_same(call(*on_cuda(args)), call(*args))


def test_the_bench_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main_shape(Shape(tokens=64, hidden=64, alignment=16))
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"permute", "unpermute", "permute to fp8", "gradient of weights"} <= {row["op"] for row in rows}
    for row in rows:
        assert {"tokens", "hidden", "alignment", "library"} <= set(row)
        assert row["median_us"] > 0
        assert row["ratio_to_copy"] > 0


def refused(argument: str, call: Callable[[], object]) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert caught.value.argument == argument


def test_refusals() -> None:
    src, idx, slots = torch.randn(6, 16).cuda(), make_idx((5,), 6).cuda(), make_idx((5, 3), 6).cuda()
    shifted = torch.zeros(6 * 16 + 2, device="cuda")[2:].view(6, 16)
    skewed = torch.zeros(6, 18, device="cuda")[:, :16]
    many = torch.zeros(1, 16, device="cuda").expand(2**31, 16)
    for bad in (shifted, skewed, many, src.t()[:, :4].contiguous().t()):
        refused("src", lambda: gather_rows(bad, idx))  # noqa: B023
        refused("src", lambda: reduce_rows(bad, slots, None, torch.float32, True))  # noqa: B023
    row_map, row_src = make_idx((6, 2), 20).cuda(), make_idx((20,), 12).cuda()
    refused("src", lambda: torch.ops.flexep.permute_rows(shifted, row_map, row_src))
    refused("x", lambda: ops.quantize_rows(shifted))
    refused("a", lambda: dot_rows(shifted, src, make_idx((6,), 6).cuda()))
    refused("b", lambda: dot_rows(src, shifted, make_idx((6,), 6).cuda()))
    refused("idx", lambda: gather_rows(src, idx.cpu()))
    refused("idx", lambda: gather_rows(src, idx.long()))
    refused("weights", lambda: gather_rows(src, idx, torch.randn(5)))
    refused("groups", lambda: reduce_rows(src, slots, None, torch.float32, True, slots.cpu(), torch.float32))
    refused("row_src", lambda: torch.ops.flexep.permute_rows(src, row_map, row_src.cpu()))
    refused("row_map", lambda: torch.ops.flexep.permute_rows(src, row_map.cpu(), row_src))
    refused("rows", lambda: dot_slots(src, src.cpu(), slots))
    refused("idx", lambda: reduce_rows(src, make_idx((1, 2049), 6).cuda(), None, torch.float32, True))
    refused(
        "scales", lambda: ops.dequantize_rows(*ops.quantize_rows(src)[:1], torch.ones(6, 1), torch.float32)
    )
    assert bool(
        (gather_rows(src, idx[::2]).cpu() == gather_rows(src.cpu(), idx.cpu()[::2])).all()
    )  # not contiguous
