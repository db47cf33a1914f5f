"""fp8 rows: conversion against torch's, scales and payload against the definition, permutation, padding, refusals."""

from __future__ import annotations

import pytest
import torch

from flexep import ops
from flexep.errors import ArgumentError
from flexep.ops import cast, dequantize_rows, padding, permute, quantize_and_pad, quantize_rows
from tests.ops.reference import assert_bits
from tests.ops.test_permute import make_routing
from tests.ops.test_rows import make_rows

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
E4M3 = torch.float8_e4m3fn


def blocks_of(row: torch.Tensor) -> list[torch.Tensor]:
    return [row[begin : begin + 128] for begin in range(0, row.numel(), 128)]


def loop_quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """By the definition, a block at a time; torch's own cast does not saturate, so values are clamped first."""
    payload, scales = [], []
    for row in x.float():
        for block in blocks_of(row):
            amax = block[~block.isnan()].abs().max() if (~block.isnan()).any() else torch.tensor(0.0)
            scale = amax / 448
            scale = torch.where(scale == 0, 1.0, scale)
            scales.append(scale)
            payload.append((block / scale).clamp(-448, 448).to(E4M3))
    blocks = -(-x.shape[1] // 128)
    return torch.cat([p.view(torch.uint8) for p in payload]).view(x.shape), torch.stack(scales).view(
        -1, blocks
    )


def same_payload(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal codes; a NaN equals any NaN, as torch keeps its sign."""
    got = got.view(torch.uint8)
    nan = (got & 0x7F == 0x7F) & (want & 0x7F == 0x7F)
    assert torch.equal(got[~nan], want[~nan])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [16, 112, 128, 144, 272, 2880])
def test_quantize_against_the_definition(dtype: torch.dtype, hidden: int) -> None:
    for x in (torch.randn(9, hidden).to(dtype), make_rows(9, hidden, dtype)):
        payload, scales = quantize_rows(x)
        assert (payload.dtype, scales.dtype) == (E4M3, torch.float32)
        want, want_scales = loop_quantize(x)
        assert_bits(scales, want_scales)
        same_payload(payload, want)


def test_every_code_comes_back() -> None:
    """All finite codes are exact multiples of the scale, ties go to even and NaN is 0x7f."""
    codes = torch.arange(256, dtype=torch.uint8)
    values = codes.view(E4M3).float()
    x = torch.where(values.isnan(), 448.0, values).view(2, 128)  # one block each of +448 and -448
    payload, scales = quantize_rows(x)
    assert scales.tolist() == [[1.0], [1.0]]
    want = torch.where(values.isnan(), torch.tensor(448.0).to(E4M3).view(torch.uint8), codes)
    assert payload.view(torch.uint8).flatten().tolist() == want.tolist()
    back = dequantize_rows(payload, scales, torch.float32)
    assert_bits(back, x)
    finite = values[:127].sort().values
    middle = (finite[1:] + finite[:-1]) / 2
    x = torch.nn.functional.pad(middle, (0, 128 - middle.numel()), value=448.0).view(1, 128)
    assert torch.equal(quantize_rows(x)[0].float(), x.to(E4M3).float())


def test_zeros_tiny_values_inf_and_nan() -> None:
    x = torch.zeros(5, 144)
    x[1] = -0.0
    x[2, 3] = 2.0**-149  # its scale would be 0
    x[3, 0], x[3, 1], x[3, 140] = float("inf"), 1.0, 3.0
    x[4, 0], x[4, 1] = float("nan"), 7.0
    payload, scales = quantize_rows(x)
    assert scales[:3].tolist() == [[1.0, 1.0]] * 3
    assert payload[1].view(torch.uint8).eq(0x80).all()
    assert payload[2].float().eq(0).all()
    back = dequantize_rows(payload, scales, torch.float32)
    assert back[3, :128].isnan().all()
    assert back[3, 140] == 3.0
    assert scales[4, 0] == torch.tensor(7.0) / 448
    assert back[4].isnan().nonzero().tolist() == [[0]]
    assert payload[4, 0].view(torch.uint8) == 0x7F


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_error_is_half_a_step(dtype: torch.dtype) -> None:
    x = torch.randn(20, 400).to(dtype)
    payload, scales = quantize_rows(x)
    back = dequantize_rows(payload, scales, torch.float32)
    scale = scales.repeat_interleave(128, dim=1)[:, :400]
    step = torch.maximum(back.abs() * 2.0**-3, scale * 2.0**-9)
    assert ((back - x.float()).abs() <= step / 2 * 1.001).all()
    narrow = dequantize_rows(payload, scales, dtype)
    assert_bits(narrow, back.to(dtype))


def test_strided_rows() -> None:
    x = torch.randn(8, 96)[::2, 16:64]
    assert x.stride() == (192, 1)
    payload, scales = quantize_rows(x)
    want = quantize_rows(x.contiguous())
    assert torch.equal(payload.view(torch.uint8), want[0].view(torch.uint8))
    assert torch.equal(scales, want[1])


@pytest.mark.parametrize("num_rows", [None, 24, 100])
@pytest.mark.parametrize("hidden", [16, 272])
def test_permute_moves_payload_and_scales_alike(hidden: int, num_rows: int | None) -> None:
    """permute(quantize(x)) == permute(x, quantize=True), and both read back as permute(x read back)."""
    x, idx, weights = torch.randn(21, hidden).bfloat16(), make_routing(21, 3, 5), torch.rand(21, 3)
    payload, scales = quantize_rows(x)
    options = {"num_experts": 5, "alignment": 8, "num_rows": num_rows}
    moved = permute(payload, idx, weights, scales=scales, **options)
    fused = permute(x, idx, weights, quantize=True, **options)
    plain = permute(dequantize_rows(payload, scales, torch.bfloat16), idx, weights, **options)
    for p in (moved, fused):
        assert p.scales is not None
        assert p.x.dtype == E4M3
        assert_bits(dequantize_rows(p.x, p.scales, torch.bfloat16), plain.x)
        assert p.scales[p.row_src < 0].eq(0).all()
        assert torch.equal(p.weights, plain.weights)
    assert torch.equal(moved.x.view(torch.uint8), fused.x.view(torch.uint8))
    assert torch.equal(moved.scales, fused.scales)
    assert plain.scales is None
    as_bytes = permute(payload.view(torch.uint8), idx, scales=scales, **options)
    assert torch.equal(as_bytes.x, moved.x.view(torch.uint8))


@pytest.mark.parametrize("num_rows", [None, 80])
def test_quantize_and_pad(num_rows: int | None) -> None:
    x, counts = torch.randn(30, 144), torch.tensor([5, 0, 17, 8])
    payload, scales, padded = quantize_and_pad(x, counts, 16, num_rows=num_rows)
    want, want_padded = ops.pad(
        dequantize_rows(*quantize_rows(x), torch.float32), counts, 16, num_rows=num_rows
    )
    assert_bits(dequantize_rows(payload, scales, torch.float32), want)
    assert torch.equal(padded, want_padded)
    assert padded.tolist() == [16, 0, 32, 16]
    assert scales.eq(0).all(1).sum() == payload.shape[0] - 30


def test_opcheck() -> None:
    x, idx = torch.randn(6, 32), make_routing(6, 3, 4)
    p = permute(x, idx, num_experts=4, alignment=4, num_rows=40)
    payload, scales = quantize_rows(x)
    checks = ("test_autograd_registration", "test_faketensor")  # the others cannot compare fp8
    torch.library.opcheck(cast.quantize_rows, (x,), test_utils=checks)
    torch.library.opcheck(cast.dequantize_rows, (payload, scales, torch.bfloat16), test_utils=checks)
    torch.library.opcheck(cast.permute_quantized, (x, p.row_map, p.row_src), test_utils=checks)
    torch.library.opcheck(cast.permute_scaled, (payload.view(torch.uint8), scales, p.row_map, p.row_src))
    torch.library.opcheck(padding.pad_quantized, (x, torch.tensor([2, 4]), 4, 16), test_utils=checks)


def test_refusals() -> None:
    x, idx = torch.randn(6, 32), make_routing(6, 3, 4)
    payload, scales = quantize_rows(x)
    for argument, call in (
        ("hidden", lambda: quantize_rows(torch.randn(6, 24))),
        ("x", lambda: quantize_rows(x.double())),
        ("x", lambda: quantize_rows(payload)),
        ("x", lambda: quantize_rows(torch.randn(32, 16).t())),
        ("payload", lambda: dequantize_rows(x, scales, torch.float32)),
        ("scales", lambda: dequantize_rows(payload, scales[:5], torch.float32)),
        ("scales", lambda: dequantize_rows(payload, scales.double(), torch.float32)),
        ("dtype", lambda: dequantize_rows(payload, scales, torch.float64)),
        ("quantize", lambda: permute(payload, idx, num_experts=4, scales=scales, quantize=True)),
        ("scales", lambda: permute(payload, idx, num_experts=4, scales=scales[:5])),
        ("scales", lambda: permute(payload, idx, num_experts=4, scales=scales.double())),
        ("scales", lambda: permute(payload, idx, num_experts=4, scales=scales[0])),
        ("hidden", lambda: permute(torch.randn(6, 8), idx, num_experts=4, quantize=True)),
        ("counts", lambda: quantize_and_pad(x, torch.tensor([2.0]), 4)),
        ("alignment", lambda: quantize_and_pad(x, torch.tensor([6]), 0)),
        ("x", lambda: quantize_and_pad(x, torch.tensor([7]), 4)),
        ("num_rows", lambda: quantize_and_pad(x, torch.tensor([6]), 4, num_rows=6)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
