"""Upcycling: a mixture of experts that starts as the dense feed-forward network it replaces."""

from __future__ import annotations

import torch

from flexep.errors import ArgumentError
from flexep.moe.feed_forward import FeedForward
from flexep.moe.layer import MoELayer

NAMES = ("w13", "w2", "b13", "b2")


@torch.no_grad()
def upcycle(dense: FeedForward, layer: MoELayer) -> None:
    """Copies the weights of `dense` into every expert of `layer`; the router keeps its own.

    Where the K weights of a token add up to s, the layer's output is s times that of `dense`: equal to it with
    renormalised or post-softmax weights and a scaling of 1, no shared expert and no dropped slot.

    Raises:
        ArgumentError: `dense` has other widths than the experts, or one of them has biases and the other none.
    """
    # Everything is checked before anything is written.
    for experts in layer.experts:
        for name in NAMES:
            ours, theirs = getattr(experts, name), getattr(dense, name)
            if (ours is None) != (theirs is None):
                raise ArgumentError(
                    "dense", name, f"{name} in both the dense network and the experts, or in none"
                )
            if ours is not None and ours.shape[1:] != theirs.shape:
                raise ArgumentError(f"dense.{name}", tuple(theirs.shape), f"{tuple(ours.shape[1:])}")
    for experts in layer.experts:
        for name in NAMES:
            if getattr(experts, name) is not None:
                getattr(experts, name).copy_(getattr(dense, name))
