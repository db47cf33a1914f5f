"""All-to-all of de-duplicated rows: every token crosses once to each rank that holds one of its experts.

Exact mode knows every size from the published counts (one host wait). Static mode gives every destination a
fixed split of the buffer, so no size is ever read; with `overflow="drop"` that is drop-and-pad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexep._native.plan import assign_rows, compact_rows, count_slots, invert_rows, pack_meta, resolve
from flexep.dispatchers.backend import Planned, Published, Tensors, slots_at_home
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

    def publish(self, topk_idx: torch.Tensor) -> torch.Tensor:
        return torch.cat(count_slots(topk_idx, self.table))

    def plan(self, topk_idx: Tensors, topk_weights: Tensors | None, published: Published) -> list[Planned]:
        hosted = self.group.hosted
        counts_RE = published.ints[:, : self.table.num_experts].contiguous()
        resolved = resolve(counts_RE, self.table, self.config.alignment, self.config.capacity_rows)
        sizes = [self._sizes(rank, published) for rank in hosted]
        assigned = [
            assign_rows(idx, rank, resolved, self.table, num_send=sum(size.send_splits), split=self.split)
            for idx, rank, size in zip(topk_idx, hosted, sizes, strict=True)
        ]
        travelling = list(topk_weights) if topk_weights is not None else [None for _ in assigned]
        metas = [pack_meta(a, w) for a, w in zip(assigned, travelling, strict=True)]
        arrived = self.collectives.all_to_all(
            metas, [s.send_splits for s in sizes], [s.recv_splits for s in sizes], "dispatch.meta"
        )
        planned = []
        for a, size, meta in zip(assigned, sizes, arrived, strict=True):
            K = a.slot_row.shape[1]
            part_rows = meta[:, 1 : 1 + K].contiguous()
            row_src = invert_rows(part_rows, size.num_rows)
            flat_part, part_flat, num_flat = self._flat(part_rows, size.num_rows)
            route = Route(
                num_tokens=a.slot_row.shape[0],
                num_rows=size.num_rows,
                num_flat=num_flat,
                part_rows=part_rows,
                row_src=row_src,
                row_buffer=row_src.div(K, rounding_mode="floor"),
                flat_buffer=flat_part,
                flat_part=flat_part,
                part_flat=part_flat,
                home_row=a.send_row,
                home_rank=a.send_rank,
                home_slot=a.slot_send,
                send_token=a.send_token,
                send_splits=size.send_splits,
                recv_splits=size.recv_splits,
            )
            weights = meta[:, 1 + K :].contiguous().view(torch.float32) if topk_weights is not None else None
            planned.append(Planned(route, resolved, weights))
        return planned

    def _sizes(self, rank: int, published: Published) -> _Sizes:
        if self.split is not None:
            splits = (self.split,) * self.group.size
            assert self.config.capacity_rows is not None
            return _Sizes(splits, splits, self.config.capacity_rows)
        E, ints = self.table.num_experts, published.host_ints
        assert ints is not None, "exact mode reads the published integers on the host"
        rows_R = resolve(ints[:, :E].contiguous(), self.table, self.config.alignment, None).rows_R
        return _Sizes(tuple(ints[rank, E:].tolist()), tuple(ints[:, E + rank].tolist()), int(rows_R[rank]))

    def _flat(
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
        sends = [gather_rows(x, _send_token(route)) for x, route in zip(rows, routes, strict=True)]
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
            take_rows(value, _send_token(route), 0.0) for value, route in zip(values, routes, strict=True)
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


def _send_token(route: Route) -> torch.Tensor:
    assert route.send_token is not None
    return route.send_token
