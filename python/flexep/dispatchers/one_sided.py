"""One-sided back ends: ranks read and write each other's windows, and rows are expanded, padded, weighted and added
while they move (csrc/kernels/deliver.h, collect.h). What deepep and hybridep differ in is the topology alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexep._native.operands import output
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
from flexep.dispatchers._window_shape import num_slices, window_shape
from flexep.dispatchers.backend import Backend, Delivered, Planned, Published, Tensors, slots_at_home
from flexep.errors import ArgumentError
from flexep.group import Group
from flexep.indexing import take_rows
from flexep.transport.window import WindowCollectives, make_window
from flexep.types import MemoryPlan, OneSided, Route


@dataclass(frozen=True)
class _Sizes:
    """Lengths of one rank's tensors: token rows sent to all ranks, received (flat) rows, expert-major rows."""

    sent: int
    flat: int
    rows: int


class OneSidedBackend(Backend):
    """Plans as `alltoall` does, moves rows over a window.

    Rows are pulled to the experts and partial sums pushed home, in chunks of source tokens through rings whose size the
    budget `window_bytes` sets, so the window does not grow with the number of tokens.
    """

    def __init__(self, group: Group, config: DispatcherConfig, table: PlanTable) -> None:
        super().__init__(group, config, table)
        self.shape = window_shape(config, self.hop_size, num_slices(config, group))
        self.window = make_window(group, self.shape, config.timeout)
        self.collectives = WindowCollectives(self.window)

    @property
    def hop_size(self) -> int:
        """Ranks that rows reach in one hop: all of them."""
        return self.config.num_ranks

    @property
    def _has_relays(self) -> bool:
        return self.hop_size < self.config.num_ranks

    def publish(self, topk_idx: torch.Tensor) -> torch.Tensor:
        counts_E, tokens_R = count_slots(topk_idx, self.table)
        return torch.cat([counts_E, tokens_R, tokens_R.new_full((1,), topk_idx.shape[0])])

    def plan(self, topk_idx: Tensors, topk_weights: Tensors | None, published: Published) -> list[Planned]:
        E, config, hosted = self.table.num_experts, self.config, self.group.hosted
        resolved = resolve(
            published.ints[:, :E].contiguous(), self.table, config.alignment, config.capacity_rows
        )
        rows_R = self._exact_rows(published, resolved)
        sizes = [
            self._sizes(rank, idx.shape[0], published, rows_R)
            for rank, idx in zip(hosted, topk_idx, strict=True)
        ]
        assigned = [
            assign_rows(idx, rank, resolved, self.table, num_send=size.sent)
            for idx, rank, size in zip(topk_idx, hosted, sizes, strict=True)
        ]
        weights = [None for _ in assigned] if topk_weights is None else list(topk_weights)
        # Distinct tokens from each rank to each rank; with a capacity, those that are kept.
        sent_RR = published.ints[:, E:-1]
        if config.capacity_rows is not None:
            sent_RR = self.collectives.all_gather([a.send_counts[None] for a in assigned], "dispatch.counts")[
                0
            ]
        arrived = self._exchange_meta(assigned, weights, sent_RR, sizes)
        tokens_of = published.ints[:, -1].contiguous()
        return [
            self._planned(rank, a, size, meta, relay, sent_RR, tokens_of, resolved)
            for rank, a, size, (meta, relay) in zip(hosted, assigned, sizes, arrived, strict=True)
        ]

    def _exact_rows(self, published: Published, resolved: Resolved) -> list[int] | None:
        """Expert-major rows of every rank, known to the host; None with a capacity."""
        if self.config.capacity_rows is not None:
            return None
        ints = published.host_ints
        assert ints is not None, "exact mode reads the published integers on the host"
        if ints.device != published.ints.device:  # planned again here, rather than waited for
            counts_RE = ints[:, : self.table.num_experts].contiguous()
            resolved = resolve(counts_RE, self.table, self.config.alignment, None)
        return resolved.rows_R.tolist()

    def _sizes(self, rank: int, num_tokens: int, published: Published, rows_R: list[int] | None) -> _Sizes:
        """Exact sizes from the host's copy of what was published; with a capacity, from the arguments alone."""
        config, E, R = self.config, self.table.num_experts, self.config.num_ranks
        if rows_R is None:
            assert config.capacity_rows is not None
            flat = min(R * config.max_tokens, config.capacity_rows)
            return _Sizes(num_tokens * min(config.top_k, R), flat, config.capacity_rows)
        ints = published.host_ints
        assert ints is not None
        return _Sizes(int(ints[rank, E:-1].sum()), int(ints[:, E + rank].sum()), rows_R[rank])

    def _exchange_meta(
        self,
        assigned: Sequence[Assigned],
        weights: Sequence[torch.Tensor | None],
        sent_RR: torch.Tensor,
        sizes: Sequence[_Sizes],
    ) -> list[tuple[torch.Tensor, hops.Relay | None]]:
        """Row metadata [flat, 1 + K (+ K)] in (source rank, token) order with a tail of -1, and what this rank
        relays."""
        metas = [pack_meta(a, w) for a, w in zip(assigned, weights, strict=True)]
        blanks = [
            _blank(size.flat, meta.shape[1], self.config.top_k, meta.device)
            for meta, size in zip(metas, sizes, strict=True)
        ]
        if self._has_relays:
            relayed = hops.exchange_meta(
                self.collectives, self.group.hosted, self.hop_size, assigned, weights, sent_RR
            )
            for blank, (meta, _) in zip(blanks, relayed, strict=True):
                blank[: meta.shape[0]] = meta
            return [(blank, relay) for blank, (_, relay) in zip(blanks, relayed, strict=True)]
        send_R = [sent_RR[rank].contiguous() for rank in self.group.hosted]
        recv_R = [sent_RR[:, rank].contiguous() for rank in self.group.hosted]
        self.window.exchange_records(metas, send_R, blanks, recv_R, "dispatch.meta")
        return [(blank, None) for blank in blanks]

    def _planned(
        self,
        rank: int,
        a: Assigned,
        size: _Sizes,
        meta: torch.Tensor,
        relay: hops.Relay | None,
        sent_RR: torch.Tensor,
        tokens_of: torch.Tensor,
        resolved: Resolved,
    ) -> Planned:
        K = self.config.top_k
        part_rows = meta[:, 1 : 1 + K].contiguous()
        recv_R = sent_RR[:, rank].contiguous()
        route = Route(
            num_tokens=a.slot_row.shape[0],
            num_rows=size.rows,
            num_flat=size.flat,
            part_rows=part_rows,
            row_src=invert_rows(part_rows, size.rows),
            row_buffer=None,
            flat_buffer=None,
            flat_part=None,
            part_flat=None,
            home_row=a.send_row,
            home_rank=a.send_rank,
            home_slot=a.slot_send,
            send_token=a.send_token,
            one_sided=OneSided(
                tokens_of=tokens_of,
                send_R=sent_RR[rank].contiguous(),
                recv_R=recv_R,
                recv_token=meta[:, 0].contiguous(),
                recv_base=torch.nn.functional.pad(recv_R.cumsum(0), (1, 0)).to(torch.int32),
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
        device = self.group.device
        in_window = torch.zeros(self.group.size, dtype=torch.int32, device=device)
        if registered is not None and any(registered):
            in_window = torch.tensor(registered, dtype=torch.int32, device=device)
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
                    out=output(num_rows, x.shape[1], x.dtype, device),
                    flat=flat,
                    row_src=route.row_src,
                    weights=None if row_weights is None else row_weights[i].contiguous(),
                    dot_with=None if dot_with is None else dot_with[i],
                    dots=None
                    if dot_with is None
                    else torch.empty(num_rows, dtype=torch.float32, device=device),
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
                z=output(route.num_tokens, y.shape[1], out_dtype, self.group.device),
                wire=group_dtype,
            )
            for i, (route, y) in enumerate(zip(routes, rows, strict=True))
        ]
        self.window.collect(parts, op)
        return [part.z for part in parts]

    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        out = [v.new_zeros((route.num_flat, v.shape[1])) for v, route in zip(values, routes, strict=True)]
        if self._has_relays:
            for here, value in zip(out, hops.deliver_slots(self.window, routes, values, op), strict=True):
                here[: value.shape[0]] = value
        else:
            sends = [take_rows(v, _sent(route), 0.0) for v, route in zip(values, routes, strict=True)]
            peers = [_one_sided(route) for route in routes]
            self.window.exchange_records(sends, [p.send_R for p in peers], out, [p.recv_R for p in peers], op)
        return [torch.where(route.part_rows >= 0, here, 0.0) for here, route in zip(out, routes, strict=True)]

    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        if self._has_relays:
            return hops.collect_slots(self.window, routes, values, op)
        peers = [_one_sided(route) for route in routes]
        back = [
            v.new_empty((_sent(route).shape[0], v.shape[1])) for v, route in zip(values, routes, strict=True)
        ]
        sends = [v.contiguous() for v in values]
        self.window.exchange_records(sends, [p.recv_R for p in peers], back, [p.send_R for p in peers], op)
        return slots_at_home(back, routes)

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

    def check(self) -> None:
        self.window.check()

    def close(self) -> None:
        self.window.close()


def _blank(rows: int, width: int, top_k: int, device: torch.device) -> torch.Tensor:
    """int32 [rows, width] metadata of no token: -1, and weights of 0."""
    blank = torch.full((rows, width), -1, dtype=torch.int32, device=device)
    blank[:, 1 + top_k :] = 0
    return blank


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
