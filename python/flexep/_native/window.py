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
from flexep.types import Route

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


def route_lists(route: Route) -> _C.RouteLists:
    """What delivery and collection read of a one-sided route: csrc/kernels/args.h. Made once a route."""
    if route.lists is None:
        peers = route.one_sided
        assert peers is not None
        lists = _C.RouteLists(
            tokens_of=peers.tokens_of.data_ptr(), token=peers.recv_token.data_ptr(), base=peers.recv_base.data_ptr(),
            rows=route.part_rows.data_ptr(), top_k=route.part_rows.shape[1], row_src=route.row_src.data_ptr(),
            home_rank=route.home_rank.data_ptr(), relay_token=address(peers.relay_token),
            relay_base=address(peers.relay_base), relay_members=address(peers.relay_members),
        )  # fmt: skip
        object.__setattr__(route, "lists", lists)  # of the tensors, which stay
    return route.lists


class Deliver(NamedTuple):
    """One rank's part of a delivery. `out` is written whole: [rows, H], x's dtype. With `dot_with`, `dots` too.

    `registered`: int32 [R], 1 for ranks whose x is the registered rows of their window. `offers_all`: any rank may read
    any row of x, as always over relays; else those of `home_rank` do, and rows that stay need not be offered.
    """

    route: Route
    x: torch.Tensor
    registered: torch.Tensor
    offers_all: bool
    out: torch.Tensor
    flat: bool
    weights: torch.Tensor | None
    dot_with: torch.Tensor | None
    dots: torch.Tensor | None

    @property
    def native(self) -> _C.DeliverArgs:
        route, x, registered, offers_all, out, flat, weights, dot_with, dots = self
        return _C.DeliverArgs(
            route_lists(route), x.data_ptr(), registered.data_ptr(), offers_all, out.data_ptr(),
            route.num_flat if flat else route.num_rows, flat, address(weights), address(dot_with), address(dots),
            CODES[x.dtype], x.shape[1],
        )  # fmt: skip


class Collect(NamedTuple):
    """One rank's part of a collection: `y` rows home into `z` [T, H], which is written whole."""

    route: Route
    y: torch.Tensor
    flat: bool
    part_weights: torch.Tensor | None
    nest: int
    z: torch.Tensor
    wire: torch.dtype

    @property
    def native(self) -> _C.CollectArgs:
        route, y, flat, part_weights, nest, z, wire = self
        return _C.CollectArgs(
            route_lists(route), y.data_ptr(), flat, address(part_weights), nest, z.data_ptr(), CODES[y.dtype],
            CODES[wire], CODES[z.dtype], z.shape[1],
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

    def count_and_publish(self, counted: Sequence[Counted], op: int, seconds: float) -> list[Report]:
        """Counts slots and publishes what is said of them, every rank's into the room behind."""
        for one in counted:
            _C.count_slots(one.step, None)
        args = [
            _C.PublishArgs(ints=one.memory.data_ptr(), count=one.ends[0], all=one.room) for one in counted
        ]
        with _named():
            return self._native.publish(args, op, seconds)

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

    def count_and_publish(self, counted: Sequence[Counted], op: int, seconds: float) -> None:
        """See HostWindows; one launch."""
        self._enqueue(_C.count_on_device, _slots(counted, op), seconds)

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

    def count_and_plan(
        self,
        counted: Sequence[Counted],
        plans: Sequence[RankPlan],
        op: int,
        counts_op: int,
        records_op: int,
        seconds: float,
    ) -> None:
        """`count_and_publish`, then `plan`; of a single rank in one launch."""
        self._enqueue(
            _C.count_and_plan_on_device, _slots(counted, op), [p.native for p in plans], counts_op,
            records_op, seconds,
        )  # fmt: skip

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
        return _C.device_fault(self._world)

    def _enqueue(self, launch: Callable[..., None], *args: object) -> None:
        """On the current stream of the windows' GPU, whichever GPU is current."""
        enqueue(launch, self._device, self._world, *args)


def _slots(counted: Sequence[Counted], op: int) -> _C.SlotsToCount:
    return _C.SlotsToCount([one.step for one in counted], [one.room for one in counted], op)


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
