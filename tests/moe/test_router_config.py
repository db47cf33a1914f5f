"""What a RouterConfig refuses: by argument and value."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import pytest

from flexep.errors import ArgumentError
from flexep.moe.router_config import RouterConfig

BAD: list[tuple[str, Any, dict[str, Any]]] = [
    ("num_experts", 0, {}),
    ("num_experts", True, {}),
    ("top_k", 0, {}),
    ("top_k", 9, {}),
    ("top_k", 2.0, {}),
    ("score", "relu", {}),
    ("pre_softmax", 1, {}),
    ("pre_softmax", False, {"score": "sigmoid"}),
    ("pre_softmax", False, {"top_k": 1}),
    ("renormalize", None, {}),
    ("scaling", 0, {}),
    ("scaling", -1.0, {}),
    ("scaling", math.nan, {}),
    ("scaling", "2", {}),
    ("num_groups", 3, {}),
    ("num_groups", 0, {}),
    ("topk_groups", 5, {"num_groups": 4}),
    ("topk_groups", 1, {"num_groups": 8}),
    ("group_score", "mean", {}),
    ("bias_rate", -0.1, {}),
    ("bias_rate", math.inf, {}),
    ("aux_loss", -1.0, {}),
    ("seq_aux_loss", math.nan, {}),
    ("global_aux_loss", None, {}),
    ("z_loss", math.inf, {}),
    ("capacity_factor", 0.0, {}),
    ("capacity_factor", -1, {}),
    ("drop_by", "random", {}),
    ("pad_to_capacity", True, {}),
    ("force_balanced", "yes", {}),
    ("jitter", -0.5, {}),
    ("jitter_at", "output", {}),
]


@pytest.mark.parametrize(("argument", "value", "beside"), BAD)
def test_refuses(argument: str, value: Any, beside: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"{argument} = {value!r}: expected")) as refused:
        RouterConfig(**{"num_experts": 8, "top_k": 2, **beside, argument: value})
    assert refused.value.argument == argument


def test_every_field_is_refused_somewhere() -> None:
    assert {argument for argument, _, _ in BAD} == {f.name for f in dataclasses.fields(RouterConfig)}


def test_is_frozen_and_compares() -> None:
    config = RouterConfig(num_experts=8, top_k=2)
    assert config == RouterConfig(num_experts=8, top_k=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 3


def test_capacity_rounds_up() -> None:
    config = RouterConfig(num_experts=8, top_k=2, capacity_factor=1.25)
    assert [config.capacity(tokens) for tokens in (0, 1, 16, 17)] == [0, 1, 5, 6]
    with pytest.raises(ArgumentError, match="capacity_factor = None"):
        RouterConfig(num_experts=8, top_k=2).capacity(4)
