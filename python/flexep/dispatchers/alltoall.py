"""All-to-all of de-duplicated rows: every token crosses once to each rank that holds one of its experts.

Exact mode knows every size from the published counts (one host wait). Static mode gives every destination a
fixed split of the buffer, so no size is ever read; with `overflow="drop"` that is drop-and-pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexep._native.arrivals import Received, exact_sizes, receive_rows
from flexep._native.plan import (
    HEADER_INTS,
    Assigned,
    Counted,
    Resolved,
    assign_rows,
    compact_rows,
    invert_rows,
    resolve,
)
from flexep.dispatchers.backend import Planned, Published, Tensors, sent_tokens, slots_at_home
from flexep.dispatchers.collective import CollectiveBackend, only_here
from flexep.indexing import take_rows
from flexep.ops.rows import gather_rows
from flexep.types import MemoryPlan, Route


@dataclass(frozen=True)
class _Sizes:
    """Rows to and from each rank, and expert-major rows here."""

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    num_rows: int


class AllToAll(CollectiveBackend):
    """The portable baseline: runs wherever torch.distributed does."""

    name = "alltoall"

    @property
    def split(self) -> int | None:
        """Rows that a rank may send another in static mode; None in exact mode."""
        capacity = self.config.capacity_rows
        return None if capacity is None else min(self.config.max_tokens, capacity)

    @property
    def said_ints(self) -> int:
        return HEADER_INTS + self.table.num_experts + self.group.size

    @torch.no_grad()
    def plan(
        self, counted: Sequence[Counted], topk_weights: Tensors | None, published: Published
    ) -> list[Planned]:
        hosted, config = self.group.hosted, self.config
        assert published.ints is not None
        counts_RE = published.ints[:, HEADER_INTS : HEADER_INTS + self.table.num_experts]
        resolved = resolve(counts_RE, self.table, config.alignment, config.capacity_rows)
        sizes = [self._sizes(rank, published) for rank in hosted]
        weights = list(topk_weights) if topk_weights is not None else [None for _ in counted]
        assigned = [
            assign_rows(
                c, rank, resolved, self.table, num_send=sum(size.send_splits), split=self.split, records=True,
                weights_TK=w,
            )
            for c, rank, size, w in zip(counted, hosted, sizes, weights, strict=True)
        ]  # fmt: skip
        arrived = self.collectives.all_to_all(
            [a.meta for a in assigned if a.meta is not None],
            [s.send_splits for s in sizes], [s.recv_splits for s in sizes], "dispatch.meta",
        )  # fmt: skip
        return [
            self._planned(
                a, size, receive_rows(meta, config.top_k, size.num_rows, flat_weights=self._flat), resolved
            )
            for a, size, meta in zip(assigned, sizes, arrived, strict=True)
        ]

    def _planned(self, a: Assigned, size: _Sizes, received: Received, resolved: Resolved) -> Planned:
        flat_part, part_flat, num_flat = self._flat_rows(received.rows, size.num_rows)
        weights = received.weights
        if weights is not None and self._flat and flat_part is not None:
            weights = take_rows(weights, flat_part, 0.0)
        route = Route(
            num_tokens=a.slot_row.shape[0],
            num_rows=size.num_rows,
            num_flat=num_flat,
            part_rows=received.rows,
            row_src=received.row_src,
            row_buffer=received.row_src.div(self.config.top_k, rounding_mode="floor"),
            flat_buffer=flat_part,
            flat_part=flat_part,
            part_flat=part_flat,
            home_row=a.send_row,
            home_rank=a.send_rank,
            home_slot=a.slot_send,
            send_token=a.send_token,
            one_sided=None,
            send_splits=size.send_splits,
            recv_splits=size.recv_splits,
        )
        return Planned(route, resolved.kept_rows, weights)

    @property
    def _flat(self) -> bool:
        return self.config.layout == "flat"

    def _sizes(self, rank: int, published: Published) -> _Sizes:
        if self.split is not None:
            splits = (self.split,) * self.group.size
            assert self.config.capacity_rows is not None
            return _Sizes(splits, splits, self.config.capacity_rows)
        said, begin = published.host_ints, HEADER_INTS + self.table.num_experts
        assert said is not None, "exact mode reads the published integers on the host"
        sizes = exact_sizes(said, self.table, 0, self.config.alignment, rank)
        return _Sizes(tuple(said[rank, begin:].tolist()), tuple(said[:, begin + rank].tolist()), sizes.rows)

    def _flat_rows(
        self, part_rows: torch.Tensor, num_rows: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
        """flat -> partial row and back, and the number of flat rows. A static receive buffer has gaps to
        close."""
        if self.split is None:
            return None, None, part_rows.shape[0]
        num_flat = min(self.group.size * self.config.max_tokens, num_rows)
        flat_part, _ = compact_rows(part_rows, num_flat)
        return flat_part, invert_rows(flat_part[:, None], part_rows.shape[0]), num_flat

    def _bring(self, routes: Sequence[Route], rows: Tensors, op: str) -> list[torch.Tensor]:
        sends = [gather_rows(x, sent_tokens(route)) for x, route in zip(rows, routes, strict=True)]
        return self._there(routes, sends, op)

    def _send_home(
        self,
        routes: Sequence[Route],
        partials: Tensors,
        group_dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str,
    ) -> list[torch.Tensor]:
        return [
            self._add_home(home, route, group_dtype, out_dtype)
            for home, route in zip(self._back(routes, partials, op), routes, strict=True)
        ]

    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        sends = [
            take_rows(value, sent_tokens(route), 0.0) for value, route in zip(values, routes, strict=True)
        ]
        arrived = self._there(routes, sends, op)
        return [only_here(value, route.part_rows) for value, route in zip(arrived, routes, strict=True)]

    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        return slots_at_home(self._back(routes, values, op), routes)

    def _there(self, routes: Sequence[Route], sends: Tensors, op: str) -> list[torch.Tensor]:
        return self.collectives.all_to_all(
            sends, [r.send_splits for r in routes], [r.recv_splits for r in routes], op
        )

    def _back(self, routes: Sequence[Route], sends: Tensors, op: str) -> list[torch.Tensor]:
        return self.collectives.all_to_all(
            sends, [r.recv_splits for r in routes], [r.send_splits for r in routes], op
        )

    def memory_plan(self) -> MemoryPlan:
        config, R = self.config, self.group.size
        rows = R * (config.max_tokens if self.split is None else self.split)
        wire_bytes = config.hidden * max(config.dtype.itemsize, config.combine_dtype.itemsize)
        meta_bytes = 4 * (1 + 2 * config.top_k)
        return MemoryPlan(
            window_bytes=0,
            staging_bytes={
                "send rows": rows * wire_bytes,
                "received rows": rows * wire_bytes,
                "metadata": 2 * rows * meta_bytes,
            },
        )
