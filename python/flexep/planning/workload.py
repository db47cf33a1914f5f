"""What is dispatched: shapes, wire, layout, routing, checked as a Dispatcher would check them."""

from __future__ import annotations

from dataclasses import dataclass

from flexep.config import WIRES as DTYPES
from flexep.config import DispatcherConfig
from flexep.errors import ArgumentError
from flexep.testing.case import Case
from flexep.testing.inputs import placement, rank_tokens
from flexep.testing.routing import ROUTERS


def _ceil(n: int, d: int) -> int:
    return -(-n // d)


# Bytes of a row of H elements on the wire, scales included.
WIRES = {
    "bf16": lambda H: 2 * H,
    "fp16": lambda H: 2 * H,
    "fp32": lambda H: 4 * H,
    "fp8": lambda H: H + 4 * _ceil(H, 128),
    "mxfp8": lambda H: H + _ceil(H, 32),
    "nvfp4": lambda H: _ceil(H, 2) + _ceil(H, 16),
}
SHORT = {"hot": "W1_hot_experts"} | {name.split("_")[0]: name for name in ROUTERS if name[0] == "W"}


@dataclass(frozen=True)
class Workload:
    """`config` holds the Dispatcher's arguments (max_tokens = T), `case` keys the routing, `wire` is how rows
    travel in dispatch. `dtype` is the dispatcher's, by name."""

    config: DispatcherConfig
    case: Case
    dtype: str
    wire: str

    @property
    def wire_bytes(self) -> int:
        """Bytes of a dispatched row."""
        return WIRES[self.wire](self.config.hidden)

    @property
    def home_bytes(self) -> int:
        """Bytes of a partial sum on its way home: never the dispatch wire."""
        return self.config.hidden * self.config.combine_dtype.itemsize

    @property
    def tokens_R(self) -> list[int]:
        """T of every rank under this routing."""
        return rank_tokens(self.case)

    @property
    def rank_of_expert(self) -> tuple[int, ...]:
        """Where each expert lives."""
        if self.config.placement is not None:
            return self.config.placement
        share, more = divmod(self.config.num_experts, self.config.num_ranks)
        return tuple(r for r in range(self.config.num_ranks) for _ in range(share + (r < more)))


def make_workload(
    *,
    ranks: int,
    domain_size: int,
    tokens: int,
    hidden: int,
    experts: int,
    top_k: int,
    dtype: str = "bf16",
    wire: str | None = None,
    layout: str = "expert_major",
    alignment: int = 16,
    capacity: float | int | None = None,
    routing: str = "uniform",
    seed: int = 0,
) -> Workload:
    """Checks every value. `routing` is a name of flexep.testing.routing, W0 to W7, or "hot" (W1).

    Raises ArgumentError naming the value.
    """
    wire = dtype if wire is None else wire
    if dtype not in DTYPES:
        raise ArgumentError("dtype", dtype, f"one of {', '.join(DTYPES)}")
    if wire not in WIRES or (wire in DTYPES and wire != dtype):
        quantised = [name for name in WIRES if name not in DTYPES]
        raise ArgumentError("wire", wire, f"{dtype} (the dtype) or one of {', '.join(quantised)}")
    routing = SHORT.get(routing, routing)
    if routing not in ROUTERS:
        raise ArgumentError("routing", routing, f"one of {', '.join([*SHORT, *ROUTERS])}")
    if tokens < 1:
        raise ArgumentError("tokens", tokens, "at least 1")
    case = Case(ranks, experts, hidden, top_k, tokens, seed=seed, routing=routing)
    config = DispatcherConfig(
        num_ranks=ranks,
        num_experts=experts,
        hidden=hidden,
        top_k=top_k,
        max_tokens=tokens,
        backend="alltoall",
        dtype=DTYPES[dtype],
        wire=None,
        combine_wire=None,
        domain_size=None if domain_size == ranks else domain_size,
        layout=layout,
        alignment=alignment,
        capacity=capacity,
        overflow="drop",
        num_sms=None,
        timeout=300.0,
        placement=placement(case),
        reduction="ordered",
    )
    return Workload(config, case, dtype, wire)
