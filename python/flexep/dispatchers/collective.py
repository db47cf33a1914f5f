"""Back ends over collectives: whole buffers travel, and what is done to rows is done beside the journey."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from flexep._native.plan import PlanTable
from flexep.config import DispatcherConfig
from flexep.dispatchers.backend import Backend, Delivered, Tensors
from flexep.group import Group
from flexep.ops.rows import dot_rows, gather_rows, reduce_rows
from flexep.transport.collectives import ReducingCollectives, make_collectives
from flexep.types import Route


class CollectiveBackend(Backend):
    """Composes `deliver` and `collect` from the row functors and the two steps that a subclass adds: `_bring`
    and `_send_home`."""

    collectives: ReducingCollectives

    def __init__(self, group: Group, config: DispatcherConfig, table: PlanTable) -> None:
        super().__init__(group, config, table)
        self.collectives = make_collectives(group, config.timeout)

    @abstractmethod
    def _bring(self, routes: Sequence[Route], rows: Tensors, op: str) -> list[torch.Tensor]:
        """[T, H] of every rank -> the delivered buffer that `Route.row_buffer` and `Route.flat_buffer`
        index."""

    @abstractmethod
    def _send_home(
        self,
        routes: Sequence[Route],
        partials: Tensors,
        group_dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str,
    ) -> list[torch.Tensor]:
        """Partial rows [P, H] -> [T, H]: per token the sum over ranks ascending (nested by domain),
        rounded."""

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
        buffers = self._bring(routes, rows, op)
        weights = [None for _ in routes] if row_weights is None else list(row_weights)
        arrived = [
            _arrive(buffer, route, weight, flat)
            for buffer, route, weight in zip(buffers, routes, weights, strict=True)
        ]
        if dot_with is None:
            return Delivered(arrived, None)
        return Delivered(
            arrived,
            [
                dot_rows(other, buffer, route.row_buffer)
                for other, buffer, route in zip(dot_with, buffers, routes, strict=True)
            ],
        )

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
        weights = [None for _ in routes] if part_weights is None else list(part_weights)
        partials = [
            _partial(own, route, weight, group_dtype, flat)
            for own, route, weight in zip(rows, routes, weights, strict=True)
        ]
        return self._send_home(routes, partials, group_dtype, out_dtype, op)

    def _add_home(
        self, home: torch.Tensor, route: Route, group_dtype: torch.dtype, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """Adds each token's home-coming rows: flat, or with `domain_size` first inside each domain, rounded,
        then over."""
        size = self.config.domain_size
        if size is None:
            return reduce_rows(home, route.home_row, None, out_dtype, False)
        domain = route.home_rank.div(size, rounding_mode="floor")
        return reduce_rows(home, route.home_row, None, out_dtype, False, domain, group_dtype)


def _arrive(buffer: torch.Tensor, route: Route, weights: torch.Tensor | None, flat: bool) -> torch.Tensor:
    """Rows of the delivered buffer in a layout, times `weights` (expert-major rows only)."""
    if not flat:
        return gather_rows(buffer, route.row_buffer, weights)
    return buffer if route.flat_buffer is None else gather_rows(buffer, route.flat_buffer)


def _partial(
    rows: torch.Tensor, route: Route, weights: torch.Tensor | None, dtype: torch.dtype, flat: bool
) -> torch.Tensor:
    """Rows in a layout -> one partial row per received token, rounded to `dtype`."""
    if not flat:
        return reduce_rows(rows, route.part_rows, weights, dtype, True)
    parts = rows if route.part_flat is None else gather_rows(rows, route.part_flat)
    return parts.to(dtype)


def only_here(values_PK: torch.Tensor, part_rows_PK: torch.Tensor) -> torch.Tensor:
    """Per-slot values, +0 where the slot lives on another rank."""
    return torch.where(
        part_rows_PK >= 0, values_PK, torch.zeros((), dtype=values_PK.dtype, device=values_PK.device)
    )
