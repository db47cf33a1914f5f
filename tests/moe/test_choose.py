"""Scores, choices and weights against the fp64 oracle, gradients included; ties; extreme logits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexep.moe.choose import choose, deal, largest, probabilities, score, weigh
from flexep.moe.router_config import RouterConfig
from flexep.ref import router as ref
from tests.moe.draws import KINDS, clear_logits, configs, generator, rule_of, scaled_close


@settings(max_examples=60)
@given(configs(), st.integers(0, 9), st.booleans(), st.integers(0, 2**16))
def test_matches_fp64_with_gradients(config: RouterConfig, num_tokens: int, biased: bool, seed: int) -> None:
    bias_E = 0.3 * torch.randn(config.num_experts, generator=generator(seed + 1)) if biased else None
    logits_TE = clear_logits(num_tokens, config, bias_E, seed).requires_grad_()
    wide_TE = logits_TE.detach().double().requires_grad_()
    idx_TK = choose(logits_TE, config, bias_E)
    chosen = ref.choose(wide_TE, rule_of(config), bias_E)
    assert idx_TK.tolist() == chosen

    weights_TK = weigh(logits_TE, idx_TK, config)
    expected_TK = ref.weights(wide_TE, chosen, rule_of(config))
    assert weights_TK.dtype == torch.float32
    scaled_close(weights_TK, expected_TK, 1e-6, "weights")
    grad_TK = torch.randn(weights_TK.shape, generator=generator(seed + 2))
    weights_TK.backward(grad_TK)
    expected_TK.backward(grad_TK.double())
    scaled_close(logits_TE.grad, wide_TE.grad, 2e-6, "gradient")


@settings(max_examples=20)
@given(configs(), st.integers(1, 9), st.integers(0, 2**16))
def test_probabilities_match_fp64_with_gradients(config: RouterConfig, num_tokens: int, seed: int) -> None:
    logits_TE = torch.randn(num_tokens, config.num_experts, generator=generator(seed)).requires_grad_()
    wide_TE = logits_TE.detach().double().requires_grad_()
    ours, theirs = probabilities(logits_TE, config), ref.shares(wide_TE, rule_of(config))
    torch.testing.assert_close(ours.sum(1), torch.ones(num_tokens))
    grad_TE = torch.randn(ours.shape, generator=generator(seed + 1))
    ours.backward(grad_TE)
    theirs.backward(grad_TE.double())
    scaled_close(ours, theirs, 1e-6)
    scaled_close(logits_TE.grad, wide_TE.grad, 2e-6)


@settings(max_examples=60)
@given(configs(), st.integers(0, 2**16), st.integers(1, 3))
def test_ties_go_to_the_lower_id(config: RouterConfig, seed: int, levels: int) -> None:
    """Few levels of logits: whole groups tie, and experts within them, and across their borders."""
    logits_TE = torch.randint(levels, (8, config.num_experts), generator=generator(seed)).float()
    assert choose(logits_TE, config).tolist() == ref.choose(logits_TE, rule_of(config))
    bias_E = torch.randint(2, (config.num_experts,), generator=generator(seed)).float()
    if config.num_groups == 1:  # sums of scores and bias may round into or out of a tie; these choices do not
        key_TE = score(logits_TE, config) + bias_E
        by_hand = [sorted(range(config.num_experts), key=lambda e, k=k: (-k[e], e)) for k in key_TE.tolist()]
        assert choose(logits_TE, config, bias_E).tolist() == [row[: config.top_k] for row in by_hand]


def test_ties_in_words() -> None:
    config = RouterConfig(num_experts=64, top_k=3)
    logits_TE = torch.zeros(3, 64)
    logits_TE[1, 40] = 1.0
    logits_TE[2, ::2] = 5.0
    assert choose(logits_TE, config).tolist() == [[0, 1, 2], [40, 0, 1], [0, 2, 4]]
    grouped = RouterConfig(num_experts=8, top_k=2, num_groups=4, topk_groups=2)
    assert choose(torch.zeros(1, 8), grouped).tolist() == [[0, 1]]
    last = torch.tensor([[0.0, 0, 0, 0, 0, 0, 2, 2]])  # groups 3 and, of three equal ones, 0
    assert choose(last, grouped).tolist() == [[6, 7]]
    assert largest(torch.tensor([1.0, 3.0, 3.0, 1.0]), 3).tolist() == [1, 2, 0]


def test_group_scores_differ() -> None:
    """One outstanding expert against two good ones."""
    logits_TE = torch.tensor([[3.0, -9.0, 2.0, 2.0]])
    for group_score, expected in (("top2", [2, 3]), ("max", [0, 1])):
        config = RouterConfig(
            num_experts=4,
            top_k=2,
            score="sqrt_softplus",
            num_groups=2,
            topk_groups=1,
            group_score=group_score,
        )
        assert choose(logits_TE, config).tolist() == [expected]


def test_an_expert_outside_the_groups_is_never_chosen() -> None:
    """A bias may push every allowed key below zero."""
    config = RouterConfig(num_experts=4, top_k=2, score="sigmoid", num_groups=2, topk_groups=1)
    bias_E = torch.tensor([-1.0, -9.0, -3.0, -3.0])  # sums of groups: -10 and -6, plus scores
    assert choose(torch.zeros(1, 4), config, bias_E).tolist() == [[2, 3]]


def test_the_bias_chooses_and_does_not_weigh() -> None:
    logits_TE = torch.tensor([[2.0, 1.0, 0.0]])
    config = RouterConfig(num_experts=3, top_k=2, score="sigmoid", renormalize=False)
    idx_TK = choose(logits_TE, config, torch.tensor([0.0, 0.0, 5.0]))
    assert idx_TK.tolist() == [[2, 0]]
    assert torch.equal(weigh(logits_TE, idx_TK, config), torch.tensor([[0.0, 2.0]]).sigmoid())


def test_chooses_by_logit_where_scores_saturate() -> None:
    """Behind a large logit every probability is 0 in fp32, sigmoids are 1: the logits still have an order."""
    logits_TE = torch.tensor([[100.0, 101.0, 500.0, 102.0]])
    for kind in KINDS:
        assert choose(logits_TE, RouterConfig(num_experts=4, top_k=3, **kind)).tolist() == [[2, 3, 1]]
    config = RouterConfig(num_experts=4, top_k=3, renormalize=False)
    assert weigh(logits_TE, choose(logits_TE, config), config).tolist() == [[1.0, 0.0, 0.0]]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("extreme", [-300.0, -95.0, -20.0, 20.0, 95.0, 300.0])
def test_extreme_logits_keep_weights_and_gradients_finite(kind: dict, extreme: float) -> None:
    for rest in (0.0, extreme):
        logits_TE = torch.tensor([[extreme, extreme, rest, rest]], requires_grad=True)
        config = RouterConfig(num_experts=4, top_k=2, **kind)
        weights_TK = weigh(logits_TE, choose(logits_TE, config), config)
        (weights_TK * torch.tensor([1.0, 2.0])).sum().backward()
        probabilities(logits_TE, config).square().sum().backward()
        assert weights_TK.isfinite().all()
        assert logits_TE.grad.isfinite().all()


def test_sqrt_softplus_is_right_in_its_tail() -> None:
    logits = torch.linspace(-80, 30, 1000).requires_grad_()
    config = RouterConfig(num_experts=1, top_k=1, score="sqrt_softplus")
    score(logits, config).sum().backward()
    wide = logits.detach().double().requires_grad_()
    expected = torch.log1p(wide.exp()).sqrt()
    expected.sum().backward()
    torch.testing.assert_close(score(logits, config).double(), expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(logits.grad.double(), wide.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("kind", KINDS[:1] + KINDS[2:])
def test_one_weight_is_not_renormalised(kind: dict) -> None:
    """Divided by itself it would be 1, and the router would never learn."""
    config = RouterConfig(num_experts=4, top_k=1, **kind)
    logits_TE = torch.randn(5, 4, generator=generator(1)).requires_grad_()
    weigh(logits_TE, choose(logits_TE, config), config).sum().backward()
    assert (logits_TE.grad.abs().sum(1) > 0).all()


@pytest.mark.parametrize(("ranks", "num_tokens", "E", "K"), [(1, 10, 4, 2), (4, 7, 8, 3), (3, 5, 64, 6)])
def test_dealing_is_even(ranks: int, num_tokens: int, E: int, K: int) -> None:
    config = RouterConfig(num_experts=E, top_k=K, force_balanced=True)
    real_T = torch.ones(2 * num_tokens, dtype=torch.bool)
    real_T[::2] = False
    dealt = torch.cat([deal(real_T, config, rank)[real_T] for rank in range(ranks)])
    load = torch.bincount(dealt.flatten(), minlength=E)
    assert load.max() - load.min() <= 1
    assert all(len(set(row)) == K for row in dealt.tolist())
