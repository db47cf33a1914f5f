"""Windows in GPU memory: ranks live on one GPU, or are processes whose GPUs reach each other. Nothing waits."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from contextlib import nullcontext, suppress

import torch

from flexep._native.one_sided_plan import RankPlan
from flexep._native.plan import Counted
from flexep._native.window import Collect, Deliver, DeviceWindows, WindowShape
from flexep.errors import WindowBroken
from flexep.group import Group
from flexep.transport._window import COUNTS, HEADER, RECORDS, Window, count, number_of, record_bytes_of
from flexep.transport.collectives import Traffic
from flexep.transport.gpu_memory import is_capturing
from flexep.transport.window_memory import WindowMemory


class DeviceWindow(Window):
    """Windows in GPU memory: of ranks that live on one GPU, or of processes whose GPUs reach each other. Operations are
    enqueued on the current stream, and nothing waits."""

    def __init__(self, group: Group, shape: WindowShape, timeout: float) -> None:
        super().__init__(group, shape, timeout)
        memory = self._alive()
        self._windows = DeviceWindows(shape, memory.addresses, group.hosted, group.device)
        # Whatever stream the first operation is on, it finds zeros.
        torch.cuda.current_stream(group.device).synchronize()
        self._is_ahead = False  # rows have been sent ahead, and no operation has begun since
        self._calls: dict[str, tuple[int, int]] = {}  # calls so far, and bytes of a record (0: rows)
        # Also at interpreter exit, as HostWindow does.
        told = None if group.is_local else self._windows
        self._leave = weakref.finalize(self, _leave, told, memory, group.device, os.getpid())

    def publish(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        for one in ints:
            self._check_board(one.numel())
        self._begin(op, 0)
        out = [one.new_empty((self.group.size, one.numel())) for one in ints]
        self._windows.publish(ints, out, number_of(op), self.timeout)
        self._is_ahead = False
        return out

    def count_and_publish(self, counted: Sequence[Counted], op: str) -> None:
        for one in counted:
            self._check_board(one.ends[0])
        self._begin(op, 0)
        self._windows.count_and_publish(counted, number_of(op), self.timeout)
        self._is_ahead = False

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_R: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_R: Sequence[torch.Tensor],
        op: str,
    ) -> None:
        self._begin(op, record_bytes_of(sends[0]))
        self._windows.exchange_records(sends, send_R, recvs, recv_R, number_of(op), self.timeout)

    def plan(self, plans: Sequence[RankPlan], counts: bool, counted: Sequence[Counted] = ()) -> None:
        for one in counted:
            self._check_board(one.ends[0])
        self._begin(RECORDS, plans[0].lists.layout.record_bytes)
        if counts:
            self._count(COUNTS, 0)
        messages = number_of(COUNTS), number_of(RECORDS), self.timeout
        if counted:
            self._count(HEADER, 0)
            self._windows.count_and_plan(counted, plans, number_of(HEADER), *messages)
            self._is_ahead = False
        else:
            self._windows.plan(plans, *messages)

    def send_ahead(self, rows: Sequence[torch.Tensor], op: str) -> None:
        self._alive()
        self.raise_met()
        if self._is_ahead:  # what is sent now would be taken for what was sent then
            raise WindowBroken(f"{op}: rows were sent ahead before, and no operation has followed")
        self._is_ahead = True
        self._windows.send_ahead(rows, number_of(op), self.timeout)

    def call_off(self) -> None:
        # Of a capture that failed, the error that it failed by says more.
        with suppress(ValueError) if is_capturing() else nullcontext():
            self._windows.join_ahead()

    def deliver(self, args: Sequence[Deliver], op: str) -> None:
        self._begin(op, 0)
        self._windows.deliver(args, number_of(op), self.timeout)
        self._is_ahead = False

    def collect(self, args: Sequence[Collect], op: str) -> None:
        self._begin(op, 0)
        self._windows.collect(args, number_of(op), self.timeout)

    def registered(self, rank: int, dtype: torch.dtype) -> torch.Tensor:
        return self._registered(self._alive().view(rank), dtype)

    def traffic(self) -> dict[str, Traffic]:
        moved = self._windows.moved.sum(0).tolist()
        out = {}
        for op, (calls, record_bytes) in self._calls.items():
            out[op] = Traffic(calls=calls)
            count(out[op], moved[number_of(op)], record_bytes)
        return out

    def raise_met(self) -> None:
        fault = self._windows.fault()
        if fault is not None:
            raise self._error(fault.status, fault)

    def _begin(self, op: str, record_bytes: int) -> None:
        self._alive()
        self.raise_met()
        self._count(op, record_bytes)

    def _count(self, op: str, record_bytes: int) -> None:
        self._calls[op] = (self._calls.get(op, (0, 0))[0] + 1, record_bytes)


def _leave(told: DeviceWindows | None, memory: WindowMemory, device: torch.device, pid: int) -> None:
    """Waits for the GPU, whatever streams it was used on, and tells the peers, if there are any."""
    if os.getpid() == pid and not is_capturing():
        with suppress(RuntimeError):  # a GPU that is lost tells nobody anything
            torch.cuda.synchronize(device)
            if told is not None:
                told.leave()
                torch.cuda.synchronize(device)
    memory.close()
