"""The grouped GEMM with sizes on the GPU: against the sequential one, and with experts that received nothing."""

from __future__ import annotations

import pytest
import torch

from flexep.moe.experts import Experts

pytestmark = pytest.mark.gpu
SIZES = (16, 0, 48, 0, 16)


def run(implementation: str, dtype: torch.dtype, tail: int) -> list[torch.Tensor]:
    """[y, grad of x, grad of the weights, grad of w13, grad of w2], rows of experts only."""
    generator = torch.Generator().manual_seed(3)
    used = sum(SIZES)
    x_NH = torch.randn(used + tail, 128, generator=generator).to("cuda", dtype).requires_grad_()
    weights_N = torch.rand(used + tail, generator=generator).cuda().requires_grad_()
    experts = Experts(range(len(SIZES)), hidden=128, inner=64, implementation=implementation).cuda()
    # What the allocator hands out next holds NaN, so that an output left unwritten shows.
    poison = [torch.full((1 << n,), torch.nan, device="cuda") for n in range(8, 22)]
    del poison
    y_NH = experts(x_NH, torch.tensor(SIZES, dtype=torch.int32, device="cuda"), weights_N)
    grad_NH = torch.linspace(-1, 1, 128, device="cuda").expand_as(y_NH).to(dtype).contiguous()
    grad_NH[used:] = torch.nan
    y_NH.backward(grad_NH)
    return [y_NH[:used], x_NH.grad[:used], weights_N.grad[:used], experts.w13.grad, experts.w2.grad]


@pytest.mark.parametrize("tail", [0, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 2e-2), (torch.float32, 1e-4)])
def test_grouped_equals_sequential(dtype: torch.dtype, tolerance: float, tail: int) -> None:
    for ours, theirs in zip(run("grouped", dtype, tail), run("sequential", dtype, tail), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_host_wait() -> None:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        experts = Experts(range(2), hidden=128, inner=64).to("cuda:0", non_blocking=True)
        x_NH = torch.zeros(64, 128, dtype=torch.bfloat16, device="cuda", requires_grad=True)
        counts_L = torch.full((2,), 32, dtype=torch.int32, device="cuda")
        experts(x_NH, counts_L, torch.ones(64, device="cuda")).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x_NH.grad is not None
