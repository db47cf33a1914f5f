"""The Flex API: one Dispatcher over every back end."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch

from flexep._native.plan import PlanTable
from flexep.config import DispatcherConfig
from flexep.dispatchers import _checks as checks
from flexep.dispatchers._agree import CALL_BITS, Header, agree_on_config, exchange_headers
from flexep.dispatchers._autograd import CombineRows, Context, DispatchRows
from flexep.dispatchers.allgather import AllGather
from flexep.dispatchers.alltoall import AllToAll
from flexep.dispatchers.backend import Backend, Planned, Published
from flexep.errors import ArgumentError, CapacityExceeded, FlexEPError, HandleMismatch, PeerRefused
from flexep.group import DEFAULT_TIMEOUT, Group
from flexep.indexing import take_rows
from flexep.transport.collectives import Traffic
from flexep.types import HANDLE_VERSION, DispatchResult, Handle, MemoryPlan

BACKENDS: dict[str, type[Backend]] = {backend.name: backend for backend in (AllGather, AllToAll)}
AUTO = "alltoall"  # what "auto" picks; a choice of back end never changes bits

_serial = itertools.count()
Tensors = list[torch.Tensor]


class Dispatcher:
    """Moves tokens to their experts and back: `dispatch`, then your experts, then `combine`. Differentiable.

    Construction is collective and checks that every rank passed the same arguments. On a local group every
    tensor argument is a list of R tensors, one a rank, and every result a list of R.

    Args:
        group: the ranks. num_experts: E over all ranks. hidden: H; a row must be a multiple of 16 bytes.
        top_k: K, 1 to 32 slots a token. max_tokens: the most tokens a rank may pass to one dispatch.
        backend: "allgather", "alltoall" or "auto".
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
        num_sms: GPU multiprocessors for back ends with kernels of their own; collectives ignore it.
        timeout: seconds any wait on the CPU may take.
        placement: rank of each expert, length E; None: contiguous, the first E mod R ranks hold one more.
        reduction: "ordered" (bitwise promise) or, for allgather, "fast" (reduce-scatter, no such promise).

    Raises:
        ArgumentError: an argument is out of range (on the ranks that passed it).
        PeerRefused: another rank's argument was. CollectiveMismatch: ranks passed different arguments.
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
    ) -> None:
        config = table = error = None
        try:
            if backend != "auto" and backend not in BACKENDS:
                raise ArgumentError("backend", backend, f"auto, {', '.join(BACKENDS)}")
            config = DispatcherConfig(
                num_ranks=group.size,
                num_experts=num_experts,
                hidden=hidden,
                top_k=top_k,
                max_tokens=max_tokens,
                backend=AUTO if backend == "auto" else backend,
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
                placement=None if placement is None else tuple(placement),
                reduction=reduction,
            )
            table = PlanTable(num_experts, group.size, config.placement)
        except FlexEPError as refused:
            error = refused
        agree_on_config(group, config, error, config.timeout if config else DEFAULT_TIMEOUT)
        assert config is not None
        assert table is not None
        self.group = group
        self.config = config
        self.table = table
        self._id = f"Dispatcher {next(_serial)} ({config.backend}, rank {group.rank} of {group.size})"
        self._backend: Backend | None = BACKENDS[config.backend](group, config, table)
        self._dropped: torch.Tensor | None = (
            None  # rows dropped on all ranks by the last dispatch, if not yet reported
        )

    # -- calls

    def dispatch(self, x: Any, topk_idx: Any = None, topk_weights: Any = None, *, handle: Any = None) -> Any:
        """Brings every token to the ranks of its experts. Collective.

        Args:
            x: [T, H], contiguous, in the dispatcher's dtype. 0 <= T <= max_tokens; T may differ between
                ranks.
            topk_idx: int32 or int64 [T, K] expert ids, -1 an empty slot. A duplicate id is a slot of its own.
            topk_weights: fp32 [T, K] or None. 0.0 is a weight, not an empty slot. NaN is refused.
            handle: instead of topk_idx, the handle of an earlier dispatch: its plan is used again with new x.

        Returns: DispatchResult (a list of R in a local group).
        Raises: ArgumentError, PeerRefused, CollectiveMismatch, HandleMismatch, CapacityExceeded (of the
            dispatch before), Timeout, PeerLost.
        """
        backend = self._begin()
        if (topk_idx is None) == (handle is None):
            given = None if topk_idx is None else "given"

            def refuse() -> None:
                raise ArgumentError("topk_idx", given, "exactly one of topk_idx and handle")

            self._agree_or_check(backend, "dispatch", refuse, 0)
        xs = self._per_rank("x", x)
        weights = None if topk_weights is None else self._per_rank("topk_weights", topk_weights)
        if handle is None:
            planned = self._plan(backend, xs, self._per_rank("topk_idx", topk_idx), weights)
            handles = [self._handle(rank, p) for rank, p in zip(self.group.hosted, planned, strict=True)]
            part_weights = [p.part_weights for p in planned if p.part_weights is not None] or None
        else:
            handles, part_weights = self._cached(backend, xs, weights, self._per_rank("handle", handle))
        call = Context(backend, self.config, [h.route for h in handles], self.config.layout == "flat")
        out = DispatchRows.apply(call, part_weights, *xs, *(weights or []))
        n = len(xs)
        rows, row_weights = out[:n], out[n:] if weights is not None else [None] * n
        results = [self._result(h, r, w) for h, r, w in zip(handles, rows, row_weights, strict=True)]
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
        backend = self._begin()
        layout = self.config.layout if y_layout is None else y_layout
        ys = self._per_rank("y", y)
        row_weights = None if weights is None else self._per_rank("weights", weights)
        handles = self._per_rank("handle", handle)

        def check() -> None:
            if layout not in ("expert_major", "flat"):
                raise ArgumentError("y_layout", layout, "expert_major or flat")
            if layout == "flat" and row_weights is not None:
                raise ArgumentError(
                    "weights", "given", "None: flat rows are partial sums, so weights come before them"
                )
            for i, rank in enumerate(self.group.hosted):
                h = checks.check_handle(handles[i], self._id, rank)
                rows = h.num_recv if layout == "flat" else h.num_rows
                checks.check_tensor(
                    "y", ys[i], (rows, self.config.hidden), (self.config.dtype,), self.group.device
                )
                if row_weights is not None:
                    shape = (h.num_recv, self.config.top_k) if self.config.layout == "flat" else (h.num_rows,)
                    checks.check_tensor("weights", row_weights[i], shape, (torch.float32,), self.group.device)

        bits = _bits(ys, row_weights) | (CALL_BITS["flat rows"] if layout == "flat" else 0)
        self._agree_or_check(backend, "combine", check, bits)
        call = Context(backend, self.config, [h.route for h in handles], layout == "flat")
        out = CombineRows.apply(call, row_weights is not None, *ys, *(row_weights or []))
        return list(out) if self.group.is_local else out[0]

    def check(self) -> None:
        """Raises CapacityExceeded if the last dispatch dropped rows under overflow="error". Waits for the
        device."""
        dropped, self._dropped = self._dropped, None
        if dropped is not None and int(dropped):
            assert self.config.capacity_rows is not None
            raise CapacityExceeded(int(dropped), self.config.capacity_rows)

    def memory_plan(self) -> MemoryPlan:
        """Bytes this dispatcher needs beside the caller's tensors, per rank, at max_tokens."""
        return self._alive().memory_plan()

    @property
    def traffic(self) -> dict[str, Traffic]:
        """Calls, rows and bytes that left the ranks of this process, by message, since construction."""
        return dict(self._alive().collectives.traffic)

    def destroy(self) -> None:
        """Lets go of everything. Safe to call twice; later calls raise, and handles become useless. Not
        collective."""
        self._backend = None
        self._dropped = None

    def __enter__(self) -> Dispatcher:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, where: TracebackType | None
    ) -> None:
        self.destroy()

    # -- steps

    def _alive(self) -> Backend:
        if self._backend is None:
            raise HandleMismatch(f"{self._id} was destroyed")
        return self._backend

    def _begin(self) -> Backend:
        backend = self._alive()
        if (
            self.group.device.type == "cpu"
        ):  # on CUDA reading the flag would be a host wait: `check` reads it there
            self.check()
        return backend

    def _per_rank(self, name: str, value: Any) -> list[Any]:
        if not self.group.is_local:
            return [value]
        if not isinstance(value, (list, tuple)) or len(value) != self.group.size:
            got = (
                f"{type(value).__name__} of {len(value)}"
                if isinstance(value, (list, tuple))
                else type(value).__name__
            )
            raise ArgumentError(
                name, got, f"a list of {self.group.size}, one for each rank of the local group"
            )
        return list(value)

    def _plan(self, backend: Backend, xs: Tensors, idxs: Tensors, weights: Tensors | None) -> list[Planned]:
        config, device = self.config, self.group.device
        read = config.capacity_rows is None or device.type == "cpu"
        experts: Tensors = []

        def check() -> None:
            for i, x in enumerate(xs):
                T = checks.check_x(x, config, device).shape[0]
                experts.append(checks.check_topk_idx(idxs[i], config, device, T))
                if weights is not None:
                    checks.check_tensor(
                        "topk_weights", weights[i], (T, config.top_k), (torch.float32,), device
                    )

        def check_values() -> None:
            for i, idx in enumerate(idxs):
                checks.raise_bad_routing(idx, None if weights is None else weights[i], config.num_experts)

        error = _error_of(check)
        if error is None and device.type == "cpu":
            error = _error_of(check_values)
        if error is not None and (self.group.is_local or not read):
            raise error
        if error is None:
            bad = [
                checks.bad_routing(idx, None if weights is None else weights[i], config.num_experts)
                if read
                else False
                for i, idx in enumerate(experts)
            ]
            headers = [
                Header("dispatch", b, x.shape[0], _bits(xs, weights)) for b, x in zip(bad, xs, strict=True)
            ]
            payload = [backend.publish(idx) for idx in experts]
        else:  # take part in the exchange, so that the other ranks learn of it instead of waiting
            headers = [Header("dispatch", True, 0, 0)]
            payload = [self._nothing_published(backend)]
        published = self._exchange(backend, headers, payload, read, error, check_values)
        planned = backend.plan(experts, weights, published)
        if config.capacity_rows is not None and config.overflow == "error":
            self._dropped = planned[0].resolved.dropped_E.sum()
        return planned

    def _exchange(
        self,
        backend: Backend,
        headers: list[Header],
        payload: Tensors,
        read: bool,
        error: FlexEPError | None,
        find_error: Any = None,
    ) -> Published:
        try:
            return exchange_headers(backend.collectives, headers, payload, read)
        except PeerRefused as refused:
            if error is not None:
                raise error from None
            if find_error is not None and set(refused.refused) & set(self.group.hosted):
                find_error()
            raise

    def _agree_or_check(self, backend: Backend, call: str, check: Any, bits: int) -> None:
        """Checks arguments; between CPU processes every rank learns the outcome before rows move."""
        error = _error_of(check)
        if self.group.is_local or self.group.device.type != "cpu":
            if error is not None:
                raise error
            return
        header = Header(call, error is not None, 0, 0 if error else bits)
        self._exchange(backend, [header], [self._nothing_published(backend)], True, error)

    def _nothing_published(self, backend: Backend) -> torch.Tensor:
        """What a rank without tokens would publish: every exchange of headers has the same length."""
        no_slots = torch.empty((0, self.config.top_k), dtype=torch.int32, device=self.group.device)
        return backend.publish(no_slots)

    def _cached(
        self, backend: Backend, xs: Tensors, weights: Tensors | None, handles: list[Any]
    ) -> tuple[list[Handle], Tensors | None]:
        config, device = self.config, self.group.device

        def check() -> None:
            for i, rank in enumerate(self.group.hosted):
                T = checks.check_handle(handles[i], self._id, rank).num_tokens
                checks.check_x(xs[i], config, device, T)
                if weights is not None:
                    checks.check_tensor(
                        "topk_weights", weights[i], (T, config.top_k), (torch.float32,), device
                    )

        self._agree_or_check(backend, "dispatch", check, _bits(xs, weights) | CALL_BITS["cached handle"])
        if weights is None:
            return handles, None
        with torch.no_grad():
            return handles, backend.deliver_slots([h.route for h in handles], weights, "dispatch.weights")

    def _handle(self, rank: int, planned: Planned) -> Handle:
        route, resolved, places = planned.route, planned.resolved, self.table.places(rank)
        counts = resolved.kept_E[places]
        alignment = self.config.alignment
        padded = (counts + (alignment - 1)).div(alignment, rounding_mode="floor") * alignment
        flat_rows = (
            route.part_rows if route.flat_part is None else take_rows(route.part_rows, route.flat_part, -1)
        )
        return Handle(
            HANDLE_VERSION,
            self._id,
            rank,
            counts.clone(),
            padded,
            resolved.dropped_E[places].clone(),
            flat_rows,
            route,
        )

    def _result(self, handle: Handle, rows: torch.Tensor, weights: torch.Tensor | None) -> DispatchResult:
        flat = self.config.layout == "flat"
        return DispatchResult(
            x=rows,
            weights=weights,
            counts=handle.counts,
            padded_counts=handle.padded_counts,
            dropped=handle.dropped,
            handle=handle,
            expert_idx=_local_experts(handle) if flat else None,
            row_map=handle.row_map if flat else None,
        )


def _local_experts(handle: Handle) -> torch.Tensor:
    """int32 [N, K]: local expert of each slot of the flat rows, -1 empty: the segment that its row falls
    into."""
    ends = handle.padded_counts.cumsum(0)
    expert = torch.searchsorted(ends, handle.recv_rows.contiguous(), right=True).to(torch.int32)
    return torch.where(handle.recv_rows >= 0, expert, -1)


def _bits(rows: Sequence[Any], weights: Sequence[Any] | None) -> int:
    grad = torch.is_grad_enabled()
    bits = (
        CALL_BITS["x requires grad"] if grad and any(getattr(x, "requires_grad", False) for x in rows) else 0
    )
    if weights is not None:
        bits |= CALL_BITS["weights given"]
        if grad and any(getattr(w, "requires_grad", False) for w in weights):
            bits |= CALL_BITS["weights require grad"]
    return bits


def _error_of(check: Any) -> FlexEPError | None:
    try:
        check()
    except FlexEPError as error:
        return error
    return None


__all__ = ["AUTO", "BACKENDS", "Dispatcher"]
