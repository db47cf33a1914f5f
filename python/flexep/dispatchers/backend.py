"""What a back end must do. Everything else (layouts, weights, gradients, errors) is the Dispatcher's and the
same for all."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flexep._native.plan import Counted, PlaceRows, PlanTable, count_slots
from flexep.config import DispatcherConfig
from flexep.errors import Unavailable, WindowBusy
from flexep.group import Group
from flexep.indexing import take_slots
from flexep.transport.collectives import Collectives
from flexep.types import MemoryPlan, Route

Tensors = Sequence[torch.Tensor]


class Planned(NamedTuple):
    """One rank's plan: its route, how many rows each place has, and the weights that arrived, if any: fp32 in the
    dispatcher's layout, [rows] or flat [N, K]."""

    route: Route
    rows: PlaceRows
    weights: torch.Tensor | None


class Published(NamedTuple):
    """What everybody said, int32 [R, n], unless `tell` has left it to the back end; and on the host, unless static on
    CUDA, the same and what of it is in the headers."""

    ints: torch.Tensor | None
    host_ints: torch.Tensor | None
    num_tokens: list[int] | None
    registered: list[bool] | None  # whose x is in its window


class Delivered(NamedTuple):
    """What `deliver` brought, one item per hosted rank: rows at the experts, and their dot products if asked
    for."""

    rows: list[torch.Tensor]
    dots: list[torch.Tensor] | None


class _OneCall:
    """Holds a back end for one call."""

    __slots__ = ("_call", "_lock")

    def __init__(self, lock: threading.Lock, call: str) -> None:
        self._lock, self._call = lock, call

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            raise WindowBusy(f"{self._call}: another call of this dispatcher is running in another thread")

    def __exit__(self, *raised: object) -> None:
        self._lock.release()


class Backend(ABC):
    """Moves rows between ranks. `count`, `said_ints` and `memory_plan` concern one rank and `close` nobody else; every
    other method is collective and takes one item per hosted rank.

    Row movement is two verbs: `deliver` brings every token to the rows of its experts, `collect` brings the
    experts' rows home and adds them. Dispatch and combine backward deliver; combine and dispatch backward
    collect. Both verbs speak of the layout at the experts' side, `flat` or expert-major, so that a back end
    is free to expand, pad, weight, add and dot rows while they move. `op` names the message in counters and
    errors. Nothing here is differentiated: gradients are made of these verbs.

    `collectives` carries what ranks agree on before rows move; each kind of back end sets its own.
    """

    name: str
    collectives: Collectives

    def __init__(self, group: Group, config: DispatcherConfig, table: PlanTable) -> None:
        self.group = group
        self.config = config
        self.table = table
        self._calling = threading.Lock()

    @property
    @abstractmethod
    def said_ints(self) -> int:
        """Integers that every rank tells the others before rows move: HEADER_INTS and what this back end plans by."""

    @property
    def domains(self) -> int:
        """Domains that tokens leave for; 0 if they leave for ranks."""
        return 0

    def count(
        self,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        stamp: tuple[int, int, int, int],
        masked: torch.Tensor | None,
        has_weights: bool,
    ) -> Counted:
        """Counts the slots of one rank, or leaves that to `tell`; see `count_slots`. `weights` are those to be judged;
        has_weights: whether some will travel."""
        return count_slots(
            topk_idx, self.table, domains=self.domains, weights_TK=weights, stamp=stamp, masked=masked
        )

    def tell(self, counted: Sequence[Counted], op: str, *, read: bool) -> Sequence[torch.Tensor | None]:
        """What every rank says of its slots, int32 [R, said_ints], on every hosted rank. Unless it will be `read` here,
        a back end may return None, and tell it by its own `plan`."""
        return self.collectives.gather_ints([one.said for one in counted], op)

    def send_ahead(self, rows: Tensors) -> None:  # noqa: B027  (most back ends move rows by the plan)
        """Begins to move what a fresh dispatch will deliver, before anything is known of it."""

    def call_off(self) -> None:  # noqa: B027
        """What `send_ahead` began will not be delivered."""

    @abstractmethod
    def plan(
        self, counted: Sequence[Counted], topk_weights: Tensors | None, published: Published
    ) -> list[Planned]:
        """Plans from the counted slots and fp32 [T, K] weights of the hosted ranks. Nothing of it is differentiable."""

    @abstractmethod
    def deliver(
        self,
        routes: Sequence[Route],
        rows: Tensors,
        op: str,
        *,
        flat: bool,
        row_weights: Tensors | None = None,
        dot_with: Tensors | None = None,
        registered: Sequence[bool] | None = None,
        sent_ahead: bool = False,
    ) -> Delivered:
        """Contiguous [T, H] of every rank -> rows at the experts, in the same dtype: expert-major
        [num_rows, H], padding +0, or flat [N, H], tail +0.

        Args:
            row_weights: expert-major only, fp32 [num_rows]: each row is round(weight * row), the product taken
                in fp32.
            registered: ranks whose `rows` are in their window (see `window_input`); None: none of them.
            sent_ahead: whether `send_ahead` was given these rows.
            dot_with: expert-major only, [num_rows, H] in the dtype of `rows`: `dots` are then fp32
                [num_rows], the sum over h of dot_with[row, h] * row[h] before weights, 0 on padding, in the
                order of docs/numerics.md. Padding of `dot_with` is never read into a result.
        """

    @abstractmethod
    def collect(
        self,
        routes: Sequence[Route],
        rows: Tensors,
        op: str,
        *,
        flat: bool,
        part_weights: Tensors | None,
        group_dtype: torch.dtype,
        out_dtype: torch.dtype,
    ) -> list[torch.Tensor]:
        """Contiguous rows at the experts, in the layouts of `deliver`, -> [T, H] at home in `out_dtype`.

        Each rank makes a partial row per received token: of expert-major rows the sum in (expert, slot)
        order, times `part_weights`, fp32 [P, K] beside the partial rows, if given; a flat row is one already.
        Partial rows are rounded to `group_dtype`, then added by rank ascending (with `domain_size` first
        inside each domain, rounded to `group_dtype`, then over domains) and rounded. Tokens without a row get
        +0.
        """

    @abstractmethod
    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        """fp32 [T, K] of every rank -> [P, K] beside the partial rows; 0 where the slot lives elsewhere."""

    @abstractmethod
    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        """fp32 [P, K] beside the partial rows -> [T, K]; 0 for empty and dropped slots."""

    @abstractmethod
    def memory_plan(self) -> MemoryPlan:
        """Bytes beside the caller's tensors, before anything is allocated."""

    def one_at_a_time(self, call: str) -> _OneCall:
        """Holds this back end for one call; raises WindowBusy if another thread's call holds it."""
        return _OneCall(self._calling, call)

    def in_window(self, hosted: int, x: torch.Tensor) -> bool:
        """Whether x begins where the window's own rows of the `hosted`-th rank of this process do."""
        return False

    def window_input(self) -> list[torch.Tensor]:
        """[max_tokens, H] of each hosted rank, in memory from which peers read x without a copy."""
        raise Unavailable(f"{self.name} reads x wherever it is: only one-sided back ends have a window")

    def check(self) -> None:  # noqa: B027  (most back ends raise at once)
        """Waits for the device, and raises what operations so far have met there."""

    def close(self) -> None:  # noqa: B027  (most back ends have nothing to let go of)
        """Lets go of what peers can see of this rank. Not collective; called once, when the dispatcher is
        destroyed."""


def sent_tokens(route: Route) -> torch.Tensor:
    """int32 [sent]: the token of every row that this rank sends."""
    assert route.send_token is not None
    return route.send_token


def slots_at_home(home: Tensors, routes: Sequence[Route]) -> list[torch.Tensor]:
    """Per-slot values in home-coming buffers, [P, K] a hosted rank, -> [T, K]; 0 for empty and dropped slots."""
    return [take_slots(rows, route.home_slot) for rows, route in zip(home, routes, strict=True)]
