"""One-sided back ends: ranks read and write each other's windows, and rows are expanded, padded, weighted and added
while they move (csrc/kernels/deliver.h, collect.h). What deepep and hybridep differ in is the topology alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexep._native.memory import empty
from flexep._native.plan import (
    Assigned,
    PlanTable,
    Resolved,
    assign_rows,
    count_slots,
    invert_rows,
    pack_meta,
    resolve,
)
from flexep._native.window import Arrivals, Collect, Deliver, Relayed
from flexep.config import DispatcherConfig
from flexep.dispatchers import _hops as hops
from flexep.dispatchers._window_shape import window_shape
from flexep.dispatchers.backend import Backend, Delivered, Planned, Published, Tensors
from flexep.errors import ArgumentError
from flexep.group import Group
from flexep.indexing import entry_index, take, take_rows
from flexep.transport.window import Window, WindowCollectives
from flexep.types import MemoryPlan, OneSided, Route


class OneSidedBackend(Backend):
    """Plans as `alltoall` does, moves rows over a window.

    Rows are pulled to the experts and partial sums pushed home, in chunks of source tokens through rings whose size the
    budget `window_bytes` sets, so the window does not grow with the number of tokens.
    """

    def __init__(self, group: Group, config: DispatcherConfig, table: PlanTable) -> None:
        super().__init__(group, config, table)
        self.shape = window_shape(config, self.hop_size)
        self.window = Window(group, self.shape, config.timeout)
        self.collectives = WindowCollectives(self.window)

    @property
    def hop_size(self) -> int:
        """Ranks that rows reach in one hop: all of them."""
        return self.config.num_ranks

    @property
    def _has_relays(self) -> bool:
        return self.hop_size < self.config.num_ranks

    def publish(self, topk_idx: torch.Tensor) -> torch.Tensor:
        return torch.cat(count_slots(topk_idx, self.table))

    def plan(self, topk_idx: Tensors, topk_weights: Tensors | None, published: Published) -> list[Planned]:
        assert published.host_ints is not None
        assert published.num_tokens is not None
        E, ints, config = self.table.num_experts, published.host_ints, self.config
        resolved = resolve(ints[:, :E].contiguous(), self.table, config.alignment, config.capacity_rows)
        assigned = [
            assign_rows(idx, rank, resolved, self.table, num_send=int(ints[rank, E:].sum()))
            for idx, rank in zip(topk_idx, self.group.hosted, strict=True)
        ]
        weights = [None for _ in assigned] if topk_weights is None else list(topk_weights)
        sent_RR = ints[
            :, E:
        ]  # distinct tokens from each rank to each rank; with a capacity, those that are kept
        if config.capacity_rows is not None:
            sent_RR = self.collectives.all_gather([a.send_counts[None] for a in assigned], "dispatch.counts")[
                0
            ]
        arrived = self._exchange_meta(assigned, weights, sent_RR)
        tokens_of = torch.tensor(published.num_tokens, dtype=torch.int32)
        return [
            self._planned(rank, a, meta, hop, sent_RR, tokens_of, resolved)
            for rank, a, (meta, hop) in zip(self.group.hosted, assigned, arrived, strict=True)
        ]

    def _exchange_meta(
        self, assigned: Sequence[Assigned], weights: Sequence[torch.Tensor | None], sent_RR: torch.Tensor
    ) -> list[tuple[torch.Tensor, hops.Relay | None]]:
        """Row metadata [received, 1 + K (+ K)] in (source rank, token) order, and what this rank relays."""
        if self._has_relays:
            return hops.exchange_meta(
                self.collectives, self.group.hosted, self.hop_size, assigned, weights, sent_RR
            )
        to = [tuple(sent_RR[rank].tolist()) for rank in self.group.hosted]
        come = [tuple(sent_RR[:, rank].tolist()) for rank in self.group.hosted]
        metas = [pack_meta(a, w)[: sum(s)] for a, w, s in zip(assigned, weights, to, strict=True)]
        return [(meta, None) for meta in self.collectives.all_to_all(metas, to, come, "dispatch.meta")]

    def _planned(
        self,
        rank: int,
        a: Assigned,
        meta: torch.Tensor,
        relay: hops.Relay | None,
        sent_RR: torch.Tensor,
        tokens_of: torch.Tensor,
        resolved: Resolved,
    ) -> Planned:
        config, K = self.config, self.config.top_k
        num_rows, num_flat = int(resolved.rows_R[rank]), meta.shape[0]
        if config.capacity_rows is not None:
            num_rows = config.capacity_rows
            num_flat = min(self.group.size * config.max_tokens, num_rows)
        tail = num_flat - meta.shape[0]
        if tail:
            blank = meta.new_zeros((tail, meta.shape[1]))
            blank[:, : 1 + K] = -1
            meta = torch.cat([meta, blank])
        part_rows = meta[:, 1 : 1 + K].contiguous()
        received_R = sent_RR[:, rank]
        base = torch.cat([received_R.new_zeros(1), received_R.cumsum(0)]).to(torch.int32)
        route = Route(
            num_tokens=a.slot_row.shape[0],
            num_rows=num_rows,
            num_flat=num_flat,
            part_rows=part_rows,
            row_src=invert_rows(part_rows, num_rows),
            row_buffer=None,
            flat_buffer=None,
            flat_part=None,
            part_flat=None,
            home_row=a.send_row,
            home_rank=a.send_rank,
            home_slot=a.slot_send,
            send_token=a.send_token[: int(sent_RR[rank].sum())],
            send_splits=tuple(sent_RR[rank].tolist()),
            recv_splits=tuple(received_R.tolist()),
            one_sided=OneSided(
                tokens_of=tokens_of,
                recv_token=meta[:, 0].contiguous(),
                recv_base=base,
                relay_token=None if relay is None else relay.token,
                relay_base=None if relay is None else relay.base,
                relay_members=None if relay is None else relay.members,
                hops=None if relay is None else relay.hops,
            ),
        )
        weights = meta[:, 1 + K :].contiguous().view(torch.float32) if meta.shape[1] > 1 + K else None
        return Planned(route, resolved, weights)

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
    ) -> Delivered:
        in_window = torch.zeros(self.group.size, dtype=torch.int32)
        if registered is not None:
            in_window = torch.tensor(registered, dtype=torch.int32)
        parts = []
        for i, (route, x) in enumerate(zip(routes, rows, strict=True)):
            num_rows = route.num_flat if flat else route.num_rows
            parts.append(
                Deliver(
                    tokens_of=_one_sided(route).tokens_of,
                    x=x,
                    registered=in_window,
                    arrivals=_arrivals(route),
                    relayed=_relayed(route),
                    out=empty(num_rows, x.shape[1], x.dtype),
                    flat=flat,
                    row_src=route.row_src,
                    weights=None if row_weights is None else row_weights[i].contiguous(),
                    dot_with=None if dot_with is None else dot_with[i],
                    dots=None if dot_with is None else torch.empty(num_rows, dtype=torch.float32),
                )
            )
        self.window.deliver(parts, op)
        return Delivered(
            [part.out for part in parts],
            None if dot_with is None else [part.dots for part in parts if part.dots is not None],
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
        parts = [
            Collect(
                tokens_of=_one_sided(route).tokens_of,
                y=y,
                flat=flat,
                part_weights=None if part_weights is None else part_weights[i].contiguous(),
                arrivals=_arrivals(route),
                relayed=_relayed(route),
                home_rank=route.home_rank,
                nest=0 if self._has_relays else self.config.domain_size or 0,  # relays have added by domain
                z=empty(route.num_tokens, y.shape[1], out_dtype),
                wire=group_dtype,
            )
            for i, (route, y) in enumerate(zip(routes, rows, strict=True))
        ]
        self.window.collect(parts, op)
        return [part.z for part in parts]

    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        if self._has_relays:
            arrived = hops.deliver_slots(self.collectives, routes, values, op)
        else:
            sends = [take_rows(v, _sent(route), 0.0) for v, route in zip(values, routes, strict=True)]
            arrived = self.collectives.all_to_all(
                sends, [r.send_splits for r in routes], [r.recv_splits for r in routes], op
            )
        out = []
        for value, route in zip(arrived, routes, strict=True):
            here = value.new_zeros((route.num_flat, value.shape[1]))
            here[: value.shape[0]] = value
            out.append(torch.where(route.part_rows >= 0, here, 0.0))
        return out

    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        sends = [v[: sum(route.recv_splits)] for v, route in zip(values, routes, strict=True)]
        if self._has_relays:
            return hops.collect_slots(self.collectives, routes, sends, op)
        back = self.collectives.all_to_all(
            sends, [r.recv_splits for r in routes], [r.send_splits for r in routes], op
        )
        return [
            take(home.flatten(), entry_index(route.home_slot, home.shape[1]), 0.0)
            for home, route in zip(back, routes, strict=True)
        ]

    def memory_plan(self) -> MemoryPlan:
        config, R = self.config, self.group.size
        meta = 4 * (1 + 2 * config.top_k)
        sent = config.max_tokens * min(config.top_k, R)
        return MemoryPlan(
            window_bytes=self.shape.nbytes,
            staging_bytes={"metadata": (sent + R * config.max_tokens) * meta},
        )

    def in_window(self, hosted: int, x: torch.Tensor) -> bool:
        if not self.config.zero_copy or not x.numel():
            return False
        return x.data_ptr() == self.window.registered(self.group.hosted[hosted], x.dtype).data_ptr()

    def window_input(self) -> list[torch.Tensor]:
        if not self.config.zero_copy:
            raise ArgumentError("zero_copy", False, "True, so that the window has room for x")
        return [self.window.registered(rank, self.config.dtype) for rank in self.group.hosted]

    def close(self) -> None:
        self.window.close()


def _one_sided(route: Route) -> OneSided:
    assert route.one_sided is not None
    return route.one_sided


def _arrivals(route: Route) -> Arrivals:
    peers = _one_sided(route)
    return Arrivals(peers.recv_token, peers.recv_base, route.part_rows)


def _relayed(route: Route) -> Relayed | None:
    peers = _one_sided(route)
    if peers.relay_token is None or peers.relay_base is None or peers.relay_members is None:
        return None
    return Relayed(peers.relay_token, peers.relay_base, peers.relay_members)


def _sent(route: Route) -> torch.Tensor:
    assert route.send_token is not None
    return route.send_token
