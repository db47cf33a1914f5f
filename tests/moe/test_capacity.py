"""Capacity: the exact kept set, its ties, and zero weights."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexep.moe.capacity import kept_slots
from flexep.moe.router import Router
from flexep.moe.router_config import RouterConfig
from flexep.ref import router as ref
from tests.moe.draws import generator


@settings(max_examples=80)
@given(
    st.integers(0, 30),
    st.integers(1, 9),
    st.integers(1, 4),
    st.sampled_from([0.1, 0.5, 1.0, 1.1, 2.0, 100.0]),
    st.sampled_from(["weight", "position"]),
    st.integers(1, 1000),
    st.integers(0, 2**16),
)
def test_kept_set_matches_the_oracle(
    num_tokens: int, E: int, K: int, factor: float, by: str, levels: int, seed: int
) -> None:
    """Few levels of weights mean many ties; padding anywhere."""
    K = min(K, E)
    random = generator(seed)
    idx_TK = torch.rand(num_tokens, E, generator=random).argsort(1)[:, :K]
    weights_TK = torch.randint(levels, (num_tokens, K), generator=random) / levels
    real_T = torch.rand(num_tokens, generator=random) < 0.8
    idx_TK = idx_TK.masked_fill(~real_T[:, None], -1)
    config = RouterConfig(num_experts=E, top_k=K, capacity_factor=factor, drop_by=by)
    kept_TK = kept_slots(idx_TK, weights_TK, real_T, config)
    assert kept_TK.tolist() == ref.keep(idx_TK.tolist(), weights_TK, E, factor, by)


def test_ties_in_words() -> None:
    """Two slots an expert. Equal weights: the lower token stays. By position: the first tokens stay."""
    config = RouterConfig(num_experts=2, top_k=1, capacity_factor=0.8)
    idx_TK = torch.tensor([[0], [0], [0], [1], [0]])
    weights_TK = torch.tensor([[0.0], [0.5], [0.5], [0.0], [0.5]])
    real_T = torch.ones(5, dtype=torch.bool)
    kept = kept_slots(idx_TK, weights_TK, real_T, config)
    assert kept.flatten().tolist() == [False, True, True, True, False]
    config = RouterConfig(num_experts=2, top_k=1, capacity_factor=0.8, drop_by="position")
    assert kept_slots(idx_TK, weights_TK, real_T, config).flatten().tolist() == [
        True,
        True,
        False,
        True,
        False,
    ]


@pytest.mark.parametrize("by", ["weight", "position"])
def test_the_router_drops_and_leaves_the_rest_alone(by: str) -> None:
    """Dropped slots are -1 with weight 0, without gradient; kept weights are not renormalised."""
    options = {"num_experts": 6, "top_k": 3, "score": "sigmoid"}
    free = Router(RouterConfig(**options), hidden=16)
    tight = Router(RouterConfig(**options, capacity_factor=0.7, drop_by=by), hidden=16)
    x_TH = torch.randn(40, 16, generator=generator(3))
    all_of_them, some = free(x_TH), tight(x_TH)
    kept_TK = torch.tensor(ref.keep(all_of_them.idx.tolist(), all_of_them.weights, 6, 0.7, by))
    assert 0 < kept_TK.sum() < kept_TK.numel()
    assert torch.equal(some.idx, all_of_them.idx.where(kept_TK, torch.tensor(-1, dtype=torch.int32)))
    assert torch.equal(some.weights, all_of_them.weights.where(kept_TK, torch.tensor(0.0)))
    (some.weights.square().sum()).backward()
    (all_of_them.weights.square() * kept_TK).sum().backward()
    torch.testing.assert_close(tight.weight.grad, free.weight.grad)


def test_a_zero_weight_is_a_weight() -> None:
    """It keeps its slot and its place in the capacity."""
    router = Router(RouterConfig(num_experts=4, top_k=2, renormalize=False, capacity_factor=4.0), hidden=4)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    idx_TK, weights_TK = router(torch.tensor([[900.0, 1.0, 0.0, 0.0]]))
    assert idx_TK.tolist() == [[0, 1]]
    assert weights_TK.tolist() == [[1.0, 0.0]]
