"""One-sided operations: csrc/kernels/host_exec.h on the CPU, device_exec.h on GPUs. Tensors in, addresses out.

Everything here is collective over the ranks of the windows and takes one item per hosted rank. On the CPU calls return
when the rank's own part is done. The GIL is released while they run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from flexep._native._load import _C
from flexep._native.one_sided_plan import RankPlan
from flexep._native.operands import CODES, address, enqueue
from flexep._native.plan import Counted
from flexep.errors import ArgumentError, WindowBroken, WindowBusy

Report = _C.Report  # what one operation did on one rank
Fault = _C.FaultRecord
MAX_CHUNKS: int = _C.MAX_CHUNKS  # of one operation
MOST_MAIL_SLICES: int = _C.MOST_MAIL_SLICES  # that exchange records
MAX_DEVICE_SLICES: int = _C.MAX_DEVICE_SLICES  # of a window in GPU memory
AHEAD_SMS: int = _C.AHEAD_SMS  # multiprocessors that must be free where rows are sent ahead


@dataclass(frozen=True, kw_only=True)
class WindowShape:
    """What fixes the layout of a window, the same on every rank; see csrc/proto/window.h.

    Attributes: `domain_size`: ranks that reach each other directly (all of them: one hop). `slices`: parts that work
    side by side, with words and rings of their own. `slots`: chunks a ring of a slice holds. `pull_tokens`,
    `push_tokens`: tokens of a chunk. `*_row_bytes`: multiples of 16. `mail_bytes`: bytes of a chunk of records.
    `board_ints`: integers a rank may publish at once. `registered_rows`: rows of x for zero copy. `landed_rows`:
    rows of x that each peer sends ahead of a plan; 0: rows are pulled. Raises ArgumentError for landed rows in a window
    of several domains.
    """

    ranks: int
    domain_size: int
    slices: int
    slots: int
    pull_tokens: int
    push_tokens: int
    pull_row_bytes: int
    push_row_bytes: int
    mail_bytes: int
    board_ints: int
    registered_rows: int
    landed_rows: int

    def __post_init__(self) -> None:
        if self.landed_rows and self.domain_size != self.ranks:
            raise ArgumentError("landed_rows", self.landed_rows, "0 where rows take two hops")

    @property
    def native(self) -> _C.WindowShape:
        """The compiled module's own."""
        return _C.WindowShape(**{f.name: getattr(self, f.name) for f in fields(self)})

    @property
    def nbytes(self) -> int:
        """Bytes of one rank's window."""
        return self.native.bytes

    @property
    def registered_at(self) -> int:
        """Where the registered rows begin in a window."""
        return self.native.registered_at


class Arrivals(NamedTuple):
    """Received rows in (source rank, source token) order. int32, contiguous, on the CPU.

    token [received or more], base [R + 1], rows [received or more, K]: see csrc/kernels/args.h.
    """

    token: torch.Tensor
    base: torch.Tensor
    rows: torch.Tensor

    @property
    def native(self) -> _C.Arrivals:
        return _C.Arrivals(
            token=self.token.data_ptr(), base=self.base.data_ptr(), rows=self.rows.data_ptr(),
            top_k=self.rows.shape[1],
        )  # fmt: skip


class Relayed(NamedTuple):
    """What a relay hands on: token [relayed], base [D + 1], members [relayed, K]; int32."""

    token: torch.Tensor
    base: torch.Tensor
    members: torch.Tensor


_NOTHING_RELAYED = _C.Relayed(token=0, base=0, members=0)


def _relayed(relayed: Relayed | None) -> _C.Relayed:
    if relayed is None:
        return _NOTHING_RELAYED
    return _C.Relayed(
        token=relayed.token.data_ptr(), base=relayed.base.data_ptr(), members=relayed.members.data_ptr()
    )


class Deliver(NamedTuple):
    """One rank's part of a delivery. `out` is written whole: [rows, H], x's dtype. With `dot_with`, `dots` too.

    `registered`: int32 [R], 1 for ranks whose x is the registered rows of their window. `read_by`: int32 [T, K], ranks
    that read a token's row, ascending, then -1, so that rows that stay need not be offered; None: any rank may, and
    always over relays.
    """

    tokens_of: torch.Tensor
    x: torch.Tensor
    registered: torch.Tensor
    read_by: torch.Tensor | None
    arrivals: Arrivals
    relayed: Relayed | None
    out: torch.Tensor
    flat: bool
    row_src: torch.Tensor
    weights: torch.Tensor | None
    dot_with: torch.Tensor | None
    dots: torch.Tensor | None

    @property
    def native(self) -> _C.DeliverArgs:
        return _C.DeliverArgs(
            tokens_of=self.tokens_of.data_ptr(), x=self.x.data_ptr(), registered=self.registered.data_ptr(),
            read_by=address(self.read_by), arrivals=self.arrivals.native, relayed=_relayed(self.relayed),
            out=self.out.data_ptr(), num_rows=self.out.shape[0], flat=self.flat, row_src=self.row_src.data_ptr(),
            weights=address(self.weights), dot_with=address(self.dot_with), dots=address(self.dots),
            dtype=CODES[self.x.dtype], hidden=self.x.shape[1],
        )  # fmt: skip


class Collect(NamedTuple):
    """One rank's part of a collection: `y` rows home into `z` [T, H], which is written whole."""

    tokens_of: torch.Tensor
    y: torch.Tensor
    flat: bool
    part_weights: torch.Tensor | None
    arrivals: Arrivals
    relayed: Relayed | None
    home_rank: torch.Tensor
    nest: int
    z: torch.Tensor
    wire: torch.dtype

    @property
    def native(self) -> _C.CollectArgs:
        return _C.CollectArgs(
            tokens_of=self.tokens_of.data_ptr(), y=self.y.data_ptr(), flat=self.flat,
            part_weights=address(self.part_weights), arrivals=self.arrivals.native,
            relayed=_relayed(self.relayed), home_rank=self.home_rank.data_ptr(), nest=self.nest,
            z=self.z.data_ptr(), dtype=CODES[self.y.dtype], wire=CODES[self.wire],
            out_dtype=CODES[self.z.dtype], hidden=self.z.shape[1],
        )  # fmt: skip


class HostWindows:
    """Operations on mapped windows, and the state of the ranks that this process plays.

    The memory at `addresses` must be zeroed and must outlive this object. Calls raise WindowBusy while another one
    runs, and WindowBroken after one that failed or after `leave`.
    """

    def __init__(self, shape: WindowShape, addresses: Sequence[int], hosted: Sequence[int]) -> None:
        self._native = _C.HostWindows(shape.native, list(addresses), list(hosted))

    def publish(
        self, ints: Sequence[torch.Tensor], all_ints: Sequence[torch.Tensor], op: int, seconds: float
    ) -> list[Report]:
        """int32 [n] of each rank -> every rank's, into [R, n]."""
        with _named():
            return self._native.publish(_publish_args(ints, all_ints), op, seconds)

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_splits: Sequence[torch.Tensor],
        op: int,
        seconds: float,
    ) -> list[Report]:
        """Contiguous records [n, ...] in destination order into records in source order; splits are int32 [R]."""
        with _named():
            args = _record_args(sends, send_splits, recvs, recv_splits)
            return self._native.exchange_records(args, op, seconds)

    def plan(
        self, plans: Sequence[RankPlan], counts_op: int, records_op: int, seconds: float
    ) -> list[list[Report]]:
        """Runs plans; the reports of their messages, none of one that was not sent. No step follows one that failed."""
        with _named():
            return _C.plan_on_host(self._native, [p.native for p in plans], counts_op, records_op, seconds)

    def deliver(self, args: Sequence[Deliver], op: int, seconds: float, lanes: int) -> list[Report]:
        """Tokens to the rows of their experts, on `lanes` threads a rank where rows are placed."""
        with _named():
            return self._native.deliver([one.native for one in args], op, seconds, lanes)

    def collect(self, args: Sequence[Collect], op: int, seconds: float, lanes: int) -> list[Report]:
        """Experts' rows home."""
        with _named():
            return self._native.collect([one.native for one in args], op, seconds, lanes)

    def leave(self) -> None:
        """Tells peers that nothing more comes from here. Idempotent."""
        self._native.leave()

    @property
    def epoch(self) -> int:
        """Operations begun."""
        return self._native.epoch


class DeviceWindows:
    """The same operations on windows in GPU memory: each is enqueued on the current stream, and nothing waits for it.

    Args: `addresses`: [R], where each rank's zeroed window lies as `device` maps it; the memory outlives this object.
    `hosted`: the ranks that live on this GPU and are played here: one, or all. Tensors of every call must
    stay alive until the stream has passed it, which the caching allocator sees to.
    """

    def __init__(
        self,
        shape: WindowShape,
        addresses: Sequence[int],
        hosted: Sequence[int],
        device: torch.device,
    ) -> None:
        ranks, native = len(hosted), shape.native
        if ranks > _C.MAX_DEVICE_RANKS:
            raise ArgumentError("size", ranks, f"at most {_C.MAX_DEVICE_RANKS} ranks on one GPU")
        states = torch.zeros(_C.device_state_bytes(native, ranks), dtype=torch.uint8, device=device)
        # The GPU writes failures here and the host reads them, without waiting for anything.
        reports = torch.zeros(_C.device_report_bytes(ranks), dtype=torch.uint8, pin_memory=True)
        self.moved = torch.zeros((ranks, _C.MAX_DEVICE_OPS, 4), dtype=torch.int64, device=device)
        table = torch.tensor(list(addresses), dtype=torch.int64, device=device)
        self._kept = (states, reports, table)
        self._device = device
        self._hosted = ranks
        self._world = _C.DeviceWorld(
            shape=native, first_rank=hosted[0], hosted=ranks, windows=table.data_ptr(),
            states=states.data_ptr(), reports=reports.data_ptr(), moved=self.moved.data_ptr(),
        )  # fmt: skip
        self._ahead: _C.SendAhead | None = None
        if shape.landed_rows > 0:
            with torch.cuda.device(device):
                self._ahead = _C.SendAhead(self._world, list(addresses))

    def publish(
        self, ints: Sequence[torch.Tensor], all_ints: Sequence[torch.Tensor], op: int, seconds: float
    ) -> None:
        """See HostWindows."""
        self._enqueue(_C.device_publish, _publish_args(ints, all_ints), op, seconds)

    def count_and_publish(
        self, counted: Sequence[Counted], all_ints: Sequence[torch.Tensor], op: int, seconds: float
    ) -> None:
        """Runs the steps, and publishes what they say."""
        said = _publish_args([one.said for one in counted], all_ints)
        self._enqueue(_C.count_on_device, [one.step for one in counted], said, op, seconds)

    def exchange_records(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[torch.Tensor],
        recvs: Sequence[torch.Tensor],
        recv_splits: Sequence[torch.Tensor],
        op: int,
        seconds: float,
    ) -> None:
        """See HostWindows; splits are on the GPU."""
        args = _record_args(sends, send_splits, recvs, recv_splits)
        self._enqueue(_C.device_exchange_records, args, op, seconds)

    def plan(self, plans: Sequence[RankPlan], counts_op: int, records_op: int, seconds: float) -> None:
        """See HostWindows."""
        self._enqueue(_C.plan_on_device, [p.native for p in plans], counts_op, records_op, seconds)

    def send_ahead(self, rows: Sequence[torch.Tensor], op: int, seconds: float) -> None:
        """Sends contiguous x [T, H] of each hosted rank ahead of the next `deliver`. Windows with landed rows alone."""
        assert self._ahead is not None
        args = [_C.AheadArgs(x.data_ptr(), x.shape[0]) for x in rows]
        enqueue(self._ahead.start, self._device, args, op, seconds)

    def deliver(self, args: Sequence[Deliver], op: int, seconds: float) -> None:
        """See HostWindows; windows with landed rows want `send_ahead` before."""
        self._enqueue(_C.device_deliver, [one.native for one in args], op, seconds)
        self.join_ahead()

    def join_ahead(self) -> None:
        """Has the current stream wait until rows that were sent ahead are where they go, if some are not."""
        if self._ahead is not None:
            enqueue(self._ahead.join, self._device)

    def collect(self, args: Sequence[Collect], op: int, seconds: float) -> None:
        """See HostWindows."""
        self._enqueue(_C.device_collect, [one.native for one in args], op, seconds)

    def leave(self) -> None:
        """Tells peers that nothing more comes from here."""
        self._enqueue(_C.device_leave)

    def fault(self) -> Fault | None:
        """A failure that the GPU has reported so far."""
        for hosted in range(self._hosted):
            fault = _C.device_fault(self._world, hosted)
            if fault is not None:
                return fault
        return None

    def _enqueue(self, launch: Callable[..., None], *args: object) -> None:
        """On the current stream of the windows' GPU, whichever GPU is current."""
        enqueue(launch, self._device, self._world, *args)


def _publish_args(ints: Sequence[torch.Tensor], all_ints: Sequence[torch.Tensor]) -> list[_C.PublishArgs]:
    return [
        _C.PublishArgs(ints=one.data_ptr(), count=one.numel(), all=every.data_ptr())
        for one, every in zip(ints, all_ints, strict=True)
    ]


def _record_args(
    sends: Sequence[torch.Tensor],
    send_splits: Sequence[torch.Tensor],
    recvs: Sequence[torch.Tensor],
    recv_splits: Sequence[torch.Tensor],
) -> list[_C.RecordArgs]:
    return [
        _C.RecordArgs(
            send=send.data_ptr(), send_splits=to.data_ptr(), recv=recv.data_ptr(), recv_splits=come.data_ptr(),
            record_bytes=math.prod(send.shape[1:]) * send.element_size(),
        )
        for send, to, recv, come in zip(sends, send_splits, recvs, recv_splits, strict=True)
    ]  # fmt: skip


class _named:
    """Turns the compiled module's refusals into the package's."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, where: object) -> None:
        if isinstance(value, _C.WindowBusy):
            raise WindowBusy(str(value)) from None
        if isinstance(value, _C.WindowBroken):
            raise WindowBroken(str(value)) from None
