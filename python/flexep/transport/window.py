"""One-sided operations over the windows of a group: who is told what, what was moved, and what a failure is called.

A Window is one dispatcher's: its memory, its epochs, its counters. Every method but `leave` and `close` is collective.
"""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Sequence

import torch

from flexep._native import window as native
from flexep._native.window import Collect, Deliver, HostWindows, WindowShape
from flexep.errors import ArgumentError, CollectiveMismatch, FlexEPError, PeerLost, Timeout, WindowBroken
from flexep.group import Group
from flexep.transport.collectives import Collectives, Traffic
from flexep.transport.windows import Windows, open_windows

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


class Window:
    """The windows of a group's ranks and the operations on them.

    Raises, from every operation: Timeout on all ranks that live when some wait passed its deadline, PeerLost when the
    awaited rank destroyed its dispatcher, CollectiveMismatch when it runs another operation, WindowBusy, WindowBroken.
    """

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        self.group = group
        self.shape = shape
        self.timeout = timeout
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)
        memory = open_windows(group, shape.nbytes, timeout)
        self._memory: Windows | None = memory
        self._windows = HostWindows(shape, memory.addresses, group.hosted)
        # Also at interpreter exit: peers then need not wait for the deadline. Holds the memory until it has run.
        self._leave = weakref.finalize(self, _leave, self._windows, memory, os.getpid())

    @property
    def name(self) -> str:
        """What the windows are made of: "shm" or "local"."""
        return self._alive().name

    @property
    def epoch(self) -> int:
        """Operations begun on this window."""
        return self._windows.epoch

    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """Contiguous int32 [n] of every rank, n at most `shape.board_ints` -> [R, n] on every rank."""
        memory, number = self._alive(), _number(op)
        for one in ints:
            if one.numel() > self.shape.board_ints:
                raise ArgumentError(
                    "ints", one.numel(), f"at most {self.shape.board_ints} integers to publish"
                )
        out = [torch.empty((self.group.size, one.numel()), dtype=torch.int32) for one in ints]
        reports = self._windows.publish(ints, out, number, self.timeout)
        self._settle(op, reports, [one.numel() * 4 for one in ints])
        del memory
        return out

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
        op: str,
    ) -> list[torch.Tensor]:
        """Records [sum(send_splits), ...] in destination order -> [sum(recv_splits), ...] in source order."""
        memory = self._alive()
        sends = [send.contiguous() for send in sends]
        to, come = (
            [torch.tensor(s, dtype=torch.int32) for s in splits] for splits in (send_splits, recv_splits)
        )
        recvs = [
            send.new_empty((sum(splits), *send.shape[1:]))
            for send, splits in zip(sends, recv_splits, strict=True)
        ]
        reports = self._windows.exchange_records(sends, to, recvs, come, _number(op), self.timeout)
        record = sends[0][:1].numel() or recvs[0][:1].numel()
        own = [
            splits[rank] * record * send.element_size()
            for rank, splits, send in zip(self.group.hosted, send_splits, sends, strict=True)
        ]
        self._settle(op, reports, own, record * sends[0].element_size())
        del memory
        return recvs

    def deliver(self, args: Sequence[Deliver], op: str) -> None:
        """Brings tokens to the rows of their experts, one part for each hosted rank."""
        memory = self._alive()
        reports = self._windows.deliver(args, _number(op), self.timeout, self._lanes())
        own = [
            self._own_rows(one.arrivals, rank) * one.x.shape[1] * one.x.element_size()
            for one, rank in zip(args, self.group.hosted, strict=True)
        ]
        self._settle(op, reports, own)
        del memory

    def collect(self, args: Sequence[Collect], op: str) -> None:
        """Brings experts' rows home, one part for each hosted rank."""
        memory = self._alive()
        reports = self._windows.collect(args, _number(op), self.timeout, self._lanes())
        own = [
            self._own_rows(one.arrivals, rank) * one.z.shape[1] * one.wire.itemsize
            for one, rank in zip(args, self.group.hosted, strict=True)
        ]
        self._settle(op, reports, own)
        del memory

    def registered(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        """[registered_rows, H]: the rows of x that live in a hosted rank's window."""
        begin = self.shape.registered_at
        nbytes = self.shape.registered_rows * self.shape.pull_row_bytes
        view = torch.from_numpy(self._alive().view(rank))[begin : begin + nbytes]
        return view.view(dtype).view(self.shape.registered_rows, -1)

    def close(self) -> None:
        """Leaves, and lets go of the memory. Idempotent, not collective."""
        self._leave()
        self._memory = None

    def _alive(self) -> Windows:
        """The memory, which the caller holds while it uses addresses: another thread may close the window."""
        if self._memory is None:
            raise WindowBroken("this window was closed")
        return self._memory

    def _lanes(self) -> int:
        return max(1, torch.get_num_threads() // len(self.group.hosted))

    def _own_rows(self, arrivals: native.Arrivals, rank: int) -> int:
        return int(arrivals.base[rank + 1] - arrivals.base[rank])

    def _settle(
        self, op: str, reports: Sequence[native.Report], own_bytes: Sequence[int], record_bytes: int = 0
    ) -> None:
        """Counts what moved; raises if some wait failed. `record_bytes`: bytes of a record, where several travel as
        one."""
        counter = self.traffic[op]
        counter.calls += 1
        for report, own in zip(reports, own_bytes, strict=True):
            moved = report.moved
            counter.remote_rows += moved.bytes // record_bytes if record_bytes else moved.rows
            counter.rail_rows += moved.rail_bytes // record_bytes if record_bytes else moved.rail_rows
            counter.remote_bytes += moved.bytes
            counter.rail_bytes += moved.rail_bytes
            counter.logical_bytes += moved.bytes + own
        for report in reports:
            if report.status != native.ARRIVED:
                raise self._error(report)

    def _error(self, report: native.Report) -> FlexEPError:
        fault = report.fault
        op, word = OPS[fault.op], native.WORDS[fault.word]
        if report.status == native.LEFT:
            return PeerLost(
                f"{op}: rank {fault.waiter} waits for rank {fault.awaited} (epoch {fault.epoch}, word {word}), "
                "which has destroyed its dispatcher or ended"
            )
        if report.status == native.MISMATCHED:
            theirs = OPS[fault.got & 0xFF]
            return CollectiveMismatch(
                f"epoch {fault.epoch}", {"operation": {op: [fault.waiter], theirs: [fault.awaited]}}
            )
        return Timeout(
            op, fault.waiter, (fault.awaited,), self.timeout, fault.epoch, word,
            _epoch_and_chunks(fault.want), _epoch_and_chunks(fault.got),
        )  # fmt: skip


class WindowCollectives(Collectives):
    """What dispatchers agree on and exchange beside rows, over a window."""

    def __init__(self, window: Window) -> None:
        super().__init__(window.group, window.timeout)
        self.window = window
        self.traffic = window.traffic

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
        return self.window.exchange_records(sends, send_splits, recv_splits, op)


def _number(op: str) -> int:
    return OPS.index("header" if op.endswith(".header") else op)


def _epoch_and_chunks(signal: int) -> tuple[int, int]:
    """See csrc/proto/signal.h."""
    return signal >> 28, (signal >> 8) & (2**20 - 1)


def _leave(windows: HostWindows, memory: Windows, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves nothing: the windows are its parent's
        windows.leave()
    memory.close()
