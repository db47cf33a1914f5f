"""The experts: grouped against sequential against fp64; empty, absent and first values; saved bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F

from flexep.errors import ArgumentError
from flexep.moe.experts import LINEARS, Experts
from flexep.moe.saved_bytes import saved_storages

HIDDEN, INNER = 32, 24


def rows(sizes: Sequence[int], dtype: torch.dtype = torch.float32, tail: int = 0) -> tuple[torch.Tensor, ...]:
    """(x [N, H], weights fp32 [N], padded_counts int32 [L]) of experts of these sizes, with gradients."""
    generator = torch.Generator().manual_seed(sum(sizes) + 100 * len(sizes))
    num_rows = sum(sizes) + tail
    x_NH = torch.randn(num_rows, HIDDEN, generator=generator).to(dtype).requires_grad_()
    weights_N = torch.rand(num_rows, generator=generator).requires_grad_()
    return x_NH, weights_N, torch.tensor(sizes, dtype=torch.int32)


def run(implementation: str, sizes: Sequence[int], dtype: torch.dtype, weighted: bool) -> list[torch.Tensor]:
    """[y, grad of x, grad of w13, grad of w2, grad of the weights]."""
    x_NH, weights_N, counts_L = rows(sizes, dtype)
    experts = Experts(range(len(sizes)), hidden=HIDDEN, inner=INNER, implementation=implementation)
    y_NH = experts(x_NH, counts_L, weights_N if weighted else None)
    (y_NH.float() * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    grads = [x_NH.grad, experts.w13.grad, experts.w2.grad, *([weights_N.grad] if weighted else [])]
    return [y_NH.detach(), *grads]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(16, 0, 48, 16), (0, 0, 16), (0, 0), (1, 7, 3), ()])
def test_grouped_equals_sequential(sizes: tuple[int, ...], dtype: torch.dtype, weighted: bool) -> None:
    grouped, sequential = (run(name, sizes, dtype, weighted) for name in LINEARS)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    for ours, theirs in zip(grouped, sequential, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("implementation", LINEARS)
def test_matches_fp64(implementation: str) -> None:
    sizes = (16, 0, 48)
    x_NH, weights_N, counts_L = rows(sizes)
    experts = Experts((4, 7, 9), hidden=HIDDEN, inner=INNER, implementation=implementation)
    y_NH = experts(x_NH, counts_L, weights_N)
    y_NH.square().sum().backward()

    leaves = [t.detach().double().requires_grad_() for t in (x_NH, weights_N, experts.w13, experts.w2)]
    x, weights, w13, w2 = leaves
    parts = []
    for expert, (x_part, w_part) in enumerate(zip(x.split(sizes), weights.split(sizes), strict=True)):
        gate, up = (x_part @ w13[expert]).chunk(2, -1)
        parts.append((F.silu(gate) * up * w_part[:, None]) @ w2[expert])
    expected = torch.cat(parts)
    expected.square().sum().backward()

    torch.testing.assert_close(y_NH.double(), expected, rtol=1e-5, atol=1e-5)
    ours = (x_NH.grad, weights_N.grad, experts.w13.grad, experts.w2.grad)
    for grad, leaf in zip(ours, leaves, strict=True):
        torch.testing.assert_close(grad.double(), leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("implementation", LINEARS)
def test_what_lies_in_the_tail_reaches_nothing(implementation: str) -> None:
    """Rows behind the last expert may hold anything, NaN included; experts and their rows do not see them."""
    sizes, tail = (16, 32), 16
    results = []
    for poison in (0.0, float("nan")):
        x_NH, weights_N, counts_L = rows(sizes, tail=tail)
        with torch.no_grad():
            x_NH[-tail:] = poison
        experts = Experts((0, 1), hidden=HIDDEN, inner=INNER, implementation=implementation)
        y_NH = experts(x_NH, counts_L, weights_N)
        grad_NH = torch.ones_like(y_NH)
        grad_NH[-tail:] = poison
        y_NH.backward(grad_NH)
        used = slice(0, sum(sizes))
        results.append([y_NH[used], x_NH.grad[used], weights_N.grad[used], experts.w13.grad, experts.w2.grad])
    for clean, poisoned in zip(*results, strict=True):
        assert torch.equal(clean, poisoned)


def test_an_expert_without_rows_has_a_zero_gradient() -> None:
    grads = run("grouped", (16, 0, 16), torch.float32, weighted=True)[2:4]
    for grad in grads:
        assert torch.equal(grad[1], torch.zeros_like(grad[1]))
        assert grad[0].abs().sum() > 0


def test_initial_values_belong_to_the_global_expert() -> None:
    whole = Experts(range(6), hidden=HIDDEN, inner=INNER, seed=5, name="block0")
    part = Experts((4, 1), hidden=HIDDEN, inner=INNER, seed=5, name="block0")
    other = Experts(range(6), hidden=HIDDEN, inner=INNER, seed=5, name="block1")
    assert torch.equal(whole.w13[[4, 1]], part.w13)
    assert torch.equal(whole.w2[[4, 1]], part.w2)
    assert not torch.equal(whole.w2, other.w2)


def test_weights_inside_save_no_expert_output() -> None:
    """Memory-efficient permutation: with the weight before the second linear, y is not kept for its gradient.

    Weighting behind the expert keeps y, [N, H]; inside, the only addition is the weights themselves.
    """
    x_NH, weights_N, counts_L = rows((512, 512))
    experts = Experts(range(2), hidden=HIDDEN, inner=INNER)
    beside = [x_NH, weights_N, counts_L, *experts.parameters()]
    inside = saved_storages(lambda: experts(x_NH, counts_L, weights_N), beside=beside)
    behind = saved_storages(lambda: experts(x_NH, counts_L) * weights_N[:, None], beside=beside)
    y_bytes = x_NH.shape[0] * HIDDEN * 4
    assert sum(behind.values()) - sum(inside.values()) == y_bytes
    row_bytes = (2 * INNER + INNER) * 4  # gate and up, and the weighted activation
    small = 2 * 2 * 4  # two int32 vectors of group ends
    assert sum(inside.values()) == x_NH.shape[0] * row_bytes + small


@pytest.mark.parametrize(("argument", "value"), [("implementation", "fused"), ("inner", 0)])
def test_refuses_bad_arguments(argument: str, value: object) -> None:
    with pytest.raises(ArgumentError, match=f"{argument} = {value!r}"):
        Experts((0,), **{"hidden": HIDDEN, "inner": INNER, argument: value})


def test_an_inner_width_that_kernels_refuse_is_named_and_sequential_takes_it() -> None:
    x_NH, _, counts_L = rows((16,))
    with pytest.raises(ArgumentError, match=r"weight\.shape = \(1, 32, 20\)"):
        Experts((0,), hidden=HIDDEN, inner=10)(x_NH.bfloat16(), counts_L)
    assert (
        Experts((0,), hidden=HIDDEN, inner=10, implementation="sequential")(x_NH, counts_L).isfinite().all()
    )
