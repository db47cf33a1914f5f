"""One-sided operations over the windows of a group: who is told what, what was moved, and what a failure is called.

A Window is one dispatcher's: its memory, its epochs, its counters. Its operations are collective and take one item for
each hosted rank.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch

from flexep._native import window as native
from flexep._native.one_sided_plan import RankPlan
from flexep._native.plan import Counted
from flexep._native.window import Collect, Deliver, WindowShape
from flexep.errors import (
    ArgumentError,
    CollectiveMismatch,
    FlexEPError,
    PeerLost,
    Timeout,
    WindowBroken,
    WindowBusy,
)
from flexep.group import Group
from flexep.transport.collectives import HEADERS, Traffic
from flexep.transport.window_memory import WindowMemory, open_windows

HEADER = HEADERS["dispatch"]
COUNTS, RECORDS = "dispatch.counts", "dispatch.meta"  # the messages of a plan
# Every operation that a window carries; its place here is the number that travels in the signals.
OPS = (
    "none",
    "header",  # of every call: ranks in different calls meet there, and say so
    COUNTS,
    RECORDS,
    "dispatch.rail_meta",
    "dispatch.rows",
    "dispatch.weights",
    "dispatch.rail_weights",
    "combine.rows",
    "combine_backward.rows",
    "dispatch_backward.rows",
    "dispatch_backward.weights",
    "dispatch_backward.rail_weights",
)


class Window(ABC):
    """The windows of a group's ranks and the operations on them; every tensor is on the group's device.

    Raises, from every operation: Timeout on all ranks that live when some wait passed its deadline, PeerLost when the
    awaited rank destroyed its dispatcher, CollectiveMismatch when it runs another operation, WindowBusy, WindowBroken.
    Windows of a GPU raise what their last operations met at the next one, or at `check`.
    """

    _leave: Callable[[], object]  # tells peers and lets go of the memory, once; set by each kind of window

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        self.group = group
        self.shape = shape
        self.timeout = timeout
        self._memory: WindowMemory | None = open_windows(group, shape.nbytes, timeout, str(shape))

    @abstractmethod
    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """Contiguous int32 [n] of every rank, n at most `shape.board_ints` -> [R, n] on every rank."""

    @abstractmethod
    def count_and_publish(self, counted: Sequence[Counted], op: str) -> None:
        """Counts the slots of every hosted rank and publishes what is said of them, [R, n] into the room behind."""

    @abstractmethod
    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_R: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_R: Sequence[torch.Tensor],
        op: str,
    ) -> None:
        """Contiguous records [n, ...] in destination order into the first of `recvs` in source order.

        send_R, recv_R: int32 [R], records to and from each rank.
        """

    @abstractmethod
    def plan(self, plans: Sequence[RankPlan], counts: bool, counted: Sequence[Counted] = ()) -> None:
        """Runs one plan for each hosted rank and its messages: "dispatch.counts", if `counts`, and "dispatch.meta".

        Where no rank has dropped rows the first says nothing, and is counted as a call all the same. `counted`: slots
        of which nobody knows yet; `count_and_publish` of them comes first, as "dispatch.header".
        """

    def send_ahead(self, rows: Sequence[torch.Tensor], op: str) -> None:  # noqa: B027  (hosts send in `deliver`)
        """Begins to send contiguous x [T, H] of each hosted rank, for the next `deliver` of the same op. Windows with
        landed rows want it before every delivery, from every rank that takes part in it."""

    def call_off(self) -> None:  # noqa: B027
        """What `send_ahead` began will not be delivered: its x is the caller's again, in stream order."""

    @abstractmethod
    def deliver(self, args: Sequence[Deliver], op: str) -> None:
        """Brings tokens to the rows of their experts, one part for each hosted rank."""

    @abstractmethod
    def collect(self, args: Sequence[Collect], op: str) -> None:
        """Brings experts' rows home, one part for each hosted rank."""

    @abstractmethod
    def registered(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """[registered_rows, H]: the rows of x that live in a hosted rank's window."""

    @abstractmethod
    def traffic(self) -> dict[str, Traffic]:
        """What moved so far, by operation."""

    @abstractmethod
    def raise_met(self) -> None:
        """Raises what operations that have ended so far have met."""

    def check(self) -> None:
        """The same once the device has ended all of them."""
        if self.group.device.type == "cuda":
            torch.cuda.synchronize(self.group.device)
        self.raise_met()

    def close(self) -> None:
        """Leaves, and lets go of the memory. Idempotent, not collective."""
        self._leave()
        self._memory = None

    def _alive(self) -> WindowMemory:
        """The memory, which the caller holds while it uses addresses: another thread may close the window."""
        if self._memory is None:
            raise WindowBroken("this window was closed")
        return self._memory

    def _check_board(self, ints: int) -> None:
        if ints > self.shape.board_ints:
            raise ArgumentError("ints", ints, f"at most {self.shape.board_ints} integers to publish")

    def _registered(self, window: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        begin = self.shape.registered_at
        nbytes = self.shape.registered_rows * self.shape.pull_row_bytes
        return window[begin : begin + nbytes].view(dtype).view(self.shape.registered_rows, -1)

    def _error(self, status: str, fault: native.Fault) -> FlexEPError:
        op, word = OPS[fault.op], fault.word
        (want, want_chunks, _), (got, got_chunks, got_op) = fault.want, fault.got
        if status == "left":
            return PeerLost(
                f"{op}: rank {fault.waiter} waits for rank {fault.awaited} (epoch {fault.epoch}, word {word}), "
                "which has destroyed its dispatcher or ended"
            )
        if status == "mismatched":
            ours, theirs = f"{op} (epoch {fault.epoch})", f"{OPS[got_op]} (epoch {got})"
            return CollectiveMismatch(
                "window", {"operation": {ours: [fault.waiter], theirs: [fault.awaited]}}
            )
        if status == "busy":
            return WindowBusy(
                f"{op}: another operation ran on this window (epoch {fault.epoch}) at the same time"
            )
        if status == "failed":
            return PeerLost(f"{op}: rank {fault.waiter} cannot run it and has given up (epoch {fault.epoch})")
        return Timeout(
            op, fault.waiter, (fault.awaited,), self.timeout, fault.epoch, word,
            (want, want_chunks), (got, got_chunks),
        )  # fmt: skip


def record_bytes_of(records: torch.Tensor) -> int:
    return math.prod(records.shape[1:]) * records.element_size()


def count(counter: Traffic, moved: Sequence[int], record_bytes: int) -> None:
    """Adds rows, bytes, rail rows and rail bytes; of records, which travel several as one, the records."""
    rows, nbytes, rail_rows, rail_bytes = moved
    counter.remote_rows += nbytes // record_bytes if record_bytes else rows
    counter.rail_rows += rail_bytes // record_bytes if record_bytes else rail_rows
    counter.remote_bytes += nbytes
    counter.rail_bytes += rail_bytes
    counter.logical_bytes += nbytes


def number_of(op: str) -> int:
    return _NUMBERS[op]


_NUMBERS = {op: number for number, op in enumerate(OPS)}
_NUMBERS |= dict.fromkeys(HEADERS.values(), _NUMBERS["header"])
