"""Layers on local groups, and their outputs and gradients under one fixed gradient of z."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import flexep
from flexep.moe.layer import MoELayer
from flexep.moe.router_config import RouterConfig
from tests.moe.draws import generator, scaled_close
from tests.moe.oracle import expected, parts_of

HIDDEN, INNER = 32, 48
BACKENDS = ("allgather", "alltoall")
OWN = ("weights_at", "implementation", "shared_inner", "shared_gate", "bias")
DISPATCHERS = ("backend", "layout", "alignment", "capacity", "overflow", "placement")


def make_layer(
    ranks: int, *, num_experts: int, top_k: int = 2, dtype: torch.dtype = torch.float32, **options: Any
) -> MoELayer:
    """`options` go to the dispatcher, the layer and, the rest, to the router. `latent` is the width of experts."""
    own = {name: options.pop(name) for name in OWN if name in options}
    latent = options.pop("latent", None)
    dispatcher = flexep.Dispatcher(
        flexep.Group.local(ranks),
        num_experts=num_experts,
        hidden=latent or HIDDEN,
        top_k=top_k,
        max_tokens=64,
        dtype=dtype,
        **{name: options.pop(name) for name in DISPATCHERS if name in options},
    )
    router = RouterConfig(num_experts=num_experts, top_k=top_k, **options)
    layer = MoELayer(dispatcher, inner=INNER, hidden=HIDDEN, router=router, seed=11, **own)
    with torch.no_grad():  # biases start at zero, where they would show little
        for experts in layer.experts:
            for place, expert in enumerate(experts.expert_ids):
                for parameter in (experts.b13, experts.b2):
                    if parameter is not None:
                        parameter[place] = torch.randn(parameter.shape[1], generator=generator(expert))
    return layer


def tokens(counts_R: Sequence[int], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """x [T, H] of every rank, cut from one draw, so that the tokens do not depend on the number of ranks."""
    x_TH = torch.randn(sum(counts_R), HIDDEN, generator=generator(21)).to(dtype)
    return [part.clone().requires_grad_() for part in x_TH.split(list(counts_R))]


def padding(counts_R: Sequence[int]) -> list[torch.Tensor]:
    """bool [T] of every rank, about a third of them True."""
    return list((torch.rand(sum(counts_R), generator=generator(22)) < 0.33).split(list(counts_R)))


def grad_of_z(num_tokens: int) -> torch.Tensor:
    return torch.linspace(-1, 1, HIDDEN).expand(num_tokens, HIDDEN)


def run(
    layer: MoELayer,
    counts_R: Sequence[int],
    dtype: torch.dtype = torch.float32,
    masks: Sequence[torch.Tensor] | None = None,
    fill: float | None = None,
) -> dict[str, torch.Tensor]:
    """Outputs and gradients of one forward and backward, tokens of all ranks in order; padding holds `fill`."""
    x = tokens(counts_R, dtype)
    if fill is not None and masks is not None:
        with torch.no_grad():
            for part, mask in zip(x, masks, strict=True):
                part[mask] = fill
    z = layer(x, None if masks is None else list(masks))
    assert [part.shape for part in z] == [part.shape for part in x]
    assert all(part.dtype == dtype for part in z)
    sum((part.float() * grad_of_z(len(part))).sum() for part in z).backward()
    grads = parts_of(layer, of_gradients=True)
    return {"z": torch.cat(z).detach(), "x": torch.cat([part.grad for part in x]), **grads}


def oracle_of(
    layer: MoELayer,
    counts_R: Sequence[int],
    dtype: torch.dtype = torch.float32,
    masks: Sequence[torch.Tensor] | None = None,
) -> dict[str, torch.Tensor]:
    x_TH = torch.cat(tokens(counts_R, dtype)).detach()
    gone = [False] * len(x_TH) if masks is None else torch.cat(list(masks)).tolist()
    return expected(layer, counts_R, x_TH, grad_of_z(len(x_TH)), gone)


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        scaled_close(value, theirs[name], tolerance, name)


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name
