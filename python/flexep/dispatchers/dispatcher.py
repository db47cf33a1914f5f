"""The Flex API: one Dispatcher over every back end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from flexep._native.plan import PlaceRows, PlanTable
from flexep.config import DispatcherConfig, Environment, as_tuple
from flexep.dispatchers._agree import agree_on_config
from flexep.dispatchers._autograd import Context, combine_rows, dispatch_rows
from flexep.dispatchers._calls import Calls
from flexep.dispatchers._results import make_handle, make_result
from flexep.dispatchers.allgather import AllGather
from flexep.dispatchers.alltoall import AllToAll
from flexep.dispatchers.auto import AUTO, first_choice, make_backend
from flexep.dispatchers.backend import Backend
from flexep.dispatchers.deepep import DeepEP
from flexep.dispatchers.hybridep import HybridEP
from flexep.errors import ArgumentError, CapacityExceeded, FlexEPError, HandleMismatch
from flexep.group import DEFAULT_TIMEOUT, Group
from flexep.transport.collectives import Traffic
from flexep.types import Handle, MemoryPlan

BACKENDS: dict[str, type[Backend]] = {
    backend.name: backend for backend in (AllGather, AllToAll, DeepEP, HybridEP)
}

_serial = itertools.count()
Tensors = list[torch.Tensor]


class Dispatcher:
    """Moves tokens to their experts and back: `dispatch`, then your experts, then `combine`. Differentiable.

    Construction is collective and checks that every rank passed the same arguments. On a local group every
    tensor argument is a list of R tensors, one a rank, and every result a list of R.

    Args:
        group: the ranks. num_experts: E over all ranks. hidden: H; a row must be a multiple of 16 bytes, of x and of
            what combine sends home. top_k: K, 1 to 32 slots a token. max_tokens: the most tokens a rank may pass to one
            dispatch.
        backend: "allgather", "alltoall", "deepep", "hybridep" or "auto": deepep where every rank reaches every
            other's memory (on the CPU, one host), else alltoall. `config.backend` says which it became.
        dtype: bfloat16, float16 or float32, of x, y and z.
        wire: how a row travels to its experts; None or the name of the dtype.
        combine_wire: how a partial sum travels home: "bf16", "fp16", "fp32"; None: as the dtype.
        domain_size: ranks per domain of the nested sum of combine; None: a flat sum.
        layout: "expert_major" (rows grouped by local expert, padded) or "flat" (a row per received token and
            an index map).
        alignment: rows of each local expert are padded to a multiple of this.
        capacity: None: exact sizes. float: a factor, ceil(capacity * max_tokens * top_k) expert-major rows a
            rank. int: that many rows. Padding counts. Sizes are static; the kept-set rule drops the rest.
        overflow: with a capacity, "error" (CapacityExceeded at the next call or at `check`) or "drop".
        num_sms: GPU multiprocessors for back ends with kernels of their own, at most; collectives ignore it. None: as
            many as write rows as fast as the link brings them. Where rows are sent ahead, 4 of a GPU must stay free
            of kernels that wait, those of other dispatchers too; a single dispatcher leaves them.
        timeout: seconds any wait on the CPU may take.
        placement: rank of each expert, length E; None: contiguous, the first E mod R ranks hold one more.
        window_bytes: budget for the rings of one-sided back ends, in bytes a rank; None: 32 MiB, 192 on a GPU. In a
            smaller one rows go in smaller chunks, and never in other bits. Rows sent ahead have room beside it.
        zero_copy: the windows also hold an x of max_tokens rows (`window_input`), which peers read where it lies,
            or which is sent ahead from there.
        send_ahead: the windows also have room for the x of every peer, (R - 1) * max_tokens rows. GPUs send all of x
            there by copy engines while the plan is made: no row waits for the plan, more rows cross, bits stay. Not
            over relays. None: where ranks are processes on GPUs, max_tokens >= 1024, the room is at most 256 MiB,
            and a rank needs at least 0.7 of all rows if routing is even.
        reduction: "ordered" (bitwise promise) or, for allgather, "fast" (reduce-scatter, no such promise).

    Raises:
        ArgumentError: an argument is out of range (on the ranks that passed it).
        PeerRefused: another rank's argument was. CollectiveMismatch: ranks passed different arguments.
        Unavailable: deepep or hybridep by name, where ranks cannot share memory.
    """

    def __init__(
        self,
        group: Group,
        *,
        num_experts: int,
        hidden: int,
        top_k: int,
        max_tokens: int,
        backend: str = "auto",
        dtype: torch.dtype = torch.bfloat16,
        wire: str | None = None,
        combine_wire: str | None = None,
        domain_size: int | None = None,
        layout: str = "expert_major",
        alignment: int = 16,
        capacity: float | int | None = None,
        overflow: str = "error",
        num_sms: int | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        placement: Sequence[int] | None = None,
        reduction: str = "ordered",
        window_bytes: int | None = None,
        zero_copy: bool = False,
        send_ahead: bool | None = None,
    ) -> None:
        config = table = error = None
        try:
            if backend not in (AUTO, *BACKENDS):
                raise ArgumentError("backend", backend, f"{AUTO}, {', '.join(BACKENDS)}")
            config = DispatcherConfig(
                num_ranks=group.size,
                num_experts=num_experts,
                hidden=hidden,
                top_k=top_k,
                max_tokens=max_tokens,
                backend=first_choice(group) if backend == AUTO else backend,
                dtype=dtype,
                wire=wire,
                combine_wire=combine_wire,
                domain_size=domain_size,
                layout=layout,
                alignment=alignment,
                capacity=capacity,
                overflow=overflow,
                num_sms=num_sms,
                timeout=timeout,
                placement=as_tuple("placement", placement),
                reduction=reduction,
                window_bytes=window_bytes,
                zero_copy=zero_copy,
                send_ahead=send_ahead,
                debug=Environment.read().debug,
            )
            table = PlanTable(num_experts, group.size, config.placement)
        except FlexEPError as refused:
            error = refused
        agree_on_config(group, config, error, config.timeout if config else DEFAULT_TIMEOUT)
        assert config is not None
        assert table is not None
        made = make_backend(BACKENDS, backend, group, config, table)
        self.group = group
        self.config = made.config
        self.table = table
        self._id = f"Dispatcher {next(_serial)} ({made.name}, rank {group.rank} of {group.size})"
        self._calls: Calls | None = Calls(made, self._id)
        # With them the rows of each place that the last dispatch dropped, until somebody has been told.
        self._untold: PlaceRows | None = None
        self._raises_overflow = config.capacity_rows is not None and config.overflow == "error"

    # -- calls

    def dispatch(self, x: Any, topk_idx: Any = None, topk_weights: Any = None, *, handle: Any = None) -> Any:
        """Brings every token to the ranks of its experts. Collective.

        Args:
            x: [T, H], contiguous, in the dispatcher's dtype. 0 <= T <= max_tokens; T may differ between
                ranks.
            topk_idx: int32 or int64 [T, K] expert ids, -1 an empty slot. A duplicate id is a slot of its own.
                Other ids are refused; a dispatch with a capacity on CUDA, which waits for nothing, takes them as
                -1 and counts them (`masked_ids`), unless FLEXEP_DEBUG=1.
            topk_weights: fp32 [T, K] or None. 0.0 is a weight, not an empty slot. NaN is refused where ids are.
            handle: instead of topk_idx, the handle of an earlier dispatch: its plan is used again with new x.

        Returns: DispatchResult (a list of R in a local group).
        Raises: ArgumentError, PeerRefused, CollectiveMismatch, HandleMismatch, CapacityExceeded (of the
            dispatch before), WindowBusy (another call is running), WindowBroken, Timeout, PeerLost.
        """
        backend = self._alive().backend
        with backend.one_at_a_time("dispatch"):
            try:
                return self._dispatch(x, topk_idx, topk_weights, handle)
            except BaseException:
                backend.call_off()
                raise

    def _dispatch(self, x: Any, topk_idx: Any, topk_weights: Any, handle: Any) -> Any:
        calls = self._begin("dispatch")
        if (topk_idx is None) == (handle is None):
            given = None if topk_idx is None else "given"
            calls.refuse("dispatch", ArgumentError("topk_idx", given, "exactly one of topk_idx and handle"))
        xs = calls.per_rank("x", x)
        weights = None if topk_weights is None else calls.per_rank("topk_weights", topk_weights)
        if handle is None:
            handles, row_weights, in_window = self._plan(
                calls, xs, calls.per_rank("topk_idx", topk_idx), weights
            )
        else:
            handles, row_weights = calls.per_rank("handle", handle), None
            in_window = calls.cached_dispatch(xs, handles, weights)
        flat = self.config.layout == "flat"
        routes = [h.route for h in handles]
        call = Context(calls.backend, self.config, routes, flat, in_window, sent_ahead=handle is None)
        if handle is not None and weights is not None:
            row_weights = self._send_weights(call, weights)
        out = dispatch_rows(call, row_weights, xs, weights or [])
        out_weights: Sequence[torch.Tensor | None] = out[len(xs) :] or [None] * len(xs)
        results = [make_result(h, r, w, flat) for h, r, w in zip(handles, out, out_weights, strict=False)]
        return results if self.group.is_local else results[0]

    def combine(self, y: Any, handle: Any, weights: Any = None, *, y_layout: str | None = None) -> Any:
        """Brings the experts' rows home and adds them, in the fixed order of docs/numerics.md. Collective.

        Args:
            y: the experts' output, contiguous, in the dispatcher's dtype. "expert_major": [handle.num_rows,
                H]. "flat": [handle.num_recv, H], already the caller's sum over the experts of this rank.
            handle: of the dispatch.
            weights: fp32 in the shape of `DispatchResult.weights`, multiplied here; None if y is weighted, or
                needs none.
            y_layout: layout of y; None: the dispatcher's.

        Returns: z [T, H] in the dispatcher's dtype (a list of R in a local group). A token with no kept row
            gets +0.
        Raises: as `dispatch`.
        """
        with self._alive().backend.one_at_a_time("combine"):
            return self._combine(y, handle, weights, y_layout)

    def _combine(self, y: Any, handle: Any, weights: Any, y_layout: str | None) -> Any:
        calls = self._begin("combine")
        layout = self.config.layout if y_layout is None else y_layout
        ys, handles = calls.per_rank("y", y), calls.per_rank("handle", handle)
        row_weights = None if weights is None else calls.per_rank("weights", weights)
        calls.combine(ys, handles, row_weights, layout)
        call = Context(calls.backend, self.config, [h.route for h in handles], layout == "flat")
        out = combine_rows(call, ys, row_weights)
        return list(out) if self.group.is_local else out[0]

    def window_input(self) -> Any:
        """[max_tokens, H] in this rank's window (a list of R in a local group): write x into its first T rows and pass
        that slice to `dispatch`, and peers read it where it lies. Needs `zero_copy=True`.

        The rows are the caller's again when `dispatch` returns. The tensor keeps the window's memory alive.
        Raises ArgumentError without zero_copy, Unavailable from a back end without windows.
        """
        tensors = self._alive().backend.window_input()
        return tensors if self.group.is_local else tensors[0]

    def check(self) -> None:
        """Raises CapacityExceeded if the last dispatch dropped rows under overflow="error", and what one-sided
        operations met on the device (Timeout). Waits for the device."""
        if self._calls is not None:
            self._calls.backend.check()
        untold, self._untold = self._untold, None
        rows = 0 if untold is None else int(untold.dropped_E.sum())
        if rows:
            assert self.config.capacity_rows is not None
            raise CapacityExceeded(rows, self.config.capacity_rows)

    @property
    def masked_ids(self) -> int:
        """Expert ids outside [-1, E) that dispatches of this process took as -1, so far. Waits for the device."""
        return self._alive().masked_ids()

    def memory_plan(self) -> MemoryPlan:
        """Bytes this dispatcher needs beside the caller's tensors, per rank, at max_tokens."""
        return self._alive().backend.memory_plan()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls, rows and bytes that left the ranks of this process, by message, since construction."""
        return self._alive().backend.collectives.counted()

    def destroy(self) -> None:
        """Lets go of everything. Safe to call twice; later calls raise, and handles become useless. Not
        collective."""
        calls, self._calls = self._calls, None
        self._untold = None
        if calls is not None:
            calls.backend.close()

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.destroy()

    # -- steps

    def _alive(self) -> Calls:
        if self._calls is None:
            raise HandleMismatch(f"{self._id} was destroyed")
        return self._calls

    def _begin(self, call: str) -> Calls:
        """The calls of a living dispatcher, once an overflow that nobody has been told of yet is raised."""
        calls = self._alive()
        if self.group.device.type == "cpu":  # on CUDA reading the flag is a host wait, left to `check`
            try:
                self.check()
            except CapacityExceeded as overflow:
                calls.refuse(call, overflow)  # a rank that has called `check` already waits for this one
        return calls

    def _plan(
        self, calls: Calls, xs: Tensors, idxs: Tensors, weights: Tensors | None
    ) -> tuple[list[Handle], Tensors | None, list[bool] | None]:
        """Handles of fresh routing, the weights that arrived with it, in this dispatcher's layout, and whose x is in
        its window."""
        counted, published = calls.dispatch(xs, idxs, weights)
        planned = calls.backend.plan(counted, weights, published)
        if self._raises_overflow:
            self._untold = planned[0].rows
        handles = [
            make_handle(p, self.table.places(rank), self._id, rank)
            for rank, p in zip(self.group.hosted, planned, strict=True)
        ]
        arrived = [p.weights for p in planned if p.weights is not None]
        return handles, arrived or None, published.registered

    def _send_weights(self, call: Context, weights: Tensors) -> Tensors:
        """Weights that travel alone, through handles, in this dispatcher's layout."""
        with torch.no_grad():
            arrived = call.backend.deliver_slots(call.routes, weights, "dispatch.weights")
            return [call.rows_from_slots(w, route) for w, route in zip(arrived, call.routes, strict=True)]


__all__ = ["BACKENDS", "Dispatcher"]
