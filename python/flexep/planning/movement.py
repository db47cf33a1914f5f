"""What one operation of one dispatcher moves, before any figure of the machine turns it into time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from flexep.planning.crossings import Crossings
from flexep.planning.load import Load
from flexep.planning.topology import Topology
from flexep.planning.workload import Workload


@dataclass(frozen=True)
class Pass:
    """Bytes that one step reads and writes in each rank's own memory, float64 [R], and in words."""

    name: str
    bytes_R: torch.Tensor
    formula: str


@dataclass(frozen=True)
class Movement:
    """One operation. `rows` are counted rows of `row_bytes`, `metadata` is bytes.

    hand_shakes: messages that wait for each other. fused: rows, metadata and passes overlap; otherwise they
    follow one another. plan_R: bytes of integers that the plan reads and writes on each rank.
    """

    rows: Crossings
    row_bytes: int
    metadata: Crossings
    passes: list[Pass]
    hand_shakes: int
    fused: bool
    rows_formula: str
    metadata_formula: str
    plan_R: torch.Tensor | None = None
    plan_formula: str = ""


@dataclass(frozen=True)
class Buffer:
    """Bytes of one buffer on the fullest rank: under this routing, and under the worst one at max_tokens.

    kind: "window" (peers see it), "staging" (the dispatcher's own, as in its memory plan), or "result" (what
    the caller gets: rows and handle).
    """

    name: str
    kind: str
    here: float
    worst: float


@dataclass(frozen=True)
class Pattern:
    """A dispatcher's traffic pattern on one load."""

    dispatch: Movement
    combine: Movement
    memory: list[Buffer] = field(default_factory=list)


class Scene:
    """A workload on a topology under a load, with the quantities that several patterns share."""

    def __init__(self, work: Workload, topology: Topology, load: Load) -> None:
        config = work.config
        self.work, self.topology, self.load = work, topology, load
        self.R, self.S = topology.ranks, topology.domain_size
        self.E, self.K = config.num_experts, config.top_k
        self.T_R = load.tokens_R
        self.wire, self.home = work.wire_bytes, work.home_bytes
        self.capacity = config.capacity_rows
        self.static = self.capacity is not None
        self.flat = config.layout == "flat"
        self.sent_R = load.crossing_RR.sum(1)  # distinct tokens, own rank included
        self.received_R = load.crossing_RR.sum(0)
        self.slot_meta = 4 * (1 + 2 * self.K)  # token, then row and weight of every slot

    @property
    def flat_static(self) -> int:
        """Static flat rows of a rank."""
        assert self.capacity is not None
        return min(self.R * self.work.config.max_tokens, self.capacity)

    def every(self, value: float) -> torch.Tensor:
        """The same on every rank."""
        return torch.full((self.R,), float(value), dtype=torch.float64)

    def cast(self) -> list[Pass]:
        """A pass over x where the wire is not the dtype and nothing else casts."""
        if self.wire == self.work.config.row_bytes:
            return []
        text = "cast: read T rows of the dtype, write T rows of the wire"
        return [Pass("cast", self.T_R * (self.work.config.row_bytes + self.wire), text)]

    def expand(self, rows_R: torch.Tensor) -> Pass:
        """Received rows to expert-major rows, padding included."""
        text = "(distinct received rows + expert-major rows with padding) x wire row"
        return Pass("expand", (rows_R + self.load.rows_R) * self.wire, text)

    def expert_reduce(self, rows_R: torch.Tensor) -> Pass:
        """Experts' rows to one partial sum a received token."""
        text = "(kept slots + partial sums of distinct received tokens) x home row"
        return Pass("expert reduce", (self.load.slots_R + rows_R) * self.home, text)

    def final_reduce(self) -> Pass:
        """Partial sums that came home to one row a token."""
        text = "(partial sums that came home, own rank's included, + T) x home row"
        return Pass("final reduce", (self.sent_R + self.T_R) * self.home, text)

    def plan_of_own(self, rows_R: torch.Tensor) -> tuple[torch.Tensor, str]:
        """Plan where each rank plans for its own tokens and sends metadata."""
        T, K = self.T_R, self.K
        ints = 9 * T * K + 2 * self.R * self.E + self.sent_R * (3 + 2 * K) + rows_R * K + self.load.rows_R
        return 4 * ints, "4 B x (9 TK + 2 RE + sent (3 + 2K) + received K + expert-major rows)"

    def results(self, received_worst: float) -> list[Buffer]:
        """What the caller gets: rows, and the handle's integers."""
        tokens, L = self.work.config.max_tokens, -(-self.E // self.R)
        held = torch.bincount(torch.tensor(self.work.rank_of_expert), minlength=self.R)
        L = max(L, int(held.max()))
        align = self.work.config.alignment
        worst = self.capacity or self.R * tokens * self.K + L * (align - 1)
        received_R = self.every(self.flat_static) if self.static else self.received_R
        rows_R = received_R if self.flat else self.load.rows_R
        rows_worst = received_worst if self.flat else worst
        ints_R = received_R * self.K + 2 * self.load.rows_R + 3 * self.T_R * self.K + self.sent_R
        ints_worst = received_worst * self.K + 2 * worst + 3 * tokens * self.K + tokens * min(self.K, self.R)
        return [
            Buffer("received rows (r.x)", "result", float(rows_R.max()) * self.wire, rows_worst * self.wire),
            Buffer("handle", "result", 4 * float(ints_R.max()), 4 * ints_worst),
        ]
