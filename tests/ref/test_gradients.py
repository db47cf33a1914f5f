"""The oracle's written-out gradients against autograd through its own forward, in fp64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from flexep import ref
from tests.ref.test_against_brute import tiny_world


def anchored(outputs: list[torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same values, depending on every input even where nothing was routed."""
    nothing = sum((t * 0).sum() for t in inputs)
    return [t + nothing for t in outputs]


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("y_layout", ["expert_major", "flat"])
@pytest.mark.parametrize("seed", range(25))
def test_backward_is_the_gradient_of_forward(seed: int, y_layout: str, weighted: bool) -> None:
    world, topk_idx, x, weights = tiny_world(3000 + seed)
    if y_layout == "flat":
        world, weighted = replace(world, layout="flat"), False
    plan = ref.make_plan(world, topk_idx)
    x64 = [t.double().requires_grad_() for t in x]
    w64 = [t.double().requires_grad_() for t in weights]
    received = ref.dispatch(plan, x64, w64)
    gen = torch.Generator().manual_seed(seed)

    # dispatch: any gradient of the received rows and weights goes home
    d_rows = [torch.randn(r.x.shape, generator=gen, dtype=torch.float64) for r in received]
    d_weights = [torch.randn(r.weights.shape, generator=gen, dtype=torch.float64) for r in received]
    outputs = anchored([t for r in received for t in (r.x, r.weights)], [*x64, *w64])
    want = torch.autograd.grad(
        outputs, [*x64, *w64], [g for pair in zip(d_rows, d_weights, strict=True) for g in pair]
    )
    dx, dw = ref.dispatch_backward(plan, d_rows, d_weights, exact=True)
    for got, expected in zip([*dx, *dw], want, strict=True):
        torch.testing.assert_close(got, expected)

    # combine: gradients of y and of its weights
    rows = [len(p.flat_rank) if y_layout == "flat" else len(p.expert) for p in plan.ranks]
    ys = [torch.randn(n, world.hidden, generator=gen, dtype=torch.float64).requires_grad_() for n in rows]
    carried = [r.weights.detach().requires_grad_() for r in received] if weighted else None
    z = ref.combine(plan, ys, carried, y_layout, exact=True)
    dz = [torch.randn(t.shape, generator=gen, dtype=torch.float64) for t in z]
    want = torch.autograd.grad(anchored(z, [*ys, *(carried or [])]), [*ys, *(carried or [])], dz)
    dy, d_carried = ref.combine_backward(plan, dz, ys, carried, y_layout, exact=True)
    for got, expected in zip([*dy, *(d_carried or [])], want, strict=True):
        torch.testing.assert_close(got, expected)
