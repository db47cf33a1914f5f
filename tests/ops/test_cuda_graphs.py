"""CUDA: static permutations wait for nothing, keep to their stream, and a graph of them follows its inputs."""

from __future__ import annotations

import pytest
import torch

from flexep import ops
from flexep.ops.rows import gather_rows
from tests.ops.reference import assert_bits

pytestmark = pytest.mark.gpu


class Step:
    """A static permutation, its way back and both backwards, and a quantised one, over inputs that may change."""

    def __init__(self) -> None:
        self.x = torch.zeros(200, 272, dtype=torch.bfloat16, device="cuda")
        self.idx = torch.zeros(200, 4, dtype=torch.int64, device="cuda")
        self.weights, self.up = torch.zeros(200, 4, device="cuda"), torch.zeros_like(self.x)

    def refill(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        self.x.normal_(generator=generator)
        self.up.normal_(generator=generator)
        self.weights.uniform_(generator=generator)
        self.idx.random_(-1, 12, generator=generator)

    def __call__(self) -> list[torch.Tensor]:
        x, weights = self.x.detach().requires_grad_(), self.weights.detach().requires_grad_()
        p = ops.permute(x, self.idx, weights, num_experts=12, alignment=16, num_rows=900)
        z = ops.unpermute(p.x, p, p.weights)
        grads = torch.autograd.grad(z, (x, weights), self.up)
        q = ops.permute(self.x, self.idx, num_experts=12, alignment=16, num_rows=900, quantize=True)
        assert p.weights is not None
        assert q.scales is not None
        return [
            p.x,
            p.weights,
            z,
            *grads,
            q.x.view(torch.uint8),
            q.scales,
            ops.dequantize_rows(q.x, q.scales, x.dtype),
        ]


def test_a_graph_follows_its_inputs() -> None:
    step = Step()
    step.refill(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    before: list[torch.Tensor] = []
    for seed in range(1, 11):
        step.refill(seed)
        graph.replay()
        for got, want in zip(captured, step(), strict=True):
            assert_bits(got.cpu(), want.cpu())
        assert not before or not torch.equal(before[0], captured[0])
        before = [captured[0].clone()]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_static_shapes_wait_for_nothing() -> None:
    step = Step()
    step.refill(0)
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_work_goes_to_the_current_stream() -> None:
    src, idx, stream = (
        torch.zeros(64, 1024, device="cuda"),
        torch.arange(64, device="cuda").int(),
        torch.cuda.Stream(),
    )
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        src.fill_(1.0)
        out = gather_rows(src, idx)
    stream.synchronize()
    assert bool((out == 1).all())
