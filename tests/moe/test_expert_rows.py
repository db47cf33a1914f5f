"""Real rows and padding: owners, biases that leave padding alone, and rows padded to equal numbers."""

from __future__ import annotations

import pytest
import torch

from flexep.moe.expert_rows import add_bias, owners, pad_evenly
from flexep.moe.experts import LINEARS, Experts
from tests.moe.draws import generator

COUNTS = torch.tensor([3, 0, 4, 1], dtype=torch.int32)
PADDED = torch.tensor([4, 0, 4, 4], dtype=torch.int32)
ROWS = 15  # 12 that the plan has, and a tail of 3
EXPERT = [0, 0, 0, 4, 2, 2, 2, 2, 3, 4, 4, 4, 4, 4, 4]


def test_owners() -> None:
    expert_N, place_N = owners(COUNTS, PADDED, ROWS)
    assert expert_N.tolist() == EXPERT
    assert place_N[:12].tolist() == [0, 1, 2, 3] * 3
    nobody = torch.zeros(0, dtype=torch.int32)
    assert owners(nobody, nobody, 2)[0].tolist() == [0, 0]
    assert owners(COUNTS, PADDED, 0)[0].tolist() == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weighted", [False, True])
def test_bias_matches_autograd_on_real_rows_alone(weighted: bool, dtype: torch.dtype) -> None:
    """Padding holds NaN, in y, in the weights and in the gradient: it stays where it is."""
    random, expert_N = generator(1), torch.tensor(EXPERT)
    real_N = expert_N < 4
    y_NO = torch.randn(ROWS, 6, generator=random).to(dtype)
    bias_LO = torch.randn(4, 6, generator=random).requires_grad_()
    weights_N = torch.rand(ROWS, generator=random)
    grad_NO = torch.randn(ROWS, 6, generator=random).to(dtype)
    y_NO[~real_N], weights_N[~real_N], grad_NO[~real_N] = torch.nan, torch.nan, torch.nan
    y_NO.requires_grad_()
    weights_N.requires_grad_()
    out_NO = add_bias(y_NO, bias_LO, expert_N, weights_N if weighted else None)
    out_NO.backward(grad_NO)

    wide_bias = bias_LO.detach().double().requires_grad_()
    wide_weights = weights_N.detach().double().requires_grad_()
    added = wide_bias[expert_N[real_N]] * (wide_weights[real_N, None] if weighted else 1)
    expected = y_NO.detach()[real_N].double() + added
    expected.backward(grad_NO[real_N].double())
    tolerance = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(out_NO[real_N].double(), expected, rtol=tolerance, atol=tolerance)
    assert out_NO[~real_N].isnan().all()
    assert torch.equal(y_NO.grad[real_N], grad_NO[real_N])
    torch.testing.assert_close(bias_LO.grad.double(), wide_bias.grad, rtol=1e-5, atol=1e-6)
    assert torch.equal(bias_LO.grad[1], torch.zeros(6))  # nobody's
    if weighted:
        torch.testing.assert_close(weights_N.grad.double(), wide_weights.grad, rtol=1e-5, atol=1e-6)
        assert torch.equal(weights_N.grad[~real_N], torch.zeros(ROWS)[~real_N])


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("implementation", LINEARS)
def test_padding_gives_experts_with_biases_no_gradient(implementation: str, weighted: bool) -> None:
    """A gradient that arrives at padding rows, which hold zeros, moves no bias and no weight."""
    grads = []
    for filler in (0.0, 7.0):
        experts = Experts(range(4), hidden=8, inner=8, implementation=implementation, bias=True)
        real_N = torch.tensor(EXPERT)[:12] < 4
        x_NH = torch.randn(12, 8, generator=generator(2)) * real_N[:, None]
        weights_N = torch.rand(12, generator=generator(3)) * real_N if weighted else None
        y_NH = experts(x_NH, PADDED, weights_N, COUNTS)
        grad_NH = torch.where(real_N[:, None], torch.randn(12, 8, generator=generator(4)), filler)
        y_NH.backward(grad_NH)
        grads.append([parameter.grad for parameter in experts.parameters()])
        for grad in grads[-1]:
            assert torch.equal(grad[1], torch.zeros_like(grad[1]))
    for clean, filled in zip(*grads, strict=True):
        assert torch.equal(clean, filled)


def test_biases_of_grouped_and_sequential_experts_agree() -> None:
    results = []
    for implementation in LINEARS:
        experts = Experts(range(4), hidden=8, inner=8, implementation=implementation, bias=True)
        with torch.no_grad():
            for parameter in (experts.b13, experts.b2):
                parameter.copy_(torch.randn(parameter.shape, generator=generator(5)))
        x_NH = torch.randn(12, 8, generator=generator(6)).requires_grad_()
        y_NH = experts(x_NH, PADDED, counts_L=COUNTS)
        y_NH.square().sum().backward()
        results.append([y_NH, x_NH.grad, *(p.grad for p in experts.parameters())])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


def test_padding_evenly_and_back() -> None:
    x_NH = torch.randn(ROWS, 8, generator=generator(7)).requires_grad_()
    weights_N = torch.rand(ROWS, generator=generator(8)).requires_grad_()
    padded = pad_evenly(x_NH, weights_N, COUNTS, PADDED, rows_each=5)
    assert padded.x.shape == (20, 8)
    assert padded.padded_counts.tolist() == [5] * 4
    rows = {0: [0, 1, 2], 2: [4, 5, 6, 7], 3: [8]}
    for expert in range(4):
        part, mine = padded.x[5 * expert : 5 * expert + 5], rows.get(expert, [])
        assert torch.equal(part[: len(mine)], x_NH[mine])
        assert torch.equal(part[len(mine) :], torch.zeros(5 - len(mine), 8))
        assert torch.equal(padded.weights[5 * expert : 5 * expert + len(mine)], weights_N[mine])
    back_NH = padded.undo(padded.x)
    real_N = torch.tensor(EXPERT) < 4
    assert torch.equal(back_NH, x_NH * real_N[:, None])
    (back_NH * 3).sum().backward()
    assert torch.equal(x_NH.grad, 3.0 * real_N[:, None].expand(ROWS, 8))
