"""The arguments of a Dispatcher as one frozen value that validates itself and can be compared between
ranks."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from flexep.errors import ArgumentError

ROW_BYTES = 16  # a row must be a multiple of this many bytes
MAX_TOP_K = 32
MAX_SIZE = (
    2**24
)  # experts, hidden, alignment: far beyond use, and their products with rows stay inside int32 or are checked
MAX_TOKENS = 2**31 - 1
MAX_SECONDS = 1e9
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("expert_major", "flat")
OVERFLOWS = ("error", "drop")
REDUCTIONS = ("ordered", "fast")
# Rows are sent ahead where that takes little memory, where there are so many that two more streams are worth while, and
# where hardly one goes to a rank that does not need it: bytes, tokens, and the share of rows that a rank needs.
AHEAD_BYTES, AHEAD_TOKENS, AHEAD_NEEDED = 256 << 20, 1024, 0.7
WINDOWED = ("deepep", "hybridep")  # back ends whose ranks read and write each other's windows


@dataclass(frozen=True)
class Environment:
    """Every environment variable that FlexEP reads for itself, as it stands now: "1" is yes, "0", "" or unset no.

    Attributes:
        debug: FLEXEP_DEBUG. Calls on CUDA judge values as calls on the CPU do, with a host wait: expert ids outside
            [-1, E) and NaN weights raise ArgumentError. A graph that is being captured is not waited for.
        peer: FLEXEP_PEER. GPU processes may open windows in each other's memory, and `backend="auto"` tries them. More
            than two GPUs have not been tried.
    """

    debug: bool
    peer: bool

    @staticmethod
    def read() -> Environment:
        """Raises ArgumentError for any other value."""
        return Environment(debug=_switch("FLEXEP_DEBUG"), peer=_switch("FLEXEP_PEER"))


def needed_share(experts: int, held: int, top_k: int) -> float:
    """Probability that one of K choices falls on `held` of E experts, 1 - C(E - held, K) / C(E, K); K > E repeats
    experts."""
    if top_k > experts:
        return 1 - (1 - held / experts) ** top_k
    return 1 - math.comb(experts - held, top_k) / math.comb(experts, top_k)


def _switch(variable: str) -> bool:
    value = os.environ.get(variable, "")
    if value not in ("", "0", "1"):
        raise ArgumentError(variable, value, "0 or 1")
    return value == "1"


def as_tuple(name: str, value: Any) -> tuple[Any, ...] | None:
    """A sequence that is no string as a tuple, None as it is; else ArgumentError."""
    if value is None:
        return None
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ArgumentError(name, value, "None or a sequence")
    return tuple(value)


def _is_int(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Arguments of `flexep.Dispatcher`; see there. `num_ranks` is the group's size, `backend` the resolved
    name."""

    num_ranks: int
    num_experts: int
    hidden: int
    top_k: int
    max_tokens: int
    backend: str
    dtype: torch.dtype
    wire: str | None
    combine_wire: str | None
    domain_size: int | None
    layout: str
    alignment: int
    capacity: float | int | None
    overflow: str
    num_sms: int | None
    timeout: float
    placement: tuple[int, ...] | None
    reduction: str
    window_bytes: int | None = None
    zero_copy: bool = False
    send_ahead: bool | None = None
    debug: bool = (
        False  # Environment.debug when the dispatcher was made: ranks that wait to look must all do it
    )

    def __post_init__(self) -> None:
        for name, least, most in (
            ("num_experts", 1, MAX_SIZE),
            ("hidden", 1, MAX_SIZE),
            ("max_tokens", 0, MAX_TOKENS),
            ("alignment", 1, MAX_SIZE),
        ):
            value = getattr(self, name)
            self._require(name, _is_int(value, least) and value <= most, f"an integer from {least} to {most}")
        experts = max(1, -(-self.num_experts // self.num_ranks))
        padded = experts * self.alignment
        self._require(
            "alignment", padded <= MAX_TOKENS, f"padding of {experts} local experts below {MAX_TOKENS} rows"
        )
        self._require("top_k", _is_int(self.top_k, 1) and self.top_k <= MAX_TOP_K, f"1 to {MAX_TOP_K}")
        self._require("dtype", self.dtype in WIRES.values(), f"one of {', '.join(map(str, WIRES.values()))}")
        self._require(
            "hidden",
            self.row_bytes % ROW_BYTES == 0,
            f"rows of a multiple of {ROW_BYTES} bytes ({self.hidden} x {self.dtype} is {self.row_bytes})",
        )
        same = self.wire is None or (isinstance(self.wire, str) and WIRES.get(self.wire) == self.dtype)
        self._require("wire", same, f"None or the wire of the dispatcher's dtype, {self.dtype}")
        known = self.combine_wire is None or self.combine_wire in tuple(WIRES)
        self._require("combine_wire", known, f"None or one of {', '.join(WIRES)}")
        home_bytes = self.hidden * self.combine_dtype.itemsize
        self._require(
            "hidden",
            home_bytes % ROW_BYTES == 0,
            f"partial sums of a multiple of {ROW_BYTES} bytes (combine_wire {self.combine_wire}: {home_bytes})",
        )
        divides = self.domain_size is None or (
            _is_int(self.domain_size, 1) and self.num_ranks % self.domain_size == 0
        )
        self._require("domain_size", divides, f"None or a divisor of the {self.num_ranks} ranks")
        for name, values in (("layout", LAYOUTS), ("overflow", OVERFLOWS), ("reduction", REDUCTIONS)):
            self._require(name, getattr(self, name) in values, f"one of {', '.join(values)}")
        ordered = self.reduction == "ordered" or self.backend == "allgather"
        self._require("reduction", ordered, "'ordered': only the allgather back end has a fast reduction")
        flat_sum = self.reduction == "ordered" or self.domain_size is None
        self._require("reduction", flat_sum, "'ordered' with a domain_size: a fast sum has no order to nest")
        self._require("num_sms", self.num_sms is None or _is_int(self.num_sms, 1), "None or at least 1")
        number = isinstance(self.timeout, (int, float)) and not isinstance(self.timeout, bool)
        self._require("timeout", number and 0 < self.timeout <= MAX_SECONDS, "a positive number of seconds")
        self._require(
            "window_bytes",
            self.window_bytes is None or _is_int(self.window_bytes, 1),
            "None or an integer of at least 1",
        )
        self._require("zero_copy", isinstance(self.zero_copy, bool), "True or False")
        windowed = not self.zero_copy or self.backend in WINDOWED
        self._require("zero_copy", windowed, f"False: only {' and '.join(WINDOWED)} have a window")
        named = self.send_ahead is None or isinstance(self.send_ahead, bool)
        self._require("send_ahead", named, "None, True or False")
        windowed = not self.send_ahead or self.backend in WINDOWED
        self._require("send_ahead", windowed, f"None or False: only {' and '.join(WINDOWED)} have a window")
        whole = self.placement is None or all(_is_int(rank, 0) for rank in self.placement)
        self._require("placement", whole, "None or the rank of each expert")
        self._check_capacity()

    def _require(self, name: str, accepted: bool, expected: str) -> None:
        if not accepted:
            raise ArgumentError(name, getattr(self, name), expected)

    def _check_capacity(self) -> None:
        if self.capacity is None:
            return
        is_factor = isinstance(self.capacity, float) and 0 < self.capacity < math.inf
        self._require(
            "capacity",
            is_factor or _is_int(self.capacity, 1),
            "None, a positive factor (float) or a number of rows (int)",
        )
        most = self._most_local_experts()
        least, rows = most * self.alignment, self.capacity_rows
        self._require(
            "capacity",
            rows is not None and least <= rows <= MAX_TOKENS,
            f"{least} ({most} local experts x alignment {self.alignment}) to {MAX_TOKENS} rows, not {rows}",
        )

    def _most_local_experts(self) -> int:
        if self.placement is None:
            return -(-self.num_experts // self.num_ranks)
        return max(self.placement.count(rank) for rank in range(self.num_ranks))

    @property
    def capacity_rows(self) -> int | None:
        """Expert-major rows of a rank in static mode, padding included; None in exact mode."""
        if isinstance(self.capacity, float):
            return math.ceil(self.capacity * self.max_tokens * self.top_k)
        return self.capacity

    @property
    def needed(self) -> float:
        """Share of a rank's rows that one other rank needs, where experts are drawn evenly."""
        return needed_share(self.num_experts, max(1, self.num_experts // self.num_ranks), self.top_k)

    @property
    def leaving(self) -> float:
        """Share of a rank's rows that some other rank needs, where experts are drawn evenly and every rank has one."""
        held = max(1, self.num_experts // self.num_ranks)
        return needed_share(self.num_experts, self.num_experts - held, self.top_k)

    def sends_ahead(self, between_gpus: bool) -> bool:
        """Whether x goes to every peer before the plan, where rows take one hop: `send_ahead`; None: `between_gpus`
        (ranks are processes on GPUs), if the shape is worth it under even routing, and not where all streams of a GPU
        share one queue (CUDA_DEVICE_MAX_CONNECTIONS=1), in which the plan would wait for the copies."""
        R, T = self.num_ranks, self.max_tokens
        if self.send_ahead is not None or R == 1:
            return bool(self.send_ahead) and R > 1
        if not between_gpus or os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
            return False
        fits = (R - 1) * T * self.row_bytes <= AHEAD_BYTES
        return fits and T >= AHEAD_TOKENS and self.needed >= AHEAD_NEEDED

    @property
    def combine_dtype(self) -> torch.dtype:
        """How a partial sum travels: `combine_wire`, by default the dtype."""
        return self.dtype if self.combine_wire is None else WIRES[self.combine_wire]

    @property
    def row_bytes(self) -> int:
        """Bytes of one row of x."""
        return self.hidden * self.dtype.itemsize

    def as_text(self) -> dict[str, str]:
        """Every field as text, to be compared between ranks."""
        return {f.name: str(getattr(self, f.name)) for f in fields(self)}
