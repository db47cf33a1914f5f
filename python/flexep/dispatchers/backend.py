"""What a back end must do. Everything else (layouts, weights, gradients, errors) is the Dispatcher's and the
same for all."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexep._native.plan import PlanTable, Resolved
from flexep.config import DispatcherConfig
from flexep.group import Group
from flexep.ops.rows import reduce_rows
from flexep.transport.collectives import make_collectives
from flexep.types import MemoryPlan, Route

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Planned:
    """One rank's plan: its route, the layout of all ranks' rows, and the weights that arrived, fp32 [P, K],
    if any."""

    route: Route
    resolved: Resolved
    part_weights: torch.Tensor | None


@dataclass(frozen=True)
class Published:
    """Everybody's published integers, int32 [R, n], and the same and every rank's T on the host, unless
    static on CUDA."""

    ints: torch.Tensor
    host_ints: torch.Tensor | None
    num_tokens: list[int] | None


class Backend(ABC):
    """Moves rows between ranks. Every method is collective and takes one item per hosted rank.

    Row movement is two verbs: `deliver` brings every token to the ranks of its experts, `collect` brings
    partial rows home and adds them. Dispatch and combine backward deliver; combine and dispatch backward
    collect.
    """

    name: str

    def __init__(self, group: Group, config: DispatcherConfig, table: PlanTable) -> None:
        self.group = group
        self.config = config
        self.table = table
        self.collectives = make_collectives(group, config.timeout)

    @abstractmethod
    def publish(self, topk_idx: torch.Tensor) -> torch.Tensor:
        """The integers that one rank tells the others before rows move: int32 [n], n the same on every
        rank."""

    @abstractmethod
    def plan(self, topk_idx: Tensors, topk_weights: Tensors | None, published: Published) -> list[Planned]:
        """Plans from the int32 [T, K] expert ids and fp32 [T, K] weights of the hosted ranks."""

    @abstractmethod
    def deliver(self, routes: Sequence[Route], rows: Tensors, op: str) -> list[torch.Tensor]:
        """[T, H] of every rank -> the delivered buffer that `Route.row_buffer` and `Route.flat_buffer`
        index."""

    @abstractmethod
    def collect(
        self,
        routes: Sequence[Route],
        partials: Tensors,
        group_dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str,
    ) -> list[torch.Tensor]:
        """Partial rows [P, H] -> [T, H]: per token the sum over ranks ascending (nested by domain),
        rounded."""

    @abstractmethod
    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        """fp32 [T, K] of every rank -> [P, K] beside the partial rows; 0 where the slot lives elsewhere."""

    @abstractmethod
    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        """fp32 [P, K] beside the partial rows -> [T, K]; 0 for empty and dropped slots."""

    @abstractmethod
    def memory_plan(self) -> MemoryPlan:
        """Bytes beside the caller's tensors, before anything is allocated."""

    def add_home(
        self, home: torch.Tensor, route: Route, group_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds each token's home-coming rows: flat, or with `domain_size` first inside each domain, rounded,
        then over."""
        size = self.config.domain_size
        if size is None:
            return reduce_rows(home, route.home_row, None, out_dtype, False)
        domain = route.home_rank.div(size, rounding_mode="floor")
        return reduce_rows(home, route.home_row, None, out_dtype, False, domain, group_dtype)


def only_here(values_PK: torch.Tensor, part_rows_PK: torch.Tensor) -> torch.Tensor:
    """Per-slot values, +0 where the slot lives on another rank."""
    return torch.where(
        part_rows_PK >= 0, values_PK, torch.zeros((), dtype=values_PK.dtype, device=values_PK.device)
    )
