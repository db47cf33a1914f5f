"""A run is refused before it starts, by the name and value of the argument."""

from __future__ import annotations

import pytest

from flexep.errors import ArgumentError
from flexep.training.config import TrainConfig


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("ranks", 0),
        ("ranks", -3),
        ("steps", 0),
        ("batch", 0),
        ("seq", 0),
        ("layers", 0),
        ("experts", 0),
        ("top_k", 9),
        ("hidden", 48),
        ("seed", -1),
        ("lr", 0.0),
        ("lr", float("nan")),
        ("lr", float("inf")),
        ("device", "tpu"),
        ("dispatcher", "pigeon"),
        ("dtype", "float64"),
        ("layout", "round"),
        ("weights_at", "never"),
        ("domain_size", 0),
        ("domain_size", 2),
    ],
)
def test_refuses(argument: str, value: object) -> None:
    with pytest.raises(ArgumentError) as refused:
        TrainConfig(**{argument: value})
    assert (refused.value.argument, str(refused.value.value)) == (argument, str(value))
