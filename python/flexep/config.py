"""The arguments of a Dispatcher as one frozen value that validates itself and can be compared between ranks."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from flexep.errors import ArgumentError

ROW_BYTES = 16  # a row must be a multiple of this many bytes
MAX_TOP_K = 32
WIRES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
LAYOUTS = ("expert_major", "flat")
OVERFLOWS = ("error", "drop")
REDUCTIONS = ("ordered", "fast")


def _require(name: str, value: object, accepted: bool, expected: str) -> None:
    if not accepted:
        raise ArgumentError(name, value, expected)


def _is_int(value: object, at_least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= at_least


@dataclass(frozen=True, kw_only=True)
class DispatcherConfig:
    """Arguments of `flexep.Dispatcher`; see there. `num_ranks` is the group's size, `backend` the resolved name."""

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

    def __post_init__(self) -> None:
        for name, least in (("num_experts", 1), ("hidden", 1), ("max_tokens", 0), ("alignment", 1)):
            value = getattr(self, name)
            _require(name, value, _is_int(value, least), f"an integer of at least {least}")
        _require("top_k", self.top_k, _is_int(self.top_k, 1) and self.top_k <= MAX_TOP_K, f"1 to {MAX_TOP_K}")
        _require("dtype", self.dtype, self.dtype in WIRES.values(), "torch.bfloat16, torch.float16 or torch.float32")
        row_bytes = self.hidden * self.dtype.itemsize
        _require("hidden", self.hidden, row_bytes % ROW_BYTES == 0,
                 f"rows of a multiple of {ROW_BYTES} bytes ({self.hidden} x {self.dtype} is {row_bytes} bytes)")  # fmt: skip
        _require("wire", self.wire, self.wire is None or WIRES.get(self.wire) == self.dtype,
                 f"None or the wire of the dispatcher's dtype, {self.dtype}")  # fmt: skip
        _require("combine_wire", self.combine_wire, self.combine_wire is None or self.combine_wire in WIRES,
                 f"None or one of {', '.join(WIRES)}")  # fmt: skip
        size = self.domain_size
        _require("domain_size", size, size is None or (_is_int(size, 1) and self.num_ranks % size == 0),
                 f"None or a divisor of the {self.num_ranks} ranks")  # fmt: skip
        _require("layout", self.layout, self.layout in LAYOUTS, f"one of {', '.join(LAYOUTS)}")
        _require("overflow", self.overflow, self.overflow in OVERFLOWS, f"one of {', '.join(OVERFLOWS)}")
        _require("reduction", self.reduction, self.reduction in REDUCTIONS, f"one of {', '.join(REDUCTIONS)}")
        _require("reduction", self.reduction, self.reduction == "ordered" or self.backend == "allgather",
                 "'ordered': only the allgather back end has a fast reduction")  # fmt: skip
        _require("num_sms", self.num_sms, self.num_sms is None or _is_int(self.num_sms, 1), "None or at least 1")
        _require("timeout", self.timeout, isinstance(self.timeout, (int, float)) and 0 < self.timeout < math.inf,
                 "a positive number of seconds")  # fmt: skip
        self._check_capacity()

    def _check_capacity(self) -> None:
        capacity = self.capacity
        if capacity is None:
            return
        is_factor = isinstance(capacity, float) and 0 < capacity < math.inf
        _require("capacity", capacity, is_factor or _is_int(capacity, 1),
                 "None, a positive factor (float) or a number of rows (int)")  # fmt: skip
        held = [0] * self.num_ranks
        if self.placement is None:
            held = [self.num_experts // self.num_ranks + (r < self.num_experts % self.num_ranks) for r in range(self.num_ranks)]
        else:
            for rank in self.placement:
                if 0 <= rank < self.num_ranks:  # a rank outside is refused where the table is made
                    held[rank] += 1
        least = max(held) * self.alignment
        rows = self.capacity_rows
        assert rows is not None
        _require("capacity", capacity, least <= rows < 2**31,
                 f"at least {least} rows ({max(held)} local experts x alignment {self.alignment}), not {rows}")  # fmt: skip

    @property
    def capacity_rows(self) -> int | None:
        """Expert-major rows of a rank in static mode, padding included; None in exact mode."""
        if isinstance(self.capacity, float):
            return math.ceil(self.capacity * self.max_tokens * self.top_k)
        return self.capacity

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
