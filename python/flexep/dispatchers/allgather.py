"""All-gather: every token goes to every rank, and each keeps what its experts need.

Each rank sees all expert ids, so it plans for every source alone and no metadata travels. Combine gathers
partial rows and adds them in rank order; `reduction="fast"` reduce-scatters them instead, outside the bitwise
promise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexep._native.plan import (
    HEADER_INTS,
    Assigned,
    Counted,
    Resolved,
    assign_rows,
    compact_rows,
    count_slots,
    invert_rows,
    resolve,
)
from flexep.dispatchers.backend import Planned, Published, Tensors, slots_at_home
from flexep.dispatchers.collective import CollectiveBackend, only_here
from flexep.indexing import take, take_rows
from flexep.ops.rows import gather_rows
from flexep.types import MemoryPlan, Route


@dataclass(frozen=True)
class _Everyone:
    """The plan of every rank, which each rank makes for itself.

    slot_row, slot_rank [R * most, K]: of all sources' tokens. sent_RR: tokens from each source to each rank. kept: flat
    rows of each rank. rows: its expert-major rows.
    """

    resolved: Resolved
    assigned: list[Assigned]
    slot_row: torch.Tensor
    slot_rank: torch.Tensor
    sent_RR: torch.Tensor
    kept: list[int]
    rows: list[int]


class AllGather(CollectiveBackend):
    """Right for small groups and large top-k, where most tokens go nearly everywhere anyway."""

    name = "allgather"

    @property
    def said_ints(self) -> int:
        return HEADER_INTS

    def tell(self, counted: Sequence[Counted], op: str, *, read: bool) -> Sequence[torch.Tensor]:
        said = [one.said[:HEADER_INTS] for one in counted]  # everybody counts everybody's ids in `plan`
        return self.collectives.gather_ints(said, op)

    @torch.no_grad()
    def plan(
        self, counted: Sequence[Counted], topk_weights: Tensors | None, published: Published
    ) -> list[Planned]:
        static = self.config.capacity_rows is not None
        most = self.config.max_tokens if static or published.num_tokens is None else max(published.num_tokens)
        narrow = [_narrow(c.topk_idx, self.table.num_experts) for c in counted]
        gathered_idx = self.collectives.all_gather([_pad(i, most, -1) for i in narrow], "dispatch.meta")
        gathered_weights: list[torch.Tensor] | list[None] = [None] * len(counted)
        if topk_weights is not None:
            gathered_weights = self.collectives.all_gather(
                [_pad(w, most, 0) for w in topk_weights], "dispatch.meta"
            )
        everyone = self._plan_all(gathered_idx[0], most)  # the same on every rank of this process
        return [
            self._route(rank, idx.shape[0], most, everyone, weights)
            for rank, idx, weights in zip(self.group.hosted, narrow, gathered_weights, strict=True)
        ]

    def _plan_all(self, idx: torch.Tensor, most: int) -> _Everyone:
        """Plans every source's tokens from everybody's expert ids, [R * most, K]."""
        R, capacity = self.group.size, self.config.capacity_rows
        by_source = idx.view(R, most, self.config.top_k)
        counts = [count_slots(by_source[s], self.table) for s in range(R)]
        E = self.table.num_experts
        counts_RE = torch.stack([c.said for c in counts])[:, HEADER_INTS : HEADER_INTS + E]
        resolved = resolve(counts_RE, self.table, self.config.alignment, self.config.capacity_rows)
        assigned = [
            assign_rows(c, s, resolved, self.table, num_send=R * most, split=most)
            for s, c in enumerate(counts)
        ]
        sent_RR = torch.stack([a.send_counts for a in assigned])
        if capacity is None:  # both lists in one host wait
            sizes = torch.cat([sent_RR.sum(0), resolved.rows_R]).tolist()
            kept, rows = sizes[:R], sizes[R:]
        else:
            kept, rows = [min(R * self.config.max_tokens, capacity)] * R, [capacity] * R
        slot_row, slot_rank = (
            torch.cat([a.slot_row for a in assigned]),
            torch.cat([a.slot_rank for a in assigned]),
        )
        return _Everyone(resolved, assigned, slot_row, slot_rank, sent_RR, kept, rows)

    def _route(
        self, rank: int, num_tokens: int, most: int, everyone: _Everyone, weights: torch.Tensor | None
    ) -> Planned:
        num_rows, num_kept = everyone.rows[rank], everyone.kept[rank]
        recv_token, part_rows = compact_rows(
            everyone.slot_row, num_kept, rows_rank_MK=everyone.slot_rank, rank=rank
        )
        row_src = invert_rows(part_rows, num_rows)
        part = row_src.div(part_rows.shape[1], rounding_mode="floor")
        mine = everyone.assigned[rank]
        # A partial row of token i for rank r stands, in the gathered buffer, behind those of lower sources:
        # the rank's block, plus what lower sources sent there, plus the token's place in this source's own
        # list.
        below_R = (everyone.sent_RR.cumsum(0) - everyone.sent_RR)[rank].to(torch.int32)
        home_rank = mine.send_rank[:num_tokens].contiguous()
        block = max(everyone.kept)
        shift_R = (
            torch.arange(self.group.size, dtype=torch.int32, device=below_R.device) * (block - most) + below_R
        )
        route = Route(
            num_tokens=num_tokens,
            num_rows=num_rows,
            num_flat=num_kept,
            part_rows=part_rows,
            row_src=row_src,
            row_buffer=take(recv_token, part, -1),
            flat_buffer=recv_token,
            flat_part=None,
            part_flat=None,
            home_row=_shifted(mine.send_row[:num_tokens], home_rank, shift_R),
            home_rank=home_rank,
            home_slot=_shifted(mine.slot_send[:num_tokens], mine.slot_rank[:num_tokens], shift_R),
            send_token=None,
            one_sided=None,
            gather_rows=(most, block),
        )
        if weights is None:
            return Planned(route, everyone.resolved.kept_rows, None)
        arrived = only_here(take_rows(weights, recv_token, 0.0), part_rows)
        if self.config.layout != "flat":
            arrived = take(arrived.flatten(), row_src, 0.0)
        return Planned(route, everyone.resolved.kept_rows, arrived)

    def _bring(self, routes: Sequence[Route], rows: Tensors, op: str) -> list[torch.Tensor]:
        return self.collectives.all_gather(
            [_pad(x, r.gather_rows[0], 0) for x, r in zip(rows, routes, strict=True)], op
        )

    def _send_home(
        self,
        routes: Sequence[Route],
        partials: Tensors,
        group_dtype: torch.dtype,
        out_dtype: torch.dtype,
        op: str,
    ) -> list[torch.Tensor]:
        if self.config.reduction == "fast":
            return self._send_home_fast(routes, partials, out_dtype, op)
        return [
            self._add_home(home, route, group_dtype, out_dtype)
            for home, route in zip(self._gather_parts(routes, partials, op), routes, strict=True)
        ]

    def _send_home_fast(
        self, routes: Sequence[Route], partials: Tensors, out_dtype: torch.dtype, op: str
    ) -> list[torch.Tensor]:
        spread = []
        for partial, route in zip(partials, routes, strict=True):
            assert route.flat_buffer is not None
            part_of_token = invert_rows(route.flat_buffer[:, None], self.group.size * route.gather_rows[0])
            spread.append(gather_rows(partial, part_of_token).float())  # the sum itself is never in bf16
        return [
            total[: route.num_tokens].to(out_dtype)
            for total, route in zip(self.collectives.reduce_scatter(spread, op), routes, strict=True)
        ]

    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        gathered = self._bring(routes, values, op)
        out = []
        for value, route in zip(gathered, routes, strict=True):
            assert route.flat_buffer is not None
            out.append(only_here(take_rows(value, route.flat_buffer, 0.0), route.part_rows))
        return out

    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        return slots_at_home(self._gather_parts(routes, values, op), routes)

    def _gather_parts(self, routes: Sequence[Route], partials: Tensors, op: str) -> list[torch.Tensor]:
        return self.collectives.all_gather(
            [_pad(p, route.gather_rows[1], 0) for p, route in zip(partials, routes, strict=True)], op
        )

    def memory_plan(self) -> MemoryPlan:
        config, R = self.config, self.group.size
        tokens = R * config.max_tokens
        parts = R * (tokens if config.capacity_rows is None else min(tokens, config.capacity_rows))
        return MemoryPlan(
            window_bytes=0,
            staging_bytes={
                "gathered tokens": tokens * config.row_bytes,
                "gathered partial rows": parts
                * config.hidden
                * max(config.dtype.itemsize, config.combine_dtype.itemsize),
                "metadata": tokens * 8 * config.top_k,
            },
        )


def _narrow(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """The ids as int32; one outside int32 does not wrap into range."""
    return topk_idx if topk_idx.dtype == torch.int32 else topk_idx.clamp(-2, num_experts).to(torch.int32)


def _pad(rows: torch.Tensor, to: int, fill: int) -> torch.Tensor:
    """Rows up to `to`, the new ones filled with `fill`."""
    if rows.shape[0] == to:
        return rows
    return torch.cat([rows, rows.new_full((to - rows.shape[0], *rows.shape[1:]), fill)])


def _shifted(position: torch.Tensor, rank: torch.Tensor, shift_R: torch.Tensor) -> torch.Tensor:
    """position + shift of its rank, -1 where there is none."""
    return torch.where(position >= 0, position + take(shift_R, rank, 0), -1)
