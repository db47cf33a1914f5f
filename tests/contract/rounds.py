"""What the error tests share: good arguments, good inputs, and a round that must work after every refusal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import flexep

R, E, H, K, T = 3, 5, 16, 2, 7
DISPATCHERS = list(flexep.BACKENDS)
GOOD: dict[str, Any] = {"num_experts": E, "hidden": H, "top_k": K, "max_tokens": T, "timeout": 20.0}


def inputs() -> dict[str, torch.Tensor]:
    return {
        "x": torch.ones(T, H, dtype=torch.bfloat16),
        "topk_idx": torch.arange(T * K).view(T, K) % E,
        "topk_weights": torch.ones(T, K),
    }


def caught(call: Callable[[], Any]) -> Exception | None:
    try:
        call()
    except flexep.FlexEPError as error:
        return error
    return None


def works(ep: flexep.Dispatcher) -> bool:
    """A whole round gives what it must: K experts that return their rows make K times x."""
    r = ep.dispatch(**inputs())
    return bool((ep.combine(r.x, r.handle) == K).all())


def changed(tensor: torch.Tensor, at: tuple[int, int], value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[at] = value
    return tensor
