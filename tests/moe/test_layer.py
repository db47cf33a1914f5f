"""The MoE layer on local groups against the dense fp64 oracle, gradients included."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

import flexep
from flexep.errors import ArgumentError
from flexep.moe.layer import MoELayer
from tests.moe.oracle import moe_oracle
from tests.moe.saved import saved_storages

HIDDEN, INNER = 32, 48
BACKENDS = ("allgather", "alltoall")


def make_layer(
    ranks: int, *, num_experts: int, top_k: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> MoELayer:
    """A layer on a local group; `options` are split between the dispatcher and the layer."""
    own = {
        name: options.pop(name) for name in ("weights_at", "implementation", "renormalize") if name in options
    }
    dispatcher = flexep.Dispatcher(
        flexep.Group.local(ranks),
        num_experts=num_experts,
        hidden=HIDDEN,
        top_k=top_k,
        max_tokens=64,
        dtype=dtype,
        **options,
    )
    return MoELayer(dispatcher, inner=INNER, seed=11, **own)


def tokens(counts_R: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [T, H] of every rank, cut from one draw, so that the tokens do not depend on the number of ranks."""
    x_TH = torch.randn(sum(counts_R), HIDDEN, generator=torch.Generator().manual_seed(21)).to(dtype)
    return [part.clone().requires_grad_() for part in x_TH.split(list(counts_R))]


def grads_by_expert(layer: MoELayer) -> dict[str, torch.Tensor]:
    """{"w13", "w2": gradients [E, ...] by global expert id, "router": gradient of the router}."""
    order = torch.tensor([expert for experts in layer.experts for expert in experts.expert_ids]).argsort()
    whole = {name: torch.cat([getattr(e, name).grad for e in layer.experts])[order] for name in ("w13", "w2")}
    return whole | {"router": layer.router.weight.grad}


def values_by_expert(layer: MoELayer, name: str) -> torch.Tensor:
    order = torch.tensor([expert for experts in layer.experts for expert in experts.expert_ids]).argsort()
    return torch.cat([getattr(e, name).detach() for e in layer.experts])[order]


def run(
    layer: MoELayer, counts_R: Sequence[int], dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one forward and backward, tokens of all ranks in order."""
    x = tokens(counts_R, dtype)
    z = layer(x)
    sum((part.float() * torch.linspace(-1, 1, HIDDEN)).sum() for part in z).backward()
    assert [part.shape for part in z] == [part.shape for part in x]
    return {"z": torch.cat(z).detach(), "x": torch.cat([part.grad for part in x])} | grads_by_expert(layer)


def expected(
    layer: MoELayer, counts_R: Sequence[int], dtype: torch.dtype, renormalize: bool
) -> dict[str, torch.Tensor]:
    x_TH = torch.cat(tokens(counts_R, dtype)).detach()
    idx_TK, _ = layer.router(x_TH)
    parts = {"x": x_TH, "router": layer.router.weight.detach()}
    parts |= {name: values_by_expert(layer, name) for name in ("w13", "w2")}
    wide = {name: value.double().requires_grad_() for name, value in parts.items()}
    z_TH = moe_oracle(wide["x"], idx_TK, wide["router"], wide["w13"], wide["w2"], renormalize)
    (z_TH * torch.linspace(-1, 1, HIDDEN).double()).sum().backward()
    return {"z": z_TH.detach()} | {name: value.grad for name, value in wide.items()}


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    """Each tensor within `tolerance` of the largest value of its counterpart."""
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        scale = theirs[name].abs().max().item() if value.numel() else 1.0
        torch.testing.assert_close(
            value.double(),
            theirs[name].double(),
            rtol=0,
            atol=tolerance * scale,
            msg=lambda m, n=name: f"{n}: {m}",
        )


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("counts_R", "num_experts", "top_k"),
    [((40,), 8, 2), ((20, 33), 5, 3), ((0, 7, 1), 2, 1), ((16, 16, 0, 9), 10, 4), ((0, 0), 4, 2)],
)
def test_matches_fp64(backend: str, counts_R: tuple[int, ...], num_experts: int, top_k: int) -> None:
    """Uneven experts, fewer experts than ranks, ranks without tokens, no token at all."""
    renormalize = top_k > 1  # one weight, renormalised, is the constant 1
    layer = make_layer(
        len(counts_R), num_experts=num_experts, top_k=top_k, backend=backend, renormalize=renormalize
    )
    assert_near(run(layer, counts_R), expected(layer, counts_R, torch.float32, renormalize), 2e-6)


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
    assert_near(
        run(layer, counts_R), expected(layer, counts_R, torch.float32, where.get("renormalize", True)), 2e-6
    )


def test_bfloat16_stays_near_fp64() -> None:
    layer = make_layer(2, num_experts=6, dtype=torch.bfloat16, backend="alltoall")
    ours = run(layer, (30, 25), torch.bfloat16)
    assert ours["z"].dtype == torch.bfloat16
    assert ours["w2"].dtype == torch.float32
    assert_near(ours, expected(layer, (30, 25), torch.bfloat16, True), 2e-2)


def test_back_ends_and_ranks_agree() -> None:
    """The same bits from both back ends; other numbers of ranks differ in the order of sums alone."""
    one = run(make_layer(1, num_experts=6, backend="alltoall"), (50,))
    by_backend = [run(make_layer(3, num_experts=6, backend=name), (20, 13, 17)) for name in BACKENDS]
    for name, value in by_backend[0].items():
        assert torch.equal(value, by_backend[1][name]), name
    assert_near(by_backend[0], one, 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_static_capacity_changes_nothing_when_all_rows_fit(backend: str) -> None:
    counts_R = (20, 0, 33)
    exact = run(make_layer(3, num_experts=5, backend=backend), counts_R)
    static = run(make_layer(3, num_experts=5, backend=backend, capacity=256), counts_R)
    for name, value in exact.items():
        assert torch.equal(value, static[name]), name


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
    for wrong in (torch.zeros(3, HIDDEN + 4), torch.zeros(HIDDEN), torch.zeros(3, HIDDEN).bfloat16()):
        with pytest.raises(ArgumentError, match=r"^x"):
            make_layer(1, num_experts=4)([wrong])
