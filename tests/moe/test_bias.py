"""The expert bias: the sign rule on integer counts, over ranks and micro-batches; its state and its dtype."""

from __future__ import annotations

import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import flexep
from flexep.moe.counts import count_experts, sum_over_ranks
from flexep.moe.router import Router
from flexep.moe.router_config import RouterConfig
from flexep.ref import router as ref
from tests.moe.draws import generator

E, K, H = 6, 2, 16
CONFIG = RouterConfig(num_experts=E, top_k=K, score="sigmoid", bias_rate=0.001)


def tokens(num_tokens: int) -> torch.Tensor:
    """Skewed tokens: some experts are far more popular than others."""
    return torch.randn(num_tokens, H, generator=generator(1)) + torch.linspace(-1, 1, H)


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=9))
def test_moves_by_the_sign_of_what_is_missing(counts: list[int]) -> None:
    """In integers: counts beyond the precision of floats, and loads that are exactly the mean."""
    router = Router(RouterConfig(num_experts=len(counts), top_k=1, score="sigmoid", bias_rate=0.5), hidden=4)
    router.step_counts.copy_(torch.tensor(counts))
    router.end_step()
    assert router.bias.tolist() == ref.moved_bias([0.0] * len(counts), counts, 0.5)
    assert router.step_counts.tolist() == [0] * len(counts)


def test_one_slot_more_than_the_mean_decides() -> None:
    """In fp32 (and all the more in bf16) these counts are equal."""
    router = Router(RouterConfig(num_experts=2, top_k=1, bias_rate=1.0), hidden=4)
    router.step_counts.copy_(torch.tensor([2**33 + 1, 2**33]))
    router.end_step()
    assert router.bias.tolist() == [-1.0, 1.0]


@pytest.mark.parametrize("cut", [(60,), (20, 40), (0, 25, 0, 35), (1,) * 60])
def test_ranks_and_micro_batches_do_not_matter(cut: tuple[int, ...]) -> None:
    """The same slots counted on one rank, over several, or over several calls move the bias alike."""
    whole = Router(CONFIG, hidden=H)
    over_ranks = Router(CONFIG, hidden=H, group=flexep.Group.local(len(cut)))
    over_calls = Router(CONFIG, hidden=H)
    for _ in range(3):  # the second and third steps choose by a bias that moved
        whole(tokens(60))
        over_ranks(tokens(60).split(cut))
        for part in tokens(60).split(cut):
            over_calls(part)
        for router in (over_ranks, over_calls):
            assert torch.equal(router.step_counts, whole.step_counts)
            assert router.step_tokens == 60
        for router in (whole, over_ranks, over_calls):
            router.end_step()
        assert whole.bias.abs().max() > 0
        assert torch.equal(over_ranks.bias, whole.bias)
        assert torch.equal(over_calls.bias, whole.bias)


def test_it_evens_the_load() -> None:
    router = Router(RouterConfig(num_experts=E, top_k=K, score="sigmoid", bias_rate=0.02), hidden=H)
    spread = []
    for _ in range(60):
        router(tokens(200))
        spread.append((router.step_counts.max() - router.step_counts.min()).item())
        router.end_step()
    assert max(spread[-10:]) < spread[0] / 2


def test_counts_what_was_chosen_before_the_capacity_drops() -> None:
    tight = Router(
        RouterConfig(num_experts=E, top_k=K, score="sigmoid", bias_rate=0.1, capacity_factor=0.3), hidden=H
    )
    free = Router(CONFIG, hidden=H)
    assert (tight(tokens(40)).idx == -1).any()
    free(tokens(40))
    assert torch.equal(tight.step_counts, free.step_counts)


def test_state_travels_in_the_state_dict() -> None:
    """The bias, and the counts of a step that is not over."""
    router = Router(CONFIG, hidden=H)
    router(tokens(30))
    router.end_step()
    router(tokens(20))
    saved = io.BytesIO()
    torch.save(router.state_dict(), saved)
    saved.seek(0)
    other = Router(CONFIG, hidden=H, seed=5)
    other.load_state_dict(torch.load(saved))
    for each in (router, other):
        each(tokens(10))
        each.end_step()
    assert torch.equal(other.bias, router.bias)
    assert set(router.state_dict()) == {"weight", "bias", "step_counts", "step_tokens"}
    assert set(Router(RouterConfig(num_experts=E, top_k=K), hidden=H).state_dict()) == {"weight"}


@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.half, torch.nn.Module.double])
def test_casts_never_reach_it(cast: object) -> None:
    router = Router(CONFIG, hidden=H)
    router.bias.fill_(1.0009765625)  # not a bf16 number
    model = torch.nn.Sequential(router)
    cast(model)
    assert router.bias.dtype == torch.float32
    assert router.bias.unique().tolist() == [1.0009765625]
    assert router.step_counts.dtype == torch.int64
    idx_TK, weights_TK = router(tokens(8).bfloat16())
    assert (idx_TK.dtype, weights_TK.dtype) == (torch.int32, torch.float32)


def test_a_rate_of_zero_keeps_a_loaded_bias() -> None:
    router = Router(RouterConfig(num_experts=E, top_k=K, bias_rate=0.0), hidden=H)
    router.bias.fill_(0.25)
    router(tokens(9))
    router.end_step()
    assert router.bias.unique().tolist() == [0.25]


def test_counting() -> None:
    idx_TK = torch.tensor([[0, 2], [-1, -1], [2, 2], [-1, 1]], dtype=torch.int32)
    assert count_experts(idx_TK, 4).tolist() == [1, 1, 3, 0]
    assert count_experts(idx_TK[:0], 4).tolist() == [0] * 4
    assert count_experts(idx_TK, 4).dtype == torch.int64
    assert sum_over_ranks([torch.tensor([2**53]), torch.tensor([1])], None, 1.0).item() == 2**53 + 1
