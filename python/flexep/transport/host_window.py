"""Windows in host memory: ranks are processes, or all in this one. Operations return when they are done."""

from __future__ import annotations

import os
import weakref
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch

from flexep._native import window as native
from flexep._native.one_sided_plan import RankPlan
from flexep._native.plan import Counted
from flexep._native.window import Collect, Deliver, HostWindows, WindowShape
from flexep.group import Group
from flexep.transport._window import COUNTS, HEADER, RECORDS, Window, count, number_of, record_bytes_of
from flexep.transport.collectives import Traffic
from flexep.transport.window_memory import WindowMemory
from flexep.types import Route


class HostWindow(Window):
    """Windows in the memory of this host: ranks are processes, or all in this one."""

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        super().__init__(group, shape, timeout)
        self._traffic: dict[str, Traffic] = defaultdict(Traffic)
        memory = self._alive()
        self._windows = HostWindows(shape, memory.addresses, group.hosted)
        # Also at interpreter exit: peers then need not wait for the deadline. Holds the memory until it has run.
        self._leave = weakref.finalize(self, _leave, self._windows, memory, os.getpid())

    @property
    def epoch(self) -> int:
        """Operations begun on this window."""
        return self._windows.epoch

    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        for one in ints:
            self._check_board(one.numel())
        out = [torch.empty((self.group.size, one.numel()), dtype=torch.int32) for one in ints]
        self._run(op, partial(self._windows.publish, ints, out), [one.numel() * 4 for one in ints])
        return out

    def count_and_publish(self, counted: Sequence[Counted], op: str) -> None:
        for one in counted:
            self._check_board(one.ends[0])
        self._run(op, partial(self._windows.count_and_publish, counted), [one.ends[0] * 4 for one in counted])

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_R: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_R: Sequence[torch.Tensor],
        op: str,
    ) -> None:
        record_bytes = record_bytes_of(sends[0])
        own = [int(to[rank]) * record_bytes for rank, to in zip(self.group.hosted, send_R, strict=True)]
        operation = partial(self._windows.exchange_records, sends, send_R, recvs, recv_R)
        self._run(op, operation, own, record_bytes)

    def plan(self, plans: Sequence[RankPlan], counts: bool, counted: Sequence[Counted] = ()) -> None:
        if counted:
            self.count_and_publish(counted, HEADER)
        memory = self._alive()
        reports = self._windows.plan(plans, number_of(COUNTS), number_of(RECORDS), self.timeout)
        del memory
        if counts:
            own = [self.group.size * 4 for _ in reports[0]]  # nothing is said where nothing was dropped
            self._note(COUNTS, reports[0], own)
        record_bytes = plans[0].lists.layout.record_bytes
        own = [
            int(p.lists.tensor("send_R")[rank]) * record_bytes
            for rank, p in zip(self.group.hosted, plans, strict=True)
        ]
        self._note(RECORDS, reports[-1], own, record_bytes)

    def deliver(self, args: Sequence[Deliver], op: str) -> None:
        row_bytes = [one.x.shape[1] * one.x.element_size() for one in args]
        operation = partial(self._windows.deliver, args, lanes=self._lanes())
        self._run(op, operation, self._own_rows([one.route for one in args], row_bytes))

    def collect(self, args: Sequence[Collect], op: str) -> None:
        row_bytes = [one.z.shape[1] * one.wire.itemsize for one in args]
        operation = partial(self._windows.collect, args, lanes=self._lanes())
        self._run(op, operation, self._own_rows([one.route for one in args], row_bytes))

    def registered(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        return self._registered(torch.from_numpy(self._alive().view(rank)), dtype)

    def traffic(self) -> dict[str, Traffic]:
        return dict(self._traffic)

    def raise_met(self) -> None:
        """Every operation has raised what it met."""

    def _lanes(self) -> int:
        return max(1, torch.get_num_threads() // len(self.group.hosted))

    def _own_rows(self, routes: Sequence[Route], row_bytes: Sequence[int]) -> list[int]:
        """Bytes of the rows that each hosted rank gets from itself."""
        own = []
        for route, rank, nbytes in zip(routes, self.group.hosted, row_bytes, strict=True):
            assert route.one_sided is not None
            first, end = route.one_sided.recv_base[rank : rank + 2].tolist()
            own.append((end - first) * nbytes)
        return own

    def _run(
        self,
        op: str,
        operation: Callable[..., list[native.Report]],
        own_bytes: Sequence[int],
        record_bytes: int = 0,
    ) -> None:
        """Runs one operation; see `_note`."""
        memory = self._alive()  # held to the end: another thread may close the window
        reports = operation(op=number_of(op), seconds=self.timeout)
        del memory
        self._note(op, reports, own_bytes, record_bytes)

    def _note(
        self, op: str, reports: Sequence[native.Report], own_bytes: Sequence[int], record_bytes: int = 0
    ) -> None:
        """Counts what an operation moved, and raises if some wait failed.

        own_bytes: what each hosted rank gives itself. record_bytes: bytes of a record, where several travel as one.
        """
        counter = self._traffic[op]
        counter.calls += 1
        for report, own in zip(reports, own_bytes, strict=True):
            moved = (report.moved.rows, report.moved.bytes, report.moved.rail_rows, report.moved.rail_bytes)
            count(counter, moved, record_bytes)
            counter.logical_bytes += own
        for report in reports:
            if report.status != "arrived":
                raise self._error(report.status, report.fault)


def _leave(windows: HostWindows, memory: WindowMemory, pid: int) -> None:
    if os.getpid() == pid:  # a forked child leaves nothing: the windows are its parent's
        windows.leave()
    memory.close()
