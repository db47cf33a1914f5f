"""Every operation on CUDA tensors gives the CPU's bits; dots agree within fp32 rounding."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from flexep import ops
from tests.ops.reference import assert_bits
from tests.ops.test_permute import make_routing
from tests.ops.test_rows import make_idx, make_rows

pytestmark = pytest.mark.gpu
FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def both(call: Callable[..., object], *args: object) -> None:
    """Runs `call` on CPU tensors and on their CUDA copies and compares every tensor of the result."""
    on_cuda = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
    want, got = call(*args), call(*on_cuda)
    want, got = (r if isinstance(r, tuple) else (r,) for r in (want, got))
    for w, g in zip(want, got, strict=True):
        assert g.is_cuda
        assert_bits(g.cpu(), w)


@pytest.mark.parametrize("dtype", FLOATS)
def test_row_functors(dtype: torch.dtype) -> None:
    src, idx, slots, weights = (
        make_rows(200, 264, dtype),
        make_idx((500,), 200),
        make_idx((300, 6), 200),
        torch.randn(300, 6),
    )
    both(ops.gather_rows, src, idx)
    both(ops.gather_rows, src, idx, torch.randn(500))
    for sort in (False, True):
        for out_dtype in FLOATS:
            both(lambda s, i, w: ops.reduce_rows(s, i, w, out_dtype, sort), src, slots, weights)  # noqa: B023
        groups = make_idx((300, 6), 3, seed=1)
        both(lambda s, i, w, g: ops.reduce_rows(s, i, w, dtype, sort, g, dtype), src, slots, weights, groups)  # noqa: B023
    a, b = torch.randn(500, 264).to(dtype), torch.randn(200, 264).to(dtype)
    dots = ops.dot_rows(a.cuda(), b.cuda(), idx.cuda())
    torch.testing.assert_close(dots.cpu(), ops.dot_rows(a, b, idx), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("num_rows", [None, 300, 5000])
@pytest.mark.parametrize("dtype", FLOATS)
def test_permute_and_backwards(dtype: torch.dtype, num_rows: int | None) -> None:
    idx = make_routing(257, 6, 12)

    def through(
        x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, up: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = x.detach().requires_grad_()
        p = ops.permute(x, idx, weights, num_experts=12, alignment=16, num_rows=num_rows)
        z = ops.unpermute(p.x, p, p.weights)
        (dx,) = torch.autograd.grad(z, x, up)
        assert p.weights is not None
        return p.x, p.weights, p.row_map, p.row_src, p.counts, p.padded_counts, p.dropped, z, dx

    both(through, torch.randn(257, 72).to(dtype), idx, torch.rand(257, 6), torch.randn(257, 72).to(dtype))


def test_weight_gradients() -> None:
    idx, x, up = make_routing(257, 6, 12), torch.randn(257, 72), torch.randn(257, 72)

    def gradient(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        weights = weights.detach().requires_grad_()
        p = ops.permute(x, idx, weights, num_experts=12)
        return torch.autograd.grad(ops.unpermute(p.x, p, p.weights), weights, up)[0]

    args = (x, idx, torch.rand(257, 6), up)
    torch.testing.assert_close(
        gradient(*(a.cuda() for a in args)).cpu(), gradient(*args), rtol=1e-5, atol=1e-4
    )


def test_maps_padding_and_chunks() -> None:
    idx, weights = make_routing(130, 5, 9), torch.randn(130, 5)
    mask, probs = torch.rand(130, 9) < 0.4, torch.rand(130, 9)
    both(lambda i, w: ops.indices_to_multihot(i, w, num_experts=9), idx, weights)
    for top_k in (None, 9):
        both(lambda m, p: ops.multihot_to_indices(m, p, top_k=top_k), mask, probs)  # noqa: B023
    both(lambda m: ops.pad_routing_map(m, 32), mask)
    both(lambda x, m, p: ops.permute(x, m, p, alignment=8).x, torch.randn(130, 8), mask, probs)
    counts, rows = torch.tensor([5, 0, 17, 8]), torch.randn(30, 16)
    both(lambda x, c: ops.pad(x, c, 16), rows, counts)
    both(lambda x, c: ops.unpad(ops.pad(x, c, 16, num_rows=80)[0], c, 16, num_rows=33), rows, counts)
    both(ops.sort_chunks_by_index, rows, counts, torch.tensor([2, 0, 3, 1]))
    both(lambda x: ops.transpose_chunks(x, 5, 3), rows)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_a_static_permute_waits_for_nothing() -> None:
    x, idx, weights = torch.randn(64, 16).cuda(), make_routing(64, 2, 4).cuda(), torch.rand(64, 2).cuda()
    ops.permute(x, idx, weights, num_experts=4, alignment=8, num_rows=160)
    torch.cuda.set_sync_debug_mode("error")
    try:
        p = ops.permute(x, idx, weights, num_experts=4, alignment=8, num_rows=160)
        ops.unpermute(p.x, p, p.weights)
    finally:
        torch.cuda.set_sync_debug_mode("default")
