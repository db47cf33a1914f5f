"""Before rows move: check what a call was given, and let every rank learn whether any rank refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from flexep._native.plan import Counted
from flexep.config import LAYOUTS, DispatcherConfig
from flexep.dispatchers import _checks as checks
from flexep.dispatchers._agree import CALL_BITS, exchange_headers, header_of, stamp
from flexep.dispatchers.backend import Backend, Published
from flexep.errors import ArgumentError, FlexEPError, PeerRefused
from flexep.types import Handle

FP32 = (torch.float32,)


class Calls:
    """The checks of one dispatcher's calls.

    Between CPU processes, and in a fresh exact dispatch everywhere, a refusal on one rank is raised on all of them
    before rows move. The other calls on CUDA make nobody wait, so there a refusal is raised alone, and expert ids are
    masked and counted; unless FLEXEP_DEBUG=1, which makes them wait as the rest.
    """

    def __init__(self, backend: Backend, dispatcher_id: str) -> None:
        self.backend = backend
        self.group = backend.group
        self.config: DispatcherConfig = backend.config
        self.dispatcher_id = dispatcher_id
        # int64, of each hosted rank, to which captured dispatches add as well.
        self._masked: torch.Tensor | None = None
        self._masked_of: list[torch.Tensor | None] = [None] * len(self.group.hosted)
        if self.group.device.type == "cuda":
            self._masked = torch.zeros(len(self.group.hosted), dtype=torch.int64, device=self.group.device)
            self._masked_of = list(self._masked.unbind())
        self._is_static = self.config.capacity_rows is not None

    def masked_ids(self) -> int:
        """Expert ids that dispatches have masked. Waits for the device."""
        return 0 if self._masked is None else int(self._masked.sum())

    def _may_wait(self) -> bool:
        """Whether a call may look at values, and ranks agree on it, where nothing forces it to wait."""
        if self.group.device.type == "cpu":
            return True
        return self.config.debug and not torch.cuda.is_current_stream_capturing()

    def per_rank(self, name: str, value: Any) -> list[Any]:
        """An argument as one item for each hosted rank: a local group is given a list."""
        if not self.group.is_local:
            return [value]
        if isinstance(value, (list, tuple)) and len(value) == self.group.size:
            return list(value)
        got = type(value).__name__
        if isinstance(value, (list, tuple)):
            got = f"{got} of {len(value)}"
        raise ArgumentError(name, got, f"a list of {self.group.size}, one for each rank of the local group")

    def _each(self, check: Callable[[int], None]) -> None:
        """check(i) for every hosted rank; what a local group refuses says whose it was."""
        for i, rank in enumerate(self.group.hosted):
            try:
                check(i)
            except ArgumentError as error:
                if not self.group.is_local:
                    raise
                whose = f"{error.expected}; this is rank {rank}'s"
                raise ArgumentError(error.argument, error.value, whose) from None

    def dispatch(
        self, xs: list[Any], idxs: list[Any], weights: list[Any] | None
    ) -> tuple[list[Counted], Published]:
        """Checks a dispatch with fresh routing; returns the counted slots and what everybody said."""
        config, device = self.config, self.group.device
        read = not self._is_static or self._may_wait()

        def check(i: int) -> None:
            T = checks.check_x(xs[i], config, device).shape[0]
            checks.check_topk_idx(idxs[i], config, device, T)
            if weights is not None:
                checks.check_tensor("topk_weights", weights[i], (T, config.top_k), FP32, device)

        def check_values(i: int) -> None:
            checks.raise_bad_routing(idxs[i], None if weights is None else weights[i], config.num_experts)

        error = _error_of(self._each, check)
        if error is not None:
            if self.group.is_local or not read:
                raise error
            self._exchange("dispatch", self._saying("dispatch", error, 0), error)
        backend, bits, counted = self.backend, _bits(xs, weights), []
        for i, idx in enumerate(idxs):
            judged = weights[i] if weights is not None and read else None
            said = stamp("dispatch", idx.shape[0], bits, backend.in_window(i, xs[i]))
            # Ids are judged where they are, and the answer travels with the counts.
            masked = None if read else self._masked_of[i]
            counted.append(backend.count(idx, judged, said, masked, weights is not None))
        backend.send_ahead(xs)  # once there is memory for the rest: the exchange must follow
        if not read:
            (ints, *_) = backend.tell(counted, header_of("dispatch"), read=False)
            return counted, Published(ints, None, None, None)
        tell = partial(backend.tell, counted, read=True)
        return counted, self._exchange("dispatch", tell, None, lambda: self._each(check_values))

    def cached_dispatch(
        self, xs: list[Any], handles: list[Any], weights: list[Any] | None
    ) -> list[bool] | None:
        """Checks a dispatch through a handle; returns whose x is in its window, if that is known."""
        config, device = self.config, self.group.device

        def check(i: int) -> None:
            T = checks.check_handle(handles[i], self.dispatcher_id, self.group.hosted[i]).num_tokens
            checks.check_x(xs[i], config, device, T)
            if weights is not None:
                given = checks.check_tensor("topk_weights", weights[i], (T, config.top_k), FP32, device)
                if self._may_wait():
                    checks.raise_nan(given)

        bits = _bits(xs, weights) | CALL_BITS["cached handle"]
        return self._agree("dispatch", partial(self._each, check), bits, xs)

    def combine(self, ys: list[Any], handles: list[Any], weights: list[Any] | None, layout: str) -> None:
        """Checks a combine of rows in `layout`."""
        config, device, flat = self.config, self.group.device, layout == "flat"

        def check_rank(i: int) -> None:
            h = checks.check_handle(handles[i], self.dispatcher_id, self.group.hosted[i])
            rows = h.num_recv if flat else h.num_rows
            checks.check_rows("y", ys[i], (rows, config.hidden), config.dtype, device)
            if weights is not None:
                checks.check_tensor("weights", weights[i], self._weights_shape(h), FP32, device)

        def check() -> None:
            if layout not in LAYOUTS:
                raise ArgumentError("y_layout", layout, " or ".join(LAYOUTS))
            if flat and weights is not None:
                raise ArgumentError(
                    "weights", "given", "None: flat rows are sums, so weights come before them"
                )
            self._each(check_rank)

        self._agree("combine", check, _bits(ys, weights) | (CALL_BITS["flat rows"] if flat else 0))

    def refuse(self, call: str, error: FlexEPError) -> None:
        """Raises `error` here, and PeerRefused on the ranks that wait for this one."""

        def check() -> None:
            raise error

        self._agree(call, check, 0)

    def _weights_shape(self, handle: Handle) -> tuple[int, ...]:
        if self.config.layout == "flat":
            return (handle.num_recv, self.config.top_k)
        return (handle.num_rows,)

    def _agree(
        self, call: str, check: Callable[[], None], bits: int, xs: Sequence[torch.Tensor] = ()
    ) -> list[bool] | None:
        """Raises here what `check` raised on any rank; returns whose x is in its window, if that is known."""
        error = _error_of(check)
        if self.group.is_local or not self._may_wait():
            if error is not None:
                raise error
            return [self.backend.in_window(i, x) for i, x in enumerate(xs)] if self.group.is_local else None
        in_window = error is None and any(self.backend.in_window(0, x) for x in xs)
        return self._exchange(call, self._saying(call, error, bits, in_window), error).registered

    def _exchange(
        self,
        call: str,
        gather: Callable[[str], Sequence[torch.Tensor | None]],
        error: FlexEPError | None,
        find_error: Callable[[], None] | None = None,
    ) -> Published:
        """Exchanges headers. A rank that refused raises its own error: `error`, or what `find_error` finds."""
        try:
            return exchange_headers(self.backend.collectives, call, gather)
        except PeerRefused as refused:
            if error is not None:
                raise error from None
            if find_error is not None and set(refused.refused) & set(self.group.hosted):
                find_error()
            raise

    def _saying(
        self, call: str, error: FlexEPError | None, bits: int, in_window: bool = False
    ) -> Callable[[str], list[torch.Tensor]]:
        """Tells what a rank says that brings no tokens, as long as what those say that do."""
        said = torch.zeros(self.backend.said_ints, dtype=torch.int32, device=self.group.device)
        header = (int(error is not None), *stamp(call, 0, 0 if error else bits, in_window))
        said[: len(header)] = torch.tensor(header, dtype=torch.int32)
        return partial(self.backend.collectives.gather_ints, [said])


def _bits(rows: Sequence[Any], weights: Sequence[Any] | None) -> int:
    """What every rank must do alike, as CALL_BITS."""
    bits = CALL_BITS["x requires grad"] if _any_grad(rows) else 0
    if weights is not None:
        bits |= CALL_BITS["weights given"] | (CALL_BITS["weights require grad"] if _any_grad(weights) else 0)
    return bits


def _any_grad(values: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(getattr(value, "requires_grad", False) for value in values)


def _error_of(check: Callable[..., None], *of: object) -> FlexEPError | None:
    try:
        check(*of)
    except FlexEPError as error:
        return error
    return None
