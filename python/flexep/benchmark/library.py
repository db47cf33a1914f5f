"""What is compared: every library is one class with dispatch, combine and counted bytes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Protocol

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


class Library(ABC):
    """One column of a run, in one rank. Construction, dispatch and combine are collective.

    Attributes: `world` is what it promises to deliver (the oracle checks that; None: `wrong` checks it); `library`,
    `dispatcher`, `wire`, `layout`, `mode`, `alignment`, `sms` (GPU multiprocessors that it takes, None: unknown) are
    printed with its numbers. `exact`: its sums have the bits of the recipe. `plans`: its plan can be timed alone.
    """

    library: str
    dispatcher: str
    wire: str
    layout: str
    mode: str
    alignment: int
    sms: int | None = None
    world: World | None
    exact = False
    plans = True

    @classmethod
    def why_not(cls, case: BenchCase) -> str | None:
        """Why it cannot run the case in this process, known before anything collective; None if it can."""
        return None

    def order(self, delivered: Delivered) -> torch.Tensor | None:
        """int64 [N]: for each row that the oracle expects the row of `delivered.x` that must hold it; None where both
        have one order."""
        return None

    def wrong(self, z: torch.Tensor) -> list[str]:
        """What is wrong with the last combine, where no oracle knows the answer."""
        raise NotImplementedError(f"{self.library} promises a world")

    @abstractmethod
    def plan(self, step: int) -> None:
        """What a dispatch with fresh routing does before rows move."""

    @abstractmethod
    def dispatch(self, step: int) -> Delivered:
        """Brings the tokens of `step` to their experts; plans anew unless the case says cached."""

    @abstractmethod
    def combine(self, y: torch.Tensor, delivered: Delivered) -> torch.Tensor:
        """Brings rows in the layout of `delivered.x` home and adds them: [T, H]."""

    @abstractmethod
    def sent(self) -> dict[str, Sent]:
        """By message; the part of the name before the first dot is the operation."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of memory. Not collective."""


class FlexEP(Library):
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
        )  # fmt: skip
        self._steps = steps
        self._handles = [] if case.fresh else [self._plan(routed).handle for routed in steps]

    def _plan(self, routed: Routed) -> Any:
        return self._ep.dispatch(routed.x, routed.topk_idx, routed.weights)

    def plan(self, step: int) -> None:
        """Rows stay where they are, on every rank alike: a dispatch whose back end delivers none."""
        routed = self._steps[step]
        own = vars(self._ep._alive().backend)  # hides the method of its class for as long as this takes
        own["deliver"] = lambda *_, **__: Rows([routed.x[:0]], None)
        try:
            self._plan(routed)
        finally:
            del own["deliver"]

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
