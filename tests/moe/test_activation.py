"""The weighted SwiGLU against autograd, and what it saves."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from flexep.moe.activation import weighted_swiglu
from flexep.moe.saved_bytes import saved_storages


def draw(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("weighted", [False, True])
def test_matches_autograd_in_fp64(weighted: bool) -> None:
    gate_up = draw(17, 12, seed=1).requires_grad_()
    weights = draw(17, seed=2).requires_grad_() if weighted else None
    grad = draw(17, 6, seed=3)
    out = weighted_swiglu(gate_up, weights)
    out.backward(grad)

    wide = gate_up.detach().double().requires_grad_()
    wide_weights = weights.detach().double().requires_grad_() if weighted else None
    gate, up = wide.chunk(2, -1)
    expected = F.silu(gate) * up
    if weighted:
        expected = expected * wide_weights[:, None]
    expected.backward(grad.double())

    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(gate_up.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    if weighted:
        torch.testing.assert_close(weights.grad.double(), wide_weights.grad, rtol=1e-5, atol=1e-5)


def test_rounds_once_and_keeps_weight_gradients_fp32() -> None:
    gate_up = draw(9, 8, seed=4).bfloat16().requires_grad_()
    weights = draw(9, seed=5).requires_grad_()
    out = weighted_swiglu(gate_up, weights)
    out.sum().backward()
    assert torch.equal(out, weighted_swiglu(gate_up.float(), weights).bfloat16())
    assert weights.grad.dtype == torch.float32
    assert gate_up.grad.dtype == torch.bfloat16


def test_saves_nothing_but_its_inputs() -> None:
    gate_up, weights = draw(64, 32, seed=6).requires_grad_(), draw(64, seed=7).requires_grad_()
    assert saved_storages(lambda: weighted_swiglu(gate_up, weights), beside=[gate_up, weights]) == {}
