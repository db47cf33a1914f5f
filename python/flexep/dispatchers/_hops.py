"""Records over two hops: one a token and domain over the rail, then one a token and rank inside the domain. What they
hold is in csrc/plan/records.h; per-slot numbers take the same two hops.

Shape letters: X records that a rank sends over its rail, Q that it relays, Y that it sends inside its domain, N
received rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexep._native.arrivals import HopCounts, Peers, Received, Relayed, Sizes, relay_records
from flexep._native.plan import Assigned, invert_rows
from flexep.dispatchers.backend import Tensors, sent_tokens
from flexep.indexing import take_rows, take_slots
from flexep.transport.window import Window
from flexep.types import Hops, OneSided, Route


def exchange_records(
    window: Window, assigned: Sequence[Assigned], peers: Sequence[Peers], sizes: Sequence[Sizes], members: int
) -> tuple[list[Relayed], list[torch.Tensor]]:
    """What each hosted rank passes on inside its domain of `members` ranks, and the records that come to it, in the
    order in which relays send them."""
    top_k, hops = assigned[0].slot_row.shape[1], [_counts(p) for p in peers]
    sends = [a.meta for a in assigned if a.meta is not None]
    rails = [meta.new_empty((s.relayed, meta.shape[1])) for meta, s in zip(sends, sizes, strict=True)]
    window.exchange_records(
        sends, [h.rail_out for h in hops], rails, [h.rail_in for h in hops], "dispatch.rail_meta"
    )
    relayed = [
        relay_records(rail, top_k, h.relay_base[-1:], members, size.handed)
        for rail, h, size in zip(rails, hops, sizes, strict=True)
    ]
    sends = [r.meta for r in relayed]
    arrived = [meta.new_empty((s.flat, meta.shape[1])) for meta, s in zip(sends, sizes, strict=True)]
    window.exchange_records(
        sends, [h.member_out for h in hops], arrived, [h.member_in for h in hops], "dispatch.meta"
    )
    return relayed, arrived


def deliver_slots(window: Window, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
    """fp32 [T, K] of each hosted rank -> [N, K] beside its received rows; other ranks' slots carry anything."""
    hops, K = [_hops(route) for route in routes], values[0].shape[1]
    sends = [take_rows(v, sent_tokens(route), 0.0) for v, route in zip(values, routes, strict=True)]
    relayed = [v.new_empty((h.relay_record.shape[0], K)) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(
        sends, [h.rail_out for h in hops], relayed, [h.rail_in for h in hops], _rail_op(op)
    )
    sends = [take_rows(v, h.member_item, 0.0) for v, h in zip(relayed, hops, strict=True)]
    arrived = [v.new_empty((h.order.shape[0], K)) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(sends, [h.member_out for h in hops], arrived, [h.member_in for h in hops], op)
    return [take_rows(a, h.order, 0.0) for a, h in zip(arrived, hops, strict=True)]


def collect_slots(window: Window, routes: Sequence[Route], values: Tensors, op: str) -> list[torch.Tensor]:
    """fp32 [N, K] beside received rows -> [X, K] beside the records that left over the rail."""
    hops, K = [_hops(route) for route in routes], values[0].shape[1]
    arrived = [invert_rows(h.order[:, None], h.order.shape[0]) for h in hops]
    sends = [take_rows(v, row, 0.0) for v, row in zip(values, arrived, strict=True)]
    back = [v.new_empty((h.member_item.shape[0], K)) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(sends, [h.member_in for h in hops], back, [h.member_out for h in hops], op)
    merged = [take_slots(v, h.relay_record) for v, h in zip(back, hops, strict=True)]
    home = [v.new_empty((sent_tokens(route).shape[0], K)) for v, route in zip(values, routes, strict=True)]
    window.exchange_records(merged, [h.rail_in for h in hops], home, [h.rail_out for h in hops], _rail_op(op))
    return home


def _kept(peers: Peers, relayed: Relayed, order: torch.Tensor | None) -> Hops:
    """What later calls need of the two hops."""
    assert order is not None
    counts = _counts(peers)
    return Hops(
        relay_record=relayed.slot_send,
        member_item=relayed.send_item,
        order=order,
        rail_out=counts.rail_out,
        rail_in=counts.rail_in,
        member_out=counts.member_out,
        member_in=counts.member_in,
    )


def make_route(a: Assigned, peers: Peers, received: Received, relayed: Relayed) -> Route:
    """The route of one rank, which relays too."""
    return Route(
        num_tokens=a.slot_row.shape[0],
        num_rows=received.row_src.shape[0],
        num_flat=received.token.shape[0],
        part_rows=received.rows,
        row_src=received.row_src,
        home_row=a.send_row,
        home_rank=a.send_rank,
        home_slot=a.slot_send,
        send_token=a.send_token,
        flat_expert=received.expert,
        row_map=received.row_map,
        one_sided=OneSided(
            tokens_of=peers.tokens_of,
            send_R=peers.send_R,
            recv_R=peers.recv_R,
            recv_token=received.token,
            recv_base=peers.recv_base,
            relay_token=relayed.token,
            relay_base=_counts(peers).relay_base,
            relay_members=relayed.members,
            hops=_kept(peers, relayed, received.order),
        ),
    )


def _rail_op(op: str) -> str:
    """The name of the rail's part of an operation."""
    call, what = op.split(".")
    return f"{call}.rail_{what}"


def _counts(peers: Peers) -> HopCounts:
    assert peers.hops is not None
    return peers.hops


def _hops(route: Route) -> Hops:
    assert route.one_sided is not None
    assert route.one_sided.hops is not None
    return route.one_sided.hops
