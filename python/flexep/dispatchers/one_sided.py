"""One-sided back ends: ranks read and write each other's windows, and rows are expanded, padded, weighted and added
while they move (csrc/kernels/deliver.h, collect.h). What deepep and hybridep differ in is the topology alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from flexep._native.arrivals import Sizes, count_peers, exact_sizes, receive_rows
from flexep._native.one_sided_plan import OneSidedPlanner, RankPlan
from flexep._native.operands import output_beside
from flexep._native.plan import HEADER_INTS, Counted, PlaceRows, PlanTable, assign_rows, resolve
from flexep._native.window import Collect, Deliver
from flexep.config import DispatcherConfig
from flexep.dispatchers import _hops as hops
from flexep.dispatchers._agree import TOKENS, header_of
from flexep.dispatchers._record_sizes import metadata_bytes, most_sizes
from flexep.dispatchers._window_shape import num_slices, sends_ahead, window_shape
from flexep.dispatchers.backend import (
    Backend,
    Delivered,
    Planned,
    Published,
    Tensors,
    sent_tokens,
    slots_at_home,
)
from flexep.errors import ArgumentError
from flexep.group import Group
from flexep.indexing import take_rows
from flexep.transport.window import WindowCollectives, make_window
from flexep.types import MemoryPlan, OneSided, Route

# Where at least this share of rows leaves a rank, all are offered: looking up which do takes longer than it saves.
OFFERED_WHOLE = 0.9


class OneSidedBackend(Backend):
    """Plans as `alltoall` does, moves rows over a window.

    Rows are pulled to the experts and partial sums pushed home, in chunks of source tokens through rings whose size the
    budget `window_bytes` sets, so the window does not grow with the number of tokens.
    """

    def __init__(self, group: Group, config: DispatcherConfig, table: PlanTable) -> None:
        super().__init__(group, config, table)
        ahead = sends_ahead(config, group, self.hop_size)
        self.shape = window_shape(config, self.hop_size, num_slices(config, group, ahead), ahead)
        self.window = make_window(group, self.shape, config.timeout)
        self.collectives = WindowCollectives(self.window)
        self._most_sizes = partial(most_sizes, config, self.hop_size)
        self.planner = OneSidedPlanner(
            table,
            config.top_k,
            config.alignment,
            config.capacity_rows,
            self._most_sizes,
            config.layout == "flat",
            TOKENS,
            self.domains,
            group.device,
        )
        self._is_static = config.capacity_rows is not None
        # Over relays `home_rank` names those that send sums home, not those that read rows.
        self._offers_all = self._has_relays or config.leaving >= OFFERED_WHOLE
        self._none_registered = torch.zeros(group.size, dtype=torch.int32, device=group.device)

    @property
    def hop_size(self) -> int:
        """Ranks that rows reach in one hop: all of them."""
        return self.config.num_ranks

    @property
    def _has_relays(self) -> bool:
        return self.hop_size < self.config.num_ranks

    @property
    def domains(self) -> int:
        return self.config.num_ranks // self.hop_size if self._has_relays else 0

    @property
    def said_ints(self) -> int:
        return self.planner.said_ints

    def count(
        self,
        topk_idx: torch.Tensor,
        weights: torch.Tensor | None,
        stamp: tuple[int, int, int, int],
        masked: torch.Tensor | None,
        has_weights: bool,
    ) -> Counted:
        return self.planner.count(topk_idx, weights, stamp, masked, has_weights)

    def send_ahead(self, rows: Tensors) -> None:
        if self.shape.landed_rows:
            self.window.send_ahead(rows, "dispatch.rows")

    def call_off(self) -> None:
        self.window.call_off()

    def tell(self, counted: Sequence[Counted], op: str, *, read: bool) -> Sequence[torch.Tensor | None]:
        if not read and not self._has_relays:
            return [None] * len(counted)  # `plan` tells it, and a GPU does both in one launch
        self.window.count_and_publish(counted, op)
        return [self.planner.board(one) if read or self._has_relays else None for one in counted]

    def plan(
        self, counted: Sequence[Counted], topk_weights: Tensors | None, published: Published
    ) -> list[Planned]:
        weights = [None] * len(counted) if topk_weights is None else topk_weights
        if self._has_relays:
            return self._plan_over_hops(counted, weights, published)
        untold = counted if published.ints is None else ()
        plans = []
        try:
            for one, rank, weights_TK in zip(counted, self.group.hosted, weights, strict=True):
                T, has_weights = one.topk_idx.shape[0], weights_TK is not None
                if self._is_static:
                    layout = self.planner.static_layout(rank, T, has_weights)
                else:
                    layout = self.planner.layout(rank, T, has_weights, self._sizes(rank, published, one))
                plans.append(self.planner.prepare(one, layout, weights_TK))
        except BaseException:  # there was no memory, say
            if untold:  # an operation must follow rows that were sent ahead
                self.window.count_and_publish(untold, header_of("dispatch"))
            raise
        self.window.plan(plans, self._is_static, untold)
        flat = self.config.layout == "flat"
        return [_planned(p, c.topk_idx.shape[0], flat) for p, c in zip(plans, counted, strict=True)]

    @torch.no_grad()
    def _plan_over_hops(
        self,
        counted: Sequence[Counted],
        weights: Sequence[torch.Tensor | None],
        published: Published,
    ) -> list[Planned]:
        config, hosted, said = self.config, self.group.hosted, published.ints
        assert said is not None
        sizes = [self._sizes(rank, published, c) for rank, c in zip(hosted, counted, strict=True)]
        E, flat = self.table.num_experts, config.layout == "flat"
        places, sent_RR = said[:, HEADER_INTS : HEADER_INTS + E], said[:, HEADER_INTS + E :]
        resolved = resolve(places, self.table, config.alignment, config.capacity_rows)
        assigned = [
            assign_rows(c, rank, resolved, self.table, num_send=size.left, records=True, weights_TK=w)
            for c, rank, size, w in zip(counted, hosted, sizes, weights, strict=True)
        ]
        if config.capacity_rows is not None:  # of the distinct tokens, those that are kept
            kept = [a.send_counts[None] for a in assigned]
            (sent_RR, *_) = self.collectives.all_gather(kept, "dispatch.counts")
        peers = [count_peers(sent_RR, said[:, TOKENS], self.domains, rank) for rank in hosted]
        relayed, arrived = hops.exchange_records(self.window, assigned, peers, sizes, self.hop_size)
        received = [
            receive_rows(
                meta, config.top_k, size.rows, flat_weights=flat, peers=p,
                start_L=resolved.start_E[self.table.places(rank)] if flat else None,
            )
            for meta, size, p, rank in zip(arrived, sizes, peers, hosted, strict=True)
        ]  # fmt: skip
        return [
            Planned(hops.make_route(*one), resolved.kept_rows, one[2].weights)
            for one in zip(assigned, peers, received, relayed, strict=True)
        ]

    def _sizes(self, rank: int, published: Published, counted: Counted) -> Sizes:
        """Exact sizes from the host's copy of what was published; with a capacity, from the arguments alone."""
        config, said = self.config, published.host_ints
        if config.capacity_rows is None:
            assert said is not None, "exact mode reads the published integers on the host"
            return exact_sizes(said, self.table, self.domains, config.alignment, rank)
        return self._most_sizes(counted.topk_idx.shape[0])

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
        device, in_window = self.group.device, self._none_registered
        if registered is not None and any(registered):
            in_window = torch.tensor(registered, dtype=torch.int32, device=device)
        parts = []
        for i, (route, x) in enumerate(zip(routes, rows, strict=True)):
            num_rows = route.num_flat if flat else route.num_rows
            out = output_beside(x, num_rows, x.dtype)
            weights = None if row_weights is None else row_weights[i].contiguous()
            dotted = dots = None
            if dot_with is not None:
                dotted, dots = dot_with[i], torch.empty(num_rows, dtype=torch.float32, device=device)
            parts.append(Deliver(route, x, in_window, self._offers_all, out, flat, weights, dotted, dots))
        if self.shape.landed_rows and not sent_ahead:
            self.window.send_ahead(rows, op)
        try:
            self.window.deliver(parts, op)
        except BaseException:
            self.window.call_off()
            raise
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
        nest = 0 if self._has_relays else self.config.domain_size or 0  # relays have added by domain
        parts = []
        for i, (route, y) in enumerate(zip(routes, rows, strict=True)):
            weights = None if part_weights is None else part_weights[i].contiguous()
            z = output_beside(y, route.num_tokens, out_dtype)
            parts.append(Collect(route, y, flat, weights, nest, z, group_dtype))
        self.window.collect(parts, op)
        return [part.z for part in parts]

    def deliver_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        if self._has_relays:
            arrived = hops.deliver_slots(self.window, routes, values, op)
        else:
            sends = [take_rows(v, sent_tokens(route), 0.0) for v, route in zip(values, routes, strict=True)]
            arrived = [v.new_zeros((r.num_flat, v.shape[1])) for v, r in zip(values, routes, strict=True)]
            peers = [_one_sided(route) for route in routes]
            self.window.exchange_records(
                sends, [p.send_R for p in peers], arrived, [p.recv_R for p in peers], op
            )
        return [torch.where(r.part_rows >= 0, here, 0.0) for here, r in zip(arrived, routes, strict=True)]

    def collect_slots(self, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
        if self._has_relays:
            return slots_at_home(hops.collect_slots(self.window, routes, values, op), routes)
        peers = [_one_sided(route) for route in routes]
        back = [
            v.new_empty((sent_tokens(route).shape[0], v.shape[1]))
            for v, route in zip(values, routes, strict=True)
        ]
        sends = [v.contiguous() for v in values]
        self.window.exchange_records(sends, [p.recv_R for p in peers], back, [p.send_R for p in peers], op)
        return slots_at_home(back, routes)

    def memory_plan(self) -> MemoryPlan:
        return MemoryPlan(
            window_bytes=self.shape.nbytes,
            staging_bytes={"metadata": metadata_bytes(self.config, self.hop_size)},
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


def _planned(plan: RankPlan, num_tokens: int, flat: bool) -> Planned:
    """What a plan leaves."""
    view, sizes = plan.lists.tensor, plan.lists.layout.sizes

    def make(name: str) -> Any:
        return OneSided.late(view) if name == "one_sided" else view(name)

    none = {} if flat else {"flat_expert": None, "row_map": None}
    route = Route.late(
        make, num_tokens=num_tokens, num_rows=sizes.rows, num_flat=sizes.flat, lists=plan.native.lists(), **none,
    )  # fmt: skip
    return Planned(route, PlaceRows.late(view), plan.weights)


def _one_sided(route: Route) -> OneSided:
    assert route.one_sided is not None
    return route.one_sided
