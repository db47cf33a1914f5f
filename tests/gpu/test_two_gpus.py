"""Two GPUs, one process each: the contract over NCCL, and training follows one rank."""

from __future__ import annotations

import pytest
import torch

import flexep
from flexep.testing.axes import random_cases
from flexep.testing.pool import RankPool
from flexep.testing.sweep import Sweep
from flexep.testing.worker import RankContext

pytestmark = pytest.mark.multigpu


def test_contract_over_nccl() -> None:
    cases = random_cases(2, 40, seed=11)
    with Sweep(list(flexep.BACKENDS), device="cuda") as sweep:
        failures = [failure for _, failed in sweep.run(cases) for failure in failed]
    assert not failures, failures[0]


def graph_over_nccl(ctx: RankContext) -> int:
    """Replays of a captured static dispatch and combine that differ from eager ones."""
    ep = flexep.Dispatcher(
        ctx.group, num_experts=6, hidden=64, top_k=3, max_tokens=40, backend="alltoall", alignment=4,
        capacity=64, overflow="drop",
    )  # fmt: skip
    x = torch.zeros(40, 64, dtype=torch.bfloat16, device=ctx.device)
    topk_idx = torch.zeros(40, 3, dtype=torch.int64, device=ctx.device)
    weights = torch.ones(40, 3, device=ctx.device)

    def step() -> tuple[torch.Tensor, torch.Tensor]:
        r = ep.dispatch(x, topk_idx, weights)
        return r.x, ep.combine(r.x, r.handle, r.weights)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    wrong = 0
    for seed in range(50):
        generator = torch.Generator(device=ctx.device).manual_seed(100 * seed + ctx.rank)
        x.normal_(generator=generator)
        topk_idx.random_(-1, 6, generator=generator)
        graph.replay()
        wrong += not all(torch.equal(a, b) for a, b in zip(captured, step(), strict=True))
    return wrong


def test_a_graph_over_nccl_follows_changing_routing() -> None:
    with RankPool(2, device="cuda") as pool:
        assert pool.run(graph_over_nccl) == [0, 0]
