"""Comparison to the bit, with NaN equal to NaN, and digests that see every bit."""

from __future__ import annotations

import pytest
import torch

from flexep.testing.compare import differs, digest, outside
from flexep.testing.experts import TakeRows

NAN = float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_bits_decide(dtype: torch.dtype) -> None:
    tensor = torch.tensor([[1.0, NAN], [0.0, -2.0]], dtype=dtype)
    assert differs(tensor, tensor.clone()) is None
    assert "at [1, 0] got -0.0, want 0.0" in differs(
        tensor * torch.tensor([[1.0], [-1.0]], dtype=dtype), tensor
    )
    assert "1 of 4 differ" in differs(torch.where(tensor == 1, 1.01, tensor), tensor)
    assert "got None" in differs(None, tensor)
    assert "[1, 2]" in differs(tensor[:1], tensor)
    assert "torch.float64" in differs(tensor.double(), tensor)
    assert differs(None, None) is None


def test_every_nan_is_the_same_nan() -> None:
    other_nan = torch.tensor([-1, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert differs(other_nan, torch.tensor([NAN, NAN])) is None
    assert digest(other_nan) == digest(torch.tensor([NAN, NAN]))


def test_tolerance() -> None:
    want = torch.tensor([1.0, 2.0, torch.inf, NAN], dtype=torch.float64)
    good = torch.tensor([1.0, 2.1, NAN, torch.inf])
    assert outside(good, want, torch.full((4,), 0.2)) is None
    assert "at [1]" in outside(good, want, torch.full((4,), 0.01))
    assert "at [2]" in outside(torch.tensor([1.0, 2.0, 3.0, NAN]), want, torch.full((4,), 0.2))
    assert "at [0]" in outside(torch.tensor([NAN, 2.0, NAN, NAN]), want, torch.full((4,), 0.2))


def test_digest_sees_everything() -> None:
    base = {"a": [torch.zeros(2), torch.arange(3)]}
    seen = {
        digest(base),
        digest({"a": [-torch.zeros(2), torch.arange(3)]}),
        digest({"a": [torch.zeros(2), torch.arange(3).int()]}),
        digest({"a": [torch.zeros(2, 1), torch.arange(3)]}),
        digest({"a": [torch.zeros(2)]}),
    }
    assert len(seen) == 5


def test_take_rows_is_a_gather_with_its_gradient() -> None:
    x = torch.randn(4, 3, dtype=torch.float64).float().requires_grad_()
    row_map = torch.tensor([2, -1, 0, 2, 2, -1])
    rows = TakeRows.apply(x, row_map)
    assert torch.equal(rows, torch.stack([x[2], x[0] * 0, x[0], x[2], x[2], x[0] * 0]))
    grad = torch.randn(6, 3)
    (dx,) = torch.autograd.grad(rows, x, grad)
    want = torch.stack([grad[2], grad[0] * 0, (grad[0] + grad[3]) + grad[4], grad[0] * 0])
    assert torch.equal(dx, want)
