"""What is compared: every library is one class with dispatch, combine and counted bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import torch

import flexep
from flexep.benchmark.case import BenchCase
from flexep.config import WINDOWED
from flexep.dispatchers.backend import Delivered as Rows
from flexep.ref import World
from flexep.testing.worker import RankContext

TIMEOUT = 300.0  # seconds; machines that are measured may be busy
Column = tuple[str, str]  # (library, dispatcher)


class Delivered(Protocol):
    """What dispatch gives: rows [N, H], rows per local expert [L], and routing weights if they travelled."""

    @property
    def x(self) -> torch.Tensor: ...
    @property
    def counts(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor | None: ...


@dataclass(frozen=True)
class Sent:
    """Bytes that one rank sent since construction: to other ranks, and with those it kept for itself."""

    remote_bytes: int = 0
    logical_bytes: int = 0


def rows_to_ranks(topk_idx: torch.Tensor, world: World, once: bool) -> list[int]:
    """Rows that tokens with these experts [T, K] make for every rank; `once`: a token goes to a rank but once."""
    idx, experts = topk_idx.cpu(), torch.tensor(world.rank_of_expert)
    rank_TK = torch.where(idx >= 0, experts[idx.clamp(min=0)], -1)
    here = [rank_TK == rank for rank in range(world.num_ranks)]
    return [int((mine.any(1) if once else mine).sum()) for mine in here]


@dataclass(frozen=True)
class Routed:
    """One step's inputs of this rank: x [T, H], topk_idx [T, K] int64, weights fp32 [T, K] or None."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    weights: torch.Tensor | None


class SentRows:
    """Bytes by the routing, for a library that counts none: rows to each rank, and back.

    `once`: a row to each rank that a token needs, else one a slot.
    """

    def __init__(self, world: World, rank: int, steps: list[Routed], once: bool) -> None:
        self._rows = [rows_to_ranks(routed.topk_idx, world, once) for routed in steps]
        self._rank, self._row_bytes = rank, world.hidden * world.dtype.itemsize
        self._bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])

    def count(self, op: str, step: int) -> None:
        rows = self._rows[step]
        self._bytes[op][0] += (sum(rows) - rows[self._rank]) * self._row_bytes
        self._bytes[op][1] += sum(rows) * self._row_bytes

    def sent(self) -> dict[str, Sent]:
        return {op: Sent(*both) for op, both in self._bytes.items()}


D = TypeVar("D", bound=Delivered)


class Library(ABC, Generic[D]):
    """One column of a run, in one rank. Construction, dispatch and combine are collective. It is handed back what its
    own dispatch returned, a D, never another's.

    Attributes: `library`, `dispatcher`, `wire`, `layout`, `mode`, `alignment`, `sms` (GPU multiprocessors that it
    takes, None: unknown) are printed with its numbers.
    """

    library: str
    dispatcher: str
    wire: str
    layout: str
    mode: str
    alignment: int
    sms: int | None = None

    @classmethod
    def why_not(cls, case: BenchCase) -> str | None:
        """Why it cannot run the case in this process, known before anything collective; None if it can."""
        return None

    @abstractmethod
    def dispatch(self, step: int) -> D:
        """Brings the tokens of `step` to their experts; plans anew unless the case says cached."""

    @abstractmethod
    def combine(self, y: torch.Tensor, delivered: D) -> torch.Tensor:
        """Brings rows in the layout of `delivered.x` home and adds them: [T, H]."""

    @abstractmethod
    def sent(self) -> dict[str, Sent]:
        """By message; the part of the name before the first dot is the operation."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of memory. Not collective."""


class Promising(Library[D]):
    """A library that says what it delivers, which the oracle then checks.

    Attributes: `world`: what it promises. `exact`: its sums have the bits of the recipe.
    """

    world: World
    exact = False

    def order(self, delivered: D) -> torch.Tensor | None:
        """int64 [N]: for each row that the oracle expects the row of `delivered.x` that must hold it; None where both
        have one order."""
        return None


class SelfChecked(Library[D]):
    """A library that moves something else than rows of tokens, and knows what must have come."""

    @abstractmethod
    def wrong(self, z: torch.Tensor) -> list[str]:
        """What is wrong with the last combine."""


class PlansApart(ABC):
    """A library whose plan can be timed alone."""

    @abstractmethod
    def plan(self, step: int) -> None:
        """What a dispatch with fresh routing does before rows move."""


class FlexEP(Promising[Any], PlansApart):
    """A dispatcher of this package."""

    library = "flexep"
    exact = True

    def __init__(self, ctx: RankContext, case: BenchCase, dispatcher: str, steps: list[Routed]) -> None:
        self.dispatcher, self.wire, self.layout = dispatcher, case.dtype, case.layout
        self.mode, self.alignment = case.mode, case.alignment
        self.sms = case.num_sms if case.device == "cuda" and dispatcher in WINDOWED else None
        self.world = world = case.world
        self._ep = flexep.Dispatcher(
            ctx.group, num_experts=world.num_experts, hidden=world.hidden, top_k=world.top_k,
            max_tokens=world.max_tokens, backend=dispatcher, dtype=world.dtype, layout=world.layout,
            alignment=world.alignment, capacity=world.capacity, overflow="drop", placement=world.placement,
            domain_size=world.domain_size, timeout=TIMEOUT, num_sms=case.num_sms,
            send_ahead=case.send_ahead if dispatcher in WINDOWED else None,
        )  # fmt: skip
        self._steps = steps
        self._handles = [] if case.fresh else [self._plan(routed).handle for routed in steps]

    def _plan(self, routed: Routed) -> Any:
        return self._ep.dispatch(routed.x, routed.topk_idx, routed.weights)

    def plan(self, step: int) -> None:
        """Rows stay where they are, on every rank alike: a dispatch whose back end delivers none."""
        routed = self._steps[step]
        own = vars(self._ep._alive().backend)  # hides the method of its class for as long as this takes
        own["send_ahead"] = lambda _: None
        own["deliver"] = lambda *_, **__: Rows([routed.x[:0]], None)
        try:
            self._plan(routed)
        finally:
            del own["deliver"], own["send_ahead"]

    def dispatch(self, step: int) -> Any:
        routed = self._steps[step]
        if not self._handles:
            return self._plan(routed)
        return self._ep.dispatch(routed.x, topk_weights=routed.weights, handle=self._handles[step])

    def combine(self, y: torch.Tensor, delivered: Any) -> torch.Tensor:
        weights = None if self.layout == "flat" else delivered.weights
        return self._ep.combine(y, delivered.handle, weights, y_layout=self.layout)

    def sent(self) -> dict[str, Sent]:
        return {op: Sent(t.remote_bytes, t.logical_bytes) for op, t in self._ep.traffic.items()}

    def close(self) -> None:
        self._ep.destroy()
