"""The MoE layer on local groups against the dense fp64 oracle, gradients included."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexep
from flexep.errors import ArgumentError
from flexep.moe.layer import MoELayer
from flexep.moe.router_config import RouterConfig
from flexep.moe.saved_bytes import saved_storages
from tests.moe.layers import BACKENDS, HIDDEN, assert_near, assert_same, make_layer, oracle_of, run, tokens


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("counts_R", "num_experts", "top_k"),
    [((40,), 8, 2), ((20, 33), 5, 3), ((0, 7, 1), 2, 1), ((16, 16, 0, 9), 10, 4), ((0, 0), 4, 2)],
)
def test_matches_fp64(backend: str, counts_R: tuple[int, ...], num_experts: int, top_k: int) -> None:
    """Uneven experts, fewer experts than ranks, ranks without tokens, no token at all."""
    layer = make_layer(len(counts_R), num_experts=num_experts, top_k=top_k, backend=backend)
    assert_near(run(layer, counts_R), oracle_of(layer, counts_R), 2e-6)


@pytest.mark.parametrize("implementation", ["grouped", "sequential"])
@pytest.mark.parametrize(
    "where",
    [
        {"weights_at": "expert"},
        {"weights_at": "combine"},
        {"weights_at": "combine", "layout": "flat"},
        {"weights_at": "expert", "layout": "flat"},
        {"weights_at": "expert", "layout": "flat", "capacity": 300},
        {"weights_at": "expert", "renormalize": False, "alignment": 1},
    ],
)
def test_every_way_to_run_it_matches_fp64(where: dict[str, Any], implementation: str) -> None:
    counts_R = (19, 30, 0)
    layer = make_layer(3, num_experts=7, backend="alltoall", implementation=implementation, **where)
    assert_near(run(layer, counts_R), oracle_of(layer, counts_R), 2e-6)


def test_bfloat16_stays_near_fp64() -> None:
    layer = make_layer(2, num_experts=6, dtype=torch.bfloat16, backend="alltoall")
    ours = run(layer, (30, 25), torch.bfloat16)
    assert ours["z"].dtype == torch.bfloat16
    assert ours["w2"].dtype == torch.float32
    assert_near(ours, oracle_of(layer, (30, 25), torch.bfloat16), 2e-2)


def test_back_ends_and_ranks_agree() -> None:
    """The same bits from both back ends; other numbers of ranks differ in the order of sums alone.

    So no gradient, of experts or of anything else, is scaled by the number of ranks.
    """
    one = run(make_layer(1, num_experts=6, backend="alltoall"), (50,))
    by_backend = [run(make_layer(3, num_experts=6, backend=name), (20, 13, 17)) for name in BACKENDS]
    assert_same(*by_backend)
    assert_near(by_backend[0], one, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_capacity_changes_nothing_when_all_rows_fit(backend: str) -> None:
    counts_R = (20, 0, 33)
    exact = run(make_layer(3, num_experts=5, backend=backend), counts_R)
    assert_same(exact, run(make_layer(3, num_experts=5, backend=backend, capacity=256), counts_R))


def test_weights_inside_keep_no_expert_output() -> None:
    """With weights in combine the expert outputs are kept for the weights' gradient; inside, they are not."""
    held = {}
    for weights_at in ("expert", "combine"):
        layer = make_layer(1, num_experts=2, backend="alltoall", weights_at=weights_at)
        x = tokens([64])
        y: list[torch.Tensor] = []
        hooks = [e.register_forward_hook(lambda _m, _i, out, y=y: y.append(out)) for e in layer.experts]
        storages = saved_storages(lambda layer=layer, x=x: layer(x)[0], beside=[*x, *layer.parameters()])
        held[weights_at] = y[0].untyped_storage().data_ptr() in storages
        assert len(hooks) == len(y) == 1
    assert held == {"expert": False, "combine": True}


def test_refuses_bad_arguments() -> None:
    with pytest.raises(ArgumentError, match="weights_at = 'nowhere'"):
        make_layer(1, num_experts=4, weights_at="nowhere")
    with pytest.raises(ArgumentError, match="top_k = 5"):
        make_layer(1, num_experts=4, top_k=5)
    with pytest.raises(ArgumentError, match="shared_gate = True"):
        make_layer(1, num_experts=4, shared_gate=True)
    dispatcher = make_layer(2, num_experts=4).dispatcher
    for field in ("num_experts", "top_k"):
        router = RouterConfig(**{"num_experts": 4, "top_k": 2, field: 1 if field == "top_k" else 8})
        with pytest.raises(ArgumentError, match=rf"router\.{field}"):
            MoELayer(dispatcher, inner=8, router=router)
    with pytest.raises(ArgumentError, match="router_group"):
        MoELayer(dispatcher, inner=8, router_group=flexep.Group.local(3))


def test_refuses_bad_tensors() -> None:
    layer, x_TH = make_layer(1, num_experts=4, latent=16), torch.zeros(3, HIDDEN)
    for wrong in (torch.zeros(3, 16), torch.zeros(3, HIDDEN + 4), torch.zeros(HIDDEN), x_TH.bfloat16(), None):
        with pytest.raises(ArgumentError, match=r"^x"):
            layer([wrong])
    with pytest.raises(ArgumentError, match=r"^x = 'Tensor'"):
        layer(x_TH)
    for wrong in (torch.zeros(4, dtype=torch.bool), torch.zeros(3)):
        with pytest.raises(ArgumentError, match=r"^padding_mask"):
            layer([x_TH], [wrong])
    with pytest.raises(ArgumentError, match=r"^padding_mask = 'Tensor'"):
        layer([x_TH], torch.zeros(3, dtype=torch.bool))
    with pytest.raises(ArgumentError, match="seq_len = 2"):
        layer([x_TH], seq_len=2)
    with pytest.raises(ArgumentError, match="seq_len = None"):
        make_layer(1, num_experts=4, seq_aux_loss=0.1)([x_TH])
