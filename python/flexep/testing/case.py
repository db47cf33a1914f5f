"""A conformance case: a few words and numbers from which every rank's inputs follow."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass

import torch

from flexep.errors import ArgumentError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
SPREADS = ("equal", "ragged", "last_empty", "only_first")
ROUTINGS = (
    "uniform",
    "zipf",
    "one_expert",
    "own_rank",
    "one_rank",
    "expert_empty",
    "rank_empty",
    "duplicates",
    "imbalance_1",
    "imbalance_1.5",
    "imbalance_2",
    "imbalance_4",
    "imbalance_R",
    "W0_balanced",
    "W1_hot_experts",
    "W2_hot_rank",
    "W3_spread_hot",
    "W4_ragged_sources",
    "W5_zero_expert_rank",
    "W6_rotating_hot",
    "W7_burst",
)
PLACEMENTS = ("contiguous", "round_robin", "hole")
CAPACITIES = ("none", "full", "one_over", "far_over", "factor")
LAYOUTS = (("expert_major", "expert_major"), ("flat", "expert_major"), ("flat", "flat"))
WEIGHTS = ("inside", "combine", "nowhere", "none")
PAYLOADS = ("plain", "nonfinite")
TRANSPORTS = ("process", "local")
WINDOWS = ("default", "tenth", "least", "ahead")

_CHOICES: dict[str, tuple] = {
    "spread": SPREADS,
    "routing": ROUTINGS,
    "placement": PLACEMENTS,
    "capacity": CAPACITIES,
    "weights": WEIGHTS,
    "overflow": ("error", "drop"),
    "payload": PAYLOADS,
    "dtype": tuple(DTYPES),
    "transport": TRANSPORTS,
    "window": WINDOWS,
    "combine_wire": (None, *DTYPES),
    "layout": ("expert_major", "flat"),
    "y_layout": ("expert_major", "flat"),
}


@dataclass(frozen=True)
class Case:
    """One conformance case. `tokens` is the largest T of any rank, `spread` says how the others differ.

    `capacity`: none (exact sizes), full (the rows needed, exactly), one_over (one row too few), far_over (a
    third of them), factor (a float). `weights`: applied inside the expert, at combine, nowhere, or none given
    to dispatch. `fresh` dispatches with new routing, each followed by `cached` dispatches through its handle
    with new data; `repeats` times the whole again, for equal bits. `window`: what the rings of one-sided
    dispatchers may take (flexep.testing.windows): the default, a tenth of what holds `tokens` in one chunk, as
    little as one token a chunk, or a tenth and room for rows that are sent ahead.
    """

    ranks: int
    experts: int
    hidden: int
    top_k: int
    tokens: int
    seed: int = 0
    spread: str = "equal"
    headroom: int = 0
    routing: str = "uniform"
    empty: float = 0.0
    placement: str = "contiguous"
    alignment: int = 16
    capacity: str = "none"
    overflow: str = "drop"
    layout: str = "expert_major"
    y_layout: str = "expert_major"
    weights: str = "combine"
    dtype: str = "bf16"
    combine_wire: str | None = None
    domain_size: int | None = None
    fresh: int = 1
    cached: int = 0
    repeats: int = 0
    payload: str = "plain"
    dispatcher: str = "alltoall"
    transport: str = "process"
    window: str = "default"

    def __post_init__(self) -> None:
        for name in ("ranks", "experts", "hidden", "top_k", "alignment", "fresh"):
            self._at_least(name, 1)
        for name in ("tokens", "headroom", "cached", "repeats"):
            self._at_least(name, 0)
        for name, choices in _CHOICES.items():
            if getattr(self, name) not in choices:
                raise ArgumentError(name, getattr(self, name), f"one of {choices}")
        if (self.layout, self.y_layout) not in LAYOUTS:
            raise ArgumentError("y_layout", self.y_layout, f"expert_major with layout {self.layout}")
        if self.y_layout == "flat" and self.weights == "combine":
            raise ArgumentError("weights", self.weights, "not combine where y is already a partial sum")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int) or value < least:
            raise ArgumentError(name, value, f"an int of at least {least}")

    @property
    def elements(self) -> int:
        """R * T * K * H: the size of the case."""
        return self.ranks * self.tokens * self.top_k * self.hidden

    @property
    def data(self) -> Case:
        """The case without who carries it and how: equal `data` means equal inputs and equal outputs."""
        return dataclasses.replace(self, dispatcher="alltoall", transport="process", window="default")

    def to_json(self) -> str:
        """One line that `flexep verify --case` and `from_json` read back. Fields at their default are left
        out."""
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return json.dumps(
            {f.name: fields[f.name] for f in dataclasses.fields(self) if fields[f.name] != f.default}
        )

    @classmethod
    def from_json(cls, text: str) -> Case:
        """Reads `to_json`'s line; ArgumentError names what is wrong with it."""
        try:
            fields = json.loads(text)
        except json.JSONDecodeError as error:
            raise ArgumentError("case", text, f"a JSON object ({error})") from error
        if not isinstance(fields, dict):
            raise ArgumentError("case", text, "a JSON object")
        known = {f.name for f in dataclasses.fields(cls)}
        required = {f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING}
        if unknown := sorted(set(fields) - known):
            raise ArgumentError("case", unknown[0], f"only the fields {sorted(known)}")
        if missing := sorted(required - set(fields)):
            raise ArgumentError("case", text, f"also the field {missing[0]}")
        return cls(**fields)
