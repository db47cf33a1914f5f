"""The router module: precision, jitter, dealing, number of tokens, first values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexep
from flexep.errors import ArgumentError
from flexep.moe.router import Router
from flexep.moe.router_config import RouterConfig
from tests.moe.draws import generator

H, E, K = 64, 8, 2


def make(group: flexep.Group | None = None, seed: int = 3, **options: Any) -> Router:
    return Router(RouterConfig(num_experts=E, top_k=K, **options), hidden=H, group=group, seed=seed)


def tokens(num_tokens: int = 20) -> torch.Tensor:
    return torch.randn(num_tokens, H, generator=generator(4))


def test_fp32_whatever_the_input_and_any_number_of_tokens() -> None:
    router, x_TH = make(), tokens().bfloat16()
    idx_TK, weights_TK = router(x_TH)
    expected_TK = torch.softmax(x_TH.double() @ router.weight.double().t(), -1).topk(2).values
    expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    assert idx_TK.dtype == torch.int32
    assert weights_TK.dtype == torch.float32
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-5, atol=1e-6)
    assert [part.shape for part in router(x_TH[:0])] == [(0, 2), (0, 2)]
    assert torch.equal(router(x_TH[7:9]).idx, idx_TK[7:9])


def test_takes_the_lists_of_a_local_group() -> None:
    one, three = make(), make(flexep.Group.local(3))
    parts = three(list(tokens(20).split([5, 0, 15])))
    assert [part.idx.shape for part in parts] == [(5, 2), (0, 2), (15, 2)]
    assert torch.equal(torch.cat([part.idx for part in parts]), one(tokens(20)).idx)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    torch.manual_seed(0)
    assert torch.equal(make().weight, make().weight)
    assert not torch.equal(make().weight, make(seed=4).weight)


@pytest.mark.parametrize("jitter_at", ["input", "logits"])
def test_jitter_is_seeded_differs_between_calls_and_ranks_and_rests_in_eval(jitter_at: str) -> None:
    options = {"jitter": 0.5, "jitter_at": jitter_at}
    x_TH = tokens()
    first, second = make(**options), make(**options)
    calls = [first(x_TH).weights for _ in range(3)]
    torch.manual_seed(99)  # the default generator plays no part
    for call in calls:
        assert torch.equal(second(x_TH).weights, call)
    assert not torch.equal(calls[0], calls[1])
    assert not torch.equal(make(seed=4, **options)(x_TH).weights, calls[0])
    ranks = make(flexep.Group.local(2), **options)([x_TH, x_TH])
    assert not torch.equal(ranks[0].weights, ranks[1].weights)
    assert torch.equal(first.eval()(x_TH).weights, make()(x_TH).weights)


def test_jitter_has_the_size_it_says() -> None:
    """Input: a factor within 1 ± jitter. Logits: a normal deviation of jitter."""
    x_TH = torch.ones(4000, H)
    router = make(jitter=0.25)
    with torch.no_grad():
        router.weight.zero_()[:, 0] = 1.0
    factors_T = router._draft(x_TH, None, 0).logits_TE[:, 0]
    assert 0.75 <= factors_T.min() < 0.76
    assert 1.24 < factors_T.max() <= 1.25
    router = make(jitter=0.25, jitter_at="logits")
    with torch.no_grad():
        router.weight.zero_()
    logits_TE = router._draft(x_TH, None, 0).logits_TE
    assert abs(logits_TE.std().item() - 0.25) < 0.005
    assert abs(logits_TE.mean().item()) < 0.005


def test_dealing_ignores_the_scores_but_weighs_by_them() -> None:
    router = make(flexep.Group.local(4), force_balanced=True)
    parts = router(list(tokens(28).split(7)))
    load = torch.bincount(torch.cat([part.idx for part in parts]).flatten(), minlength=E)
    assert load.tolist() == [7] * E
    idx_TK, weights_TK = parts[1]
    scores_TE = torch.softmax(tokens(28)[7:14] @ router.weight.t(), -1)
    expected_TK = scores_TE.gather(1, idx_TK.long())
    torch.testing.assert_close(weights_TK, expected_TK / expected_TK.sum(1, keepdim=True))
    sum((part.weights * torch.tensor([1.0, 2.0])).sum() for part in parts).backward()
    assert router.weight.grad.abs().sum() > 0


def test_a_nan_reaches_its_own_token_alone() -> None:
    x_TH = tokens()
    clean = make()(x_TH)
    x_TH[3, 5] = torch.nan
    idx_TK, weights_TK = make()(x_TH)
    others = torch.arange(20) != 3
    assert torch.equal(idx_TK[others], clean.idx[others])
    assert torch.equal(weights_TK[others], clean.weights[others])
    assert weights_TK[3].isnan().all()  # which dispatch refuses by name


def test_refuses_no_width() -> None:
    with pytest.raises(ArgumentError, match="hidden = 0"):
        Router(RouterConfig(num_experts=2, top_k=1), hidden=0)
