"""The prediction: every dispatcher, by the closed form and by the real plan on drawn routing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flexep.config import WIRES as DTYPES
from flexep.errors import ArgumentError
from flexep.planning.load import Load, closed_form, counted
from flexep.planning.movement import Buffer, Scene
from flexep.planning.patterns import PATTERNS
from flexep.planning.sample import Sample
from flexep.planning.terms import Operation, price
from flexep.planning.topology import Topology
from flexep.planning.workload import Workload


@dataclass(frozen=True)
class Priced:
    """Dispatch and combine of one dispatcher under one load."""

    dispatch: Operation
    combine: Operation
    memory: list[Buffer]

    @property
    def total_us(self) -> float:
        """One dispatch and one combine."""
        return self.dispatch.total_us + self.combine.total_us

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "dispatch": self.dispatch.as_dict(),
            "combine": self.combine.as_dict(),
            "total_us": self.total_us,
            "memory_bytes": [asdict(buffer) for buffer in self.memory],
        }


@dataclass(frozen=True)
class Prediction:
    """Everything predicted. `closed` and `drawn` map a dispatcher to its price under either load.

    runnable: whether this build runs the dispatcher with this wire; if not, `why_not` says what is missing.
    """

    closed: dict[str, Priced]
    drawn: dict[str, Priced]
    why_not: dict[str, str]
    balance: dict[str, float]
    sampling: dict[str, Any]
    dropped: float

    def ratio(self, name: str) -> float:
        """Predicted time under the drawn routing over that under uniform routing."""
        return self.drawn[name].total_us / self.closed[name].total_us

    def choice(self, among: Sequence[str], closed: bool = True) -> str | None:
        """The dispatcher with the least predicted time; None among none."""
        priced = self.closed if closed else self.drawn
        return min(among, key=lambda name: priced[name].total_us, default=None)

    @property
    def runnable(self) -> list[str]:
        """Dispatchers that this build has."""
        return [name for name in self.closed if name not in self.why_not]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "sampling": self.sampling,
            "balance": self.balance,
            "dropped_slots": self.dropped,
            "choice": {
                "closed_form": self.choice(list(self.closed)),
                "closed_form_runnable": self.choice(self.runnable),
                "drawn": self.choice(list(self.closed), closed=False),
                "drawn_runnable": self.choice(self.runnable, closed=False),
            },
            "dispatchers": {
                name: {
                    "runnable": name not in self.why_not,
                    "why_not": self.why_not.get(name),
                    "closed_form": self.closed[name].as_dict(),
                    "drawn": self.drawn[name].as_dict(),
                    "drawn_over_closed_form": self.ratio(name),
                }
                for name in self.closed
            },
        }


def predict(work: Workload, topology: Topology, names: Sequence[str], sample: Sample) -> Prediction:
    """Predicts the named dispatchers. Raises ArgumentError: a dispatcher without a pattern, or other ranks."""
    for name in names:
        if name not in PATTERNS:
            raise ArgumentError("dispatchers", name, f"all, or some of {', '.join(PATTERNS)}")
    if work.config.num_ranks != topology.ranks:
        raise ArgumentError("ranks", topology.ranks, f"the workload's {work.config.num_ranks}")
    uniform, drawn = closed_form(work, topology), counted(work, topology, sample)
    why_not = {}
    for name in names:
        if work.wire not in DTYPES:
            why_not[name] = f"this build does not send {work.wire}"
    return Prediction(
        closed={name: _price(Scene(work, topology, uniform), name) for name in names},
        drawn={name: _price(Scene(work, topology, drawn), name) for name in names},
        why_not=why_not,
        balance=_balance(drawn),
        sampling={
            "tokens_drawn": sample.drawn,
            "tokens": sum(sample.tokens_R),
            "exact": sample.exact,
            "counted_by": "the plan's own count_slots and resolve, on every token"
            if sample.exact
            else "the plan's own count_slots on the drawn tokens, scaled to all; maxima over ranks include "
            "sampling noise",
        },
        dropped=drawn.dropped,
    )


def _price(scene: Scene, name: str) -> Priced:
    pattern = PATTERNS[name](scene)
    return Priced(
        price(pattern.dispatch, scene.topology), price(pattern.combine, scene.topology), pattern.memory
    )


def _balance(load: Load) -> dict[str, float]:
    """The fullest rank over the mean, by what it receives."""

    def over_mean(value_R: torch.Tensor) -> float:
        mean = float(value_R.mean())
        return float(value_R.max()) / mean if mean else 1.0

    return {
        "tokens_received_max_over_mean": over_mean(load.crossing_RR.sum(0)),
        "slots_max_over_mean": over_mean(load.slots_R),
        "expert_major_rows_max_over_mean": over_mean(load.rows_R),
    }
