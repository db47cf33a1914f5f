"""Bad input to the router and the layer is refused by name and value before anything is counted or moved."""

from __future__ import annotations

import pytest
import torch

import flexep
from flexep.moe import MoELayer, Router, RouterConfig

CONFIG = RouterConfig(num_experts=4, top_k=2)


@pytest.mark.parametrize(
    ("x", "mask", "argument"),
    [
        (torch.zeros(3, 5), None, "x.shape"),
        (torch.zeros(4), None, "x.shape"),
        (torch.zeros(3, 4, dtype=torch.int64), None, "x.dtype"),
        (torch.zeros(3, 4), torch.ones(1, dtype=torch.bool), "padding_mask.shape"),
        (torch.zeros(3, 4), torch.ones(3, dtype=torch.int64), "padding_mask.dtype"),
    ],
)
def test_router_refuses_rows_and_masks(x: torch.Tensor, mask: torch.Tensor | None, argument: str) -> None:
    with pytest.raises(flexep.ArgumentError) as caught:
        Router(CONFIG, hidden=4)(x, mask)
    assert caught.value.argument == argument


def test_losses_are_those_of_the_last_call() -> None:
    router = Router(RouterConfig(num_experts=4, top_k=2, z_loss=0.1), hidden=4)
    router(torch.randn(3, 4))
    assert "z_loss" in router.losses
    router.eval()(torch.randn(3, 4))
    assert not router.losses


@pytest.mark.parametrize(
    ("argument", "value"),
    [("inner", 2.5), ("inner", 0), ("shared_inner", 0), ("shared_inner", "8"), ("router", {})],
)
def test_layer_refuses_widths_and_routers(argument: str, value: object) -> None:
    ep = flexep.Dispatcher(flexep.Group.local(1), num_experts=4, hidden=8, top_k=2, max_tokens=4)
    with pytest.raises(flexep.ArgumentError) as caught:
        MoELayer(ep, **{"inner": 16, argument: value})
    assert caught.value.argument == argument


@pytest.mark.parametrize("seq_len", ["a", 1.5, True])
def test_sequence_lengths_are_integers(seq_len: object) -> None:
    ep = flexep.Dispatcher(
        flexep.Group.local(1), num_experts=4, hidden=8, top_k=2, max_tokens=4, dtype=torch.float32
    )
    with pytest.raises(flexep.ArgumentError, match="an integer"):
        MoELayer(ep, inner=16)([torch.zeros(4, 8)], seq_len=seq_len)
    with pytest.raises(flexep.ArgumentError, match="an integer"):
        Router(CONFIG, hidden=4)(torch.zeros(3, 4), seq_len=seq_len)
