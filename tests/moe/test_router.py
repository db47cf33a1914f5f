"""The router against fp64 softmax, its order among ties, and its precision."""

from __future__ import annotations

import pytest
import torch

from flexep.errors import ArgumentError
from flexep.moe.router import Router, softmax_topk


@pytest.mark.parametrize("renormalize", [False, True])
def test_matches_fp64_with_gradients(renormalize: bool) -> None:
    logits_TE = torch.randn(50, 13, generator=torch.Generator().manual_seed(1)).requires_grad_()
    grad_TK = torch.randn(50, 4, generator=torch.Generator().manual_seed(2))
    idx_TK, weights_TK = softmax_topk(logits_TE, 4, renormalize)
    weights_TK.backward(grad_TK)

    wide_TE = logits_TE.detach().double().requires_grad_()
    expected_TK, expected_idx_TK = torch.softmax(wide_TE, -1).topk(4)
    if renormalize:
        expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    expected_TK.backward(grad_TK.double())

    assert idx_TK.dtype == torch.int32
    assert torch.equal(idx_TK.long(), expected_idx_TK)
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(logits_TE.grad.double(), wide_TE.grad, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_expert() -> None:
    logits_TE = torch.zeros(3, 64)
    logits_TE[1, 40] = 1.0
    logits_TE[2, ::2] = 5.0
    idx_TK, weights_TK = softmax_topk(logits_TE, 3, renormalize=True)
    assert idx_TK.tolist() == [[0, 1, 2], [40, 0, 1], [0, 2, 4]]
    assert torch.equal(weights_TK[0], torch.full((3,), 1 / 3))


def test_chooses_by_logit_where_probabilities_underflow() -> None:
    """Behind a large logit every probability is 0 in fp32, but the logits still have an order."""
    idx_TK, weights_TK = softmax_topk(torch.tensor([[0.0, 1.0, 500.0, 2.0]]), 3, renormalize=False)
    assert idx_TK.tolist() == [[2, 3, 1]]
    assert weights_TK.tolist() == [[1.0, 0.0, 0.0]]


def test_fp32_whatever_the_input_and_any_number_of_tokens() -> None:
    router = Router(hidden=64, num_experts=8, top_k=2, seed=3)
    x_TH = torch.randn(20, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    idx_TK, weights_TK = router(x_TH)
    expected_TK = torch.softmax(x_TH.double() @ router.weight.double().t(), -1).topk(2).values
    expected_TK = expected_TK / expected_TK.sum(-1, keepdim=True)
    assert weights_TK.dtype == torch.float32
    torch.testing.assert_close(weights_TK.double(), expected_TK, rtol=1e-5, atol=1e-6)
    assert [part.shape for part in router(x_TH[:0])] == [(0, 2), (0, 2)]
    assert torch.equal(router(x_TH[7:9])[0], idx_TK[7:9])


@pytest.mark.parametrize("top_k", [0, 9])
def test_refuses_a_choice_that_cannot_be_made(top_k: int) -> None:
    with pytest.raises(ArgumentError, match=f"top_k = {top_k}"):
        Router(hidden=16, num_experts=8, top_k=top_k)
