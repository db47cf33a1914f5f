"""Functions that run inside the ranks of a pool."""

from __future__ import annotations

from typing import Any

import torch

import flexep
from flexep.errors import FlexEPError
from flexep.moe.layer import MoELayer
from flexep.moe.router_config import RouterConfig
from flexep.testing.worker import RankContext
from tests.moe.layers import HIDDEN, grad_of_z, padding, tokens

OPTIONS = {
    "num_experts": 6,
    "top_k": 2,
    "score": "sigmoid",
    "bias_rate": 0.01,
    "aux_loss": 0.5,
    "z_loss": 0.01,
}
OPTIONS |= {"seq_aux_loss": 0.3, "global_aux_loss": 0.4}
OWN = {"shared_inner": 24, "shared_gate": True, "bias": True}


def make(group: flexep.Group, backend: str) -> MoELayer:
    dispatcher = flexep.Dispatcher(
        group,
        num_experts=6,
        hidden=HIDDEN,
        top_k=2,
        max_tokens=64,
        dtype=torch.float32,
        backend=backend,
        timeout=60.0,
    )
    return MoELayer(dispatcher, inner=16, router=RouterConfig(**OPTIONS), seed=7, **OWN)


def two_steps(context: RankContext, backend: str, counts_R: tuple[int, ...]) -> dict[str, Any]:
    """Two steps, the second by a moved bias: this rank's z and gradients, its shares of the losses, the bias."""
    layer = make(context.group, backend)
    x_TH, mask_T = tokens(counts_R)[context.rank], padding(counts_R)[context.rank]
    for _ in range(2):
        layer.zero_grad()
        z_TH = layer(x_TH, mask_T, seq_len=5)
        (z_TH * grad_of_z(len(z_TH))).sum().backward()
        counts_E = layer.router.step_counts
        layer.router.end_step()
    return {
        "z": z_TH.detach(),
        "router": layer.router.weight.grad,
        "w13": layer.experts[0].w13.grad,
        "losses": layer.router.losses,
        "counts": counts_E,
        "bias": layer.router.bias,
    }


def bad_call(context: RankContext, backend: str, wrong: str) -> str:
    """Rank 1 passes something wrong once; afterwards everybody's call goes through. The error's type and text."""
    layer = make(context.group, backend)
    x_TH = torch.zeros(10, HIDDEN)
    mask_T, seq_len = torch.zeros(10, dtype=torch.bool), 5
    bad = context.rank == 1
    told = "nothing"
    try:
        layer(
            x_TH.double() if bad and wrong == "x" else x_TH,
            mask_T[1:] if bad and wrong == "padding_mask" else mask_T,
            seq_len=3 if bad and wrong == "seq_len" else seq_len,
        )
    except FlexEPError as error:
        told = f"{type(error).__name__}: {error}"
    assert layer(x_TH, mask_T, seq_len=seq_len).shape == x_TH.shape
    return told
