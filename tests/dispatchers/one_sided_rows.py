"""Rows that tests of one-sided back ends move."""

from __future__ import annotations

import torch

import flexep

SHAPE = {"num_experts": 9, "hidden": 64, "top_k": 3, "max_tokens": 40}
Rows = list[torch.Tensor]


def inputs(ranks: int, seed: int = 0) -> tuple[Rows, Rows, Rows]:
    """Unequal tokens, none on rank 1 if there is one."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [0 if rank == 1 else 33 + rank for rank in range(ranks)]
    x = [torch.randn(t, 64, generator=generator).to(torch.bfloat16) for t in tokens]
    topk_idx = [torch.randint(-1, 9, (t, 3), generator=generator) for t in tokens]
    return x, topk_idx, [torch.rand(t, 3, generator=generator) for t in tokens]


def round_trip(ep: flexep.Dispatcher, x: Rows, topk_idx: Rows, weights: Rows) -> Rows:
    """Rows that arrived, and what came home."""
    r = ep.dispatch(x, topk_idx, weights)
    z = ep.combine([one.x for one in r], [one.handle for one in r], [one.weights for one in r])
    return [one.x for one in r] + z
