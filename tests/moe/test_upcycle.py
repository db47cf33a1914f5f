"""Upcycling: the layer starts as the dense network that it replaces."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flexep.errors import ArgumentError
from flexep.moe.feed_forward import FeedForward
from flexep.moe.upcycle import upcycle
from tests.moe.draws import generator
from tests.moe.layers import HIDDEN, INNER, make_layer, run, tokens


def make_dense(bias: bool = False, **options: Any) -> FeedForward:
    dense = FeedForward(**{"hidden": HIDDEN, "inner": INNER, "bias": bias, "seed": 1, **options})
    with torch.no_grad():
        for parameter in (dense.b13, dense.b2):
            if parameter is not None:
                parameter.copy_(torch.randn(parameter.shape, generator=generator(2)))
    return dense


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    ("options", "times"),
    [
        ({"top_k": 2}, 1.0),
        ({"top_k": 3, "pre_softmax": False, "weights_at": "combine"}, 1.0),
        ({"top_k": 4, "score": "sigmoid", "layout": "flat"}, 1.0),
        ({"top_k": 2, "score": "sqrt_softplus", "scaling": 2.5}, 2.5),
    ],
)
def test_equals_the_dense_network(options: dict[str, Any], times: float, bias: bool) -> None:
    """Output and the gradient of x; and the experts' gradients add up to the dense network's."""
    dense, layer = make_dense(bias), make_layer(3, num_experts=7, bias=bias, **options)
    upcycle(dense, layer)
    counts_R = (20, 0, 13)
    ours = run(layer, counts_R)
    x_TH = torch.cat(tokens(counts_R)).detach().requires_grad_()
    z_TH = times * dense(x_TH)
    (z_TH * torch.linspace(-1, 1, HIDDEN)).sum().backward()
    torch.testing.assert_close(ours["z"], z_TH, rtol=1e-5, atol=1e-5)
    for name in ("w13", "w2", *(("b13", "b2") if bias else ())):
        torch.testing.assert_close(ours[name].sum(0), getattr(dense, name).grad, rtol=1e-4, atol=1e-4)
    if times == 1.0:  # z no longer depends on the router, so neither does the gradient of x
        torch.testing.assert_close(ours["x"], x_TH.grad, rtol=1e-4, atol=1e-5)


def test_copies_and_does_not_share() -> None:
    dense, layer = make_dense(), make_layer(2, num_experts=4)
    upcycle(dense, layer)
    with torch.no_grad():
        layer.experts[0].w2[0].zero_()
    assert dense.w2.abs().sum() > 0
    assert torch.equal(layer.experts[1].w2[0], dense.w2)


@pytest.mark.parametrize(
    ("dense", "refused"),
    [
        ({"inner": INNER + 1}, r"dense\.w13"),
        ({"hidden": HIDDEN + 4}, r"dense\.w13"),
        ({"bias": True}, "'b13'"),
    ],
)
def test_refuses_another_shape_and_leaves_the_layer_as_it_was(dense: dict[str, Any], refused: str) -> None:
    layer = make_layer(2, num_experts=4)
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ArgumentError, match=refused):
        upcycle(make_dense(**dense), layer)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_the_dense_network_refuses_no_width() -> None:
    with pytest.raises(ArgumentError, match="inner = 0"):
        make_dense(inner=0)
