"""Shared experts, latent width, biases, capacity and padding: the whole layer against fp64, gradients included."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexep.moe.router_config import RouterConfig
from tests.moe.draws import KINDS
from tests.moe.layers import (
    BACKENDS,
    HIDDEN,
    assert_near,
    assert_same,
    make_layer,
    oracle_of,
    padding,
    run,
    tokens,
)

PARTS: dict[str, dict[str, Any]] = {
    "shared": {"shared_inner": 24},
    "gated": {"shared_inner": 24, "shared_gate": True},
    "latent": {"latent": 16},
    "bias": {"bias": True},
    "all": {"shared_inner": 24, "shared_gate": True, "latent": 16, "bias": True},
}
COUNTS = (19, 0, 30)


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("weights_at", ["expert", "combine"])
def test_parts_match_fp64(part: str, weights_at: str) -> None:
    layer = make_layer(3, num_experts=7, backend="alltoall", weights_at=weights_at, **PARTS[part])
    assert_near(run(layer, COUNTS), oracle_of(layer, COUNTS), 3e-6)


@pytest.mark.parametrize(
    "where",
    [
        {"implementation": "sequential"},
        {"backend": "allgather"},
        {"layout": "flat"},
        {"layout": "flat", "capacity": 300},
        {"capacity": 300, "alignment": 1},
        {"capacity_factor": 0.8, "drop_by": "position"},
        {"capacity_factor": 0.8, "pad_to_capacity": True},
        {"capacity_factor": 0.8, "pad_to_capacity": True, "layout": "flat", "alignment": 1},
        {"capacity_factor": 0.8, "pad_to_capacity": True, "implementation": "sequential", "capacity": 300},
    ],
)
def test_all_parts_in_every_way_match_fp64_with_padding(where: dict[str, Any]) -> None:
    layer = make_layer(3, num_experts=7, **{"backend": "alltoall"} | PARTS["all"] | where)
    masks = padding(COUNTS)
    ours = run(layer, COUNTS, masks=masks, fill=float("nan"))
    assert_near(ours, oracle_of(layer, COUNTS, masks=masks), 3e-6)


@settings(max_examples=15)
@given(
    st.sampled_from(KINDS),
    st.sampled_from([{}, *PARTS.values()]),
    st.sampled_from([{}, {"capacity_factor": 0.6}, {"num_groups": 4, "topk_groups": 2}]),
    st.lists(st.integers(0, 20), min_size=1, max_size=5),
    st.sampled_from(BACKENDS),
    st.booleans(),
)
def test_any_mixture_matches_fp64(
    kind: dict, part: dict, choice: dict, counts_R: list[int], backend: str, renormalize: bool
) -> None:
    layer = make_layer(
        len(counts_R),
        num_experts=8,
        top_k=3,
        backend=backend,
        renormalize=renormalize,
        **kind,
        **part,
        **choice,
    )
    masks = padding(counts_R)
    ours = run(layer, counts_R, masks=masks, fill=float("inf"))
    assert_near(ours, oracle_of(layer, counts_R, masks=masks), 3e-6)


@pytest.mark.parametrize("part", PARTS)
def test_back_ends_give_the_same_bits_and_ranks_agree(part: str) -> None:
    options = {"num_experts": 6, "scaling": 2.0, "score": "sigmoid", **PARTS[part]}
    masks = padding((20, 13, 17))
    one = run(make_layer(1, backend="alltoall", **options), (50,), masks=[torch.cat(masks)])
    many = [run(make_layer(3, backend=name, **options), (20, 13, 17), masks=masks) for name in BACKENDS]
    assert_same(*many)
    assert_near(many[0], one, 2e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_padding_is_not_dispatched_and_reaches_nothing(backend: str) -> None:
    """The same bits whatever padding holds; rows move for the real tokens alone, as if only they had been passed."""
    masks = padding(COUNTS)
    results, traffic = [], []
    for fill in (None, 0.0, float("nan"), 1e30):
        layer = make_layer(3, num_experts=7, backend=backend, **PARTS["all"])
        results.append(run(layer, COUNTS, masks=masks, fill=fill))
        traffic.append(layer.dispatcher.traffic)
    for other in results[1:]:
        assert_same(results[0], other)
    gone = torch.cat(masks)
    for name in ("z", "x"):
        assert torch.equal(results[0][name][gone], torch.zeros(int(gone.sum()), HIDDEN))
    if backend == "alltoall":
        short = make_layer(3, num_experts=7, backend=backend, **PARTS["all"])
        kept = [x[~mask].detach() for x, mask in zip(tokens(COUNTS), masks, strict=True)]
        short(kept)
        ours, theirs = traffic[0]["dispatch.rows"], short.dispatcher.traffic["dispatch.rows"]
        assert ours.remote_rows == theirs.remote_rows > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_nothing_but_padding(backend: str) -> None:
    layer = make_layer(2, num_experts=4, backend=backend, **PARTS["all"])
    ours = run(layer, (5, 3), masks=[torch.ones(5, dtype=torch.bool), torch.ones(3, dtype=torch.bool)])
    for name, value in ours.items():
        assert torch.equal(value, torch.zeros_like(value)), name


@pytest.mark.parametrize(("layout", "alignment"), [("expert_major", 1), ("expert_major", 16), ("flat", 16)])
def test_padding_to_capacity_gives_every_expert_equally_many_rows(layout: str, alignment: int) -> None:
    """Whatever the routing and the number of tokens; what the layer says stays the same."""
    options = {"num_experts": 6, "layout": layout, "alignment": alignment, "capacity_factor": 0.9}
    layer = make_layer(2, pad_to_capacity=True, **options)
    plain = make_layer(2, **options)
    most = 2 * RouterConfig(num_experts=6, top_k=2, capacity_factor=0.9).capacity(64)
    assert layer.capacity_rows == -(-most // alignment) * alignment
    shapes: list[tuple[int, list[int]]] = []
    for experts in layer.experts:
        experts.register_forward_pre_hook(
            lambda _m, args: shapes.append((args[0].shape[0], args[1].tolist()))
        )
    for counts_R in ((30, 41), (64, 64), (0, 0), (0, 5)):
        layer.zero_grad()
        plain.zero_grad()
        shapes.clear()
        ours, theirs = run(layer, counts_R), run(plain, counts_R)
        assert shapes == [(3 * layer.capacity_rows, [layer.capacity_rows] * 3)] * 2
        assert_near(ours, theirs, 1e-6)  # a GEMM of other rows may add in another order


def test_losses_of_the_layer_reach_its_router() -> None:
    """The losses enter through the weights' way home, in either place of the weights; z does not change."""
    grads = {}
    for weights_at, coefficient in product(["expert", "combine"], [0.0, 5.0]):
        layer = make_layer(2, num_experts=6, weights_at=weights_at, aux_loss=coefficient)
        ours = run(layer, (20, 11))
        grads[weights_at, coefficient] = ours["router"], ours["z"]
        assert set(layer.router.losses) == ({"aux_loss"} if coefficient else set())
    differences = []
    for weights_at in ("expert", "combine"):
        (without, z), (with_it, z_with) = grads[weights_at, 0.0], grads[weights_at, 5.0]
        assert torch.equal(z, z_with)
        differences.append(with_it - without)
    assert differences[0].abs().max() > 1e-2
    torch.testing.assert_close(*differences, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_stays_near_fp64(dtype: torch.dtype) -> None:
    layer = make_layer(2, num_experts=6, dtype=dtype, score="sigmoid", **PARTS["all"])
    ours = run(layer, (30, 25), dtype)
    assert ours["b2"].dtype == ours["shared.w13"].dtype == ours["down"].dtype == torch.float32
    assert_near(ours, oracle_of(layer, (30, 25), dtype), 3e-2)
