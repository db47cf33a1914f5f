"""One-sided operations over the windows of a group: who is told what, what was moved, and what a failure is called.

A Window is one dispatcher's: its memory, its epochs, its counters. Its operations are collective and take one item for
each hosted rank.
"""

from __future__ import annotations

import math
import os
import weakref
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from flexep._native import window as native
from flexep._native.window import Collect, Deliver, DeviceWindows, HostWindows, WindowShape
from flexep.errors import (
    ArgumentError,
    CollectiveMismatch,
    FlexEPError,
    PeerLost,
    Timeout,
    Unavailable,
    WindowBroken,
    WindowBusy,
)
from flexep.group import Group
from flexep.transport.collectives import Collectives, Traffic
from flexep.transport.window_memory import WindowMemory, open_windows

# Every operation that a window carries; its place here is the number that travels in the signals.
OPS = (
    "none",
    "header",  # of every call: ranks in different calls meet there, and say so
    "dispatch.counts",
    "dispatch.meta",
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

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        self.group = group
        self.shape = shape
        self.timeout = timeout

    @abstractmethod
    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """Contiguous int32 [n] of every rank, n at most `shape.board_ints` -> [R, n] on every rank."""

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

    @abstractmethod
    def close(self) -> None:
        """Leaves, and lets go of the memory. Idempotent, not collective."""

    def _check_board(self, ints: Sequence[torch.Tensor]) -> None:
        for one in ints:
            if one.numel() > self.shape.board_ints:
                raise ArgumentError(
                    "ints", one.numel(), f"at most {self.shape.board_ints} integers to publish"
                )

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


class HostWindow(Window):
    """Windows in the memory of this host: ranks are processes, or all in this one."""

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        super().__init__(group, shape, timeout)
        self._traffic: dict[str, Traffic] = defaultdict(Traffic)
        memory = open_windows(group, shape.nbytes, timeout)
        self._memory: WindowMemory | None = memory
        self._windows = HostWindows(shape, memory.addresses, group.hosted)
        # Also at interpreter exit: peers then need not wait for the deadline. Holds the memory until it has run.
        self._leave = weakref.finalize(self, _leave, self._windows, memory, os.getpid())

    @property
    def epoch(self) -> int:
        """Operations begun on this window."""
        return self._windows.epoch

    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        self._check_board(ints)
        out = [torch.empty((self.group.size, one.numel()), dtype=torch.int32) for one in ints]
        self._run(op, partial(self._windows.publish, ints, out), [one.numel() * 4 for one in ints])
        return out

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_R: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_R: Sequence[torch.Tensor],
        op: str,
    ) -> None:
        record_bytes = _record_bytes(sends[0])
        own = [int(to[rank]) * record_bytes for rank, to in zip(self.group.hosted, send_R, strict=True)]
        operation = partial(self._windows.exchange_records, sends, send_R, recvs, recv_R)
        self._run(op, operation, own, record_bytes)

    def deliver(self, args: Sequence[Deliver], op: str) -> None:
        row_bytes = [one.x.shape[1] * one.x.element_size() for one in args]
        operation = partial(self._windows.deliver, args, lanes=self._lanes())
        self._run(op, operation, self._own_rows([one.arrivals for one in args], row_bytes))

    def collect(self, args: Sequence[Collect], op: str) -> None:
        row_bytes = [one.z.shape[1] * one.wire.itemsize for one in args]
        operation = partial(self._windows.collect, args, lanes=self._lanes())
        self._run(op, operation, self._own_rows([one.arrivals for one in args], row_bytes))

    def registered(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        return self._registered(torch.from_numpy(self._alive().view(rank)), dtype)

    def traffic(self) -> dict[str, Traffic]:
        return dict(self._traffic)

    def raise_met(self) -> None:
        """Every operation has raised what it met."""

    def close(self) -> None:
        self._leave()
        self._memory = None

    def _alive(self) -> WindowMemory:
        """The memory, which the caller holds while it uses addresses: another thread may close the window."""
        if self._memory is None:
            raise WindowBroken("this window was closed")
        return self._memory

    def _lanes(self) -> int:
        return max(1, torch.get_num_threads() // len(self.group.hosted))

    def _own_rows(self, arrivals: Sequence[native.Arrivals], row_bytes: Sequence[int]) -> list[int]:
        """Bytes of the rows that each hosted rank gets from itself."""
        return [
            int(one.base[rank + 1] - one.base[rank]) * nbytes
            for one, rank, nbytes in zip(arrivals, self.group.hosted, row_bytes, strict=True)
        ]

    def _run(
        self,
        op: str,
        operation: Callable[..., list[native.Report]],
        own_bytes: Sequence[int],
        record_bytes: int = 0,
    ) -> None:
        """Runs one operation, counts what moved, and raises if some wait failed.

        own_bytes: what each hosted rank gives itself. record_bytes: bytes of a record, where several travel as one.
        """
        memory = self._alive()  # held to the end: another thread may close the window
        reports = operation(op=_number(op), seconds=self.timeout)
        del memory
        counter = self._traffic[op]
        counter.calls += 1
        for report, own in zip(reports, own_bytes, strict=True):
            moved = (report.moved.rows, report.moved.bytes, report.moved.rail_rows, report.moved.rail_bytes)
            _count(counter, moved, record_bytes)
            counter.logical_bytes += own
        for report in reports:
            if report.status != "arrived":
                raise self._error(report.status, report.fault)


class DeviceWindow(Window):
    """Windows in GPU memory: of ranks that live on one GPU, or of processes whose GPUs reach each other. Operations are
    enqueued on the current stream, and nothing waits."""

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        super().__init__(group, shape, timeout)
        memory = open_windows(group, shape.nbytes, timeout)
        self._memory: WindowMemory | None = memory
        self._windows = DeviceWindows(shape, memory.addresses, group.hosted, group.device)
        # Whatever stream the first operation is on, it finds zeros.
        torch.cuda.current_stream(group.device).synchronize()
        self._calls: dict[str, tuple[int, int]] = {}  # calls so far, and bytes of a record (0: rows)

    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        self._check_board(ints)
        self._begin(op, 0)
        out = [one.new_empty((self.group.size, one.numel())) for one in ints]
        self._windows.publish(ints, out, _number(op), self.timeout)
        return out

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_R: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_R: Sequence[torch.Tensor],
        op: str,
    ) -> None:
        self._begin(op, _record_bytes(sends[0]))
        self._windows.exchange_records(sends, send_R, recvs, recv_R, _number(op), self.timeout)

    def deliver(self, args: Sequence[Deliver], op: str) -> None:
        self._begin(op, 0)
        self._windows.deliver(args, _number(op), self.timeout)

    def collect(self, args: Sequence[Collect], op: str) -> None:
        self._begin(op, 0)
        self._windows.collect(args, _number(op), self.timeout)

    def registered(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        return self._registered(self._alive().view(rank), dtype)

    def traffic(self) -> dict[str, Traffic]:
        moved = self._windows.moved.sum(0).tolist()
        out = {}
        for op, (calls, record_bytes) in self._calls.items():
            out[op] = Traffic(calls=calls)
            _count(out[op], moved[_number(op)], record_bytes)
        return out

    def raise_met(self) -> None:
        fault = self._windows.fault()
        if fault is not None:
            raise self._error(fault.status, fault)

    def close(self) -> None:
        self._memory = None

    def _alive(self) -> WindowMemory:
        if self._memory is None:
            raise WindowBroken("this window was closed")
        return self._memory

    def _begin(self, op: str, record_bytes: int) -> None:
        self._alive()
        self.raise_met()
        self._calls[op] = (self._calls.get(op, (0, 0))[0] + 1, record_bytes)


def make_window(group: Group, shape: WindowShape, timeout: float) -> Window:
    """The windows of a group, collectively. Raises Unavailable where ranks cannot reach each other's memory."""
    if group.device.type != "cuda":
        return HostWindow(group, shape, timeout)
    if not torch.cuda.is_available():
        raise Unavailable(f"{group.device}: this torch sees no CUDA GPU")
    return DeviceWindow(group, shape, timeout)


class WindowCollectives(Collectives):
    """What dispatchers agree on and exchange beside rows, over a window."""

    def __init__(self, window: Window) -> None:
        super().__init__(window.group, window.timeout)
        self.window = window

    def counted(self) -> dict[str, Traffic]:
        return self.window.traffic()

    def to_host(self, received: torch.Tensor) -> torch.Tensor:
        """What a GPU has not received it has not written either: raises what the window has met."""
        host = received.cpu()
        self.window.raise_met()
        return host

    def all_gather(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        gathered = self.window.publish([t.contiguous().view(-1) for t in tensors], op)
        return [g.view(-1, *t.shape[1:]) for g, t in zip(gathered, tensors, strict=True)]

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
        op: str,
    ) -> list[torch.Tensor]:
        sends = [send.contiguous() for send in sends]
        device = self.group.device
        to, come = (
            [torch.tensor(splits, dtype=torch.int32, device=device) for splits in all_splits]
            for all_splits in (send_splits, recv_splits)
        )
        recvs = [
            send.new_empty((sum(splits), *send.shape[1:]))
            for send, splits in zip(sends, recv_splits, strict=True)
        ]
        self.window.exchange_records(sends, to, recvs, come, op)
        return recvs


def _record_bytes(records: torch.Tensor) -> int:
    return math.prod(records.shape[1:]) * records.element_size()


def _count(counter: Traffic, moved: Sequence[int], record_bytes: int) -> None:
    """Adds rows, bytes, rail rows and rail bytes; of records, which travel several as one, the records."""
    rows, nbytes, rail_rows, rail_bytes = moved
    counter.remote_rows += nbytes // record_bytes if record_bytes else rows
    counter.rail_rows += rail_bytes // record_bytes if record_bytes else rail_rows
    counter.remote_bytes += nbytes
    counter.rail_bytes += rail_bytes
    counter.logical_bytes += nbytes


def _number(op: str) -> int:
    return OPS.index("header" if op.endswith(".header") else op)


def _leave(windows: HostWindows, memory: WindowMemory, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves nothing: the windows are its parent's
        windows.leave()
    memory.close()
