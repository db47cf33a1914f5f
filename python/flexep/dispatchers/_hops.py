"""Metadata over two hops: a record a token and domain over the rail, then a record a token and rank inside the domain.

A rail record is {token, row of each slot, index in the domain of each slot or -1 [, weights]}, int32; a record inside
the domain is what `pack_meta` makes, {token, row of each slot or -1 [, weights]}. Per-slot numbers take the same two
hops. Shape letters: X records that a rank sends over its rail, Q that it relays, Y that it sends inside its domain,
N received.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flexep._native.plan import Assigned
from flexep.indexing import take_rows
from flexep.transport.collectives import Collectives
from flexep.transport.window import Window
from flexep.types import Hops, Route


@dataclass(frozen=True)
class Relay:
    """What one rank relays: see OneSided."""

    token: torch.Tensor
    base: torch.Tensor
    members: torch.Tensor
    hops: Hops


def exchange_meta(
    collectives: Collectives,
    hosted: Sequence[int],
    size: int,
    assigned: Sequence[Assigned],
    weights: Sequence[torch.Tensor | None],
    sent_RR: torch.Tensor,
) -> list[tuple[torch.Tensor, Relay | None]]:
    """Metadata [N, 1 + K (+ K)] of each hosted rank in (source rank, token) order, and what it relays."""
    R, K = sent_RR.shape[0], assigned[0].slot_row.shape[1]
    D = R // size
    slot_domains = [_divide(a.slot_rank, size) for a in assigned]
    rails = [_pairs(_distinct(domain, D)) for domain in slot_domains]
    device = sent_RR.device
    counts = [torch.bincount(domain, minlength=D).to(torch.int32)[None] for _, domain in rails]
    sent_RD = collectives.all_gather(counts, "dispatch.counts")[0]
    sends = [
        _rail_records(a, w, *rail, slots, size)
        for a, w, rail, slots in zip(assigned, weights, rails, slot_domains, strict=True)
    ]
    rail_out = [_on_rail(rank, size, R, sent_RD[rank]) for rank in hosted]
    rail_in = [_on_rail(rank, size, R, sent_RD[rank % size :: size, rank // size]) for rank in hosted]
    relayed = collectives.all_to_all(sends, rail_out, rail_in, "dispatch.rail_meta")
    slots = [records[:, 1 + K : 1 + 2 * K].contiguous() for records in relayed]
    distinct = [_distinct(slot_QK, size) for slot_QK in slots]
    members = [_pairs(member_QK) for member_QK in distinct]
    sends = [_member_records(records, *pairs, K) for records, pairs in zip(relayed, members, strict=True)]
    member_out = [
        _in_domain(rank, size, R, torch.bincount(member, minlength=size))
        for rank, (_, member) in zip(hosted, members, strict=True)
    ]
    member_in = [_in_domain(rank, size, R, sent_RR[:, rank].view(D, size).sum(0)) for rank in hosted]
    arrived = collectives.all_to_all(sends, member_out, member_in, "dispatch.meta")
    out: list[tuple[torch.Tensor, Relay | None]] = []
    for i, rank in enumerate(hosted):
        order = _by_source(sent_RR[:, rank].view(D, size))
        from_domains = torch.tensor([0, *rail_in[i][rank % size :: size]], device=device)
        base = from_domains.cumsum(0).to(torch.int32)
        hops = Hops(
            rail_token=rails[i][0].to(torch.int32),
            rail_domain=rails[i][1].to(torch.int32),
            slot_domain=slot_domains[i],
            relay_slot=slots[i],
            member_record=members[i][0].to(torch.int32),
            member=members[i][1].to(torch.int32),
            order=order,
            rail_out=_splits(rail_out[i], device),
            rail_in=_splits(rail_in[i], device),
            member_out=_splits(member_out[i], device),
            member_in=_splits(member_in[i], device),
        )
        out.append((arrived[i][order], Relay(relayed[i][:, 0].contiguous(), base, distinct[i], hops)))
    return out


def deliver_slots(
    window: Window, routes: Sequence[Route], values: Sequence[torch.Tensor], op: str
) -> list[torch.Tensor]:
    """fp32 [T, K] of each hosted rank -> [N, K] beside its received rows; other ranks' slots carry anything."""
    hops = [_hops(route) for route in routes]
    sends = [take_rows(v, h.rail_token, 0.0) for v, h in zip(values, hops, strict=True)]
    relayed = [v.new_empty(h.relay_slot.shape) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(
        sends, [h.rail_out for h in hops], relayed, [h.rail_in for h in hops], _rail_op(op)
    )
    sends = [take_rows(v, h.member_record, 0.0) for v, h in zip(relayed, hops, strict=True)]
    arrived = [v.new_empty((h.order.shape[0], v.shape[1])) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(sends, [h.member_out for h in hops], arrived, [h.member_in for h in hops], op)
    return [a[h.order] for a, h in zip(arrived, hops, strict=True)]


def collect_slots(
    window: Window, routes: Sequence[Route], values: Sequence[torch.Tensor], op: str
) -> list[torch.Tensor]:
    """fp32 [N or more, K] beside received rows -> [T, K] at home; 0 for empty and dropped slots."""
    hops, K = [_hops(route) for route in routes], values[0].shape[1]
    sends = [_unordered(v, h.order) for v, h in zip(values, hops, strict=True)]
    back = [v.new_empty((h.member.shape[0], K)) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(sends, [h.member_in for h in hops], back, [h.member_out for h in hops], op)
    merged = [_merge(v, h.member_record, h.member, h.relay_slot) for v, h in zip(back, hops, strict=True)]
    home = [v.new_empty((h.rail_token.shape[0], K)) for v, h in zip(values, hops, strict=True)]
    window.exchange_records(merged, [h.rail_in for h in hops], home, [h.rail_out for h in hops], _rail_op(op))
    return [_merge(v, h.rail_token, h.rail_domain, h.slot_domain) for v, h in zip(home, hops, strict=True)]


def _unordered(values_NK: torch.Tensor, order_N: torch.Tensor) -> torch.Tensor:
    """Values in (source rank, token) order, back to the order in which their records came."""
    out = values_NK.new_empty((order_N.shape[0], values_NK.shape[1]))
    out[order_N] = values_NK[: order_N.shape[0]]
    return out


def _merge(
    values_MK: torch.Tensor, record_M: torch.Tensor, owner_M: torch.Tensor, owner_NK: torch.Tensor
) -> torch.Tensor:
    """fp32 [N, K]: each slot's value from the one record of its owner, 0 where nobody owns the slot.

    Added as integers, of which all but one are zero: exact, whatever the order, and the sign of a zero stays.
    """
    mine_MK = owner_NK[record_M.long()] == owner_M[:, None]
    bits_MK = torch.where(mine_MK, values_MK.view(torch.int32), 0)
    out_NK = bits_MK.new_zeros(owner_NK.shape).index_add_(0, record_M.long(), bits_MK)
    return out_NK.view(torch.float32)


def _splits(splits: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(splits, dtype=torch.int32, device=device)


def _rail_records(
    a: Assigned,
    weights: torch.Tensor | None,
    token_X: torch.Tensor,
    domain_X: torch.Tensor,
    slot_domain_TK: torch.Tensor,
    size: int,
) -> torch.Tensor:
    """int32 [X, 1 + 2K (+ K)], by destination domain."""
    member_TK = torch.where(a.slot_rank >= 0, a.slot_rank.remainder(size), -1)
    there_XK = slot_domain_TK[token_X] == domain_X[:, None]
    columns = [token_X[:, None].to(torch.int32)]
    columns += [torch.where(there_XK, values[token_X], -1) for values in (a.slot_row, member_TK)]
    if weights is not None:
        columns.append(torch.where(there_XK, weights.contiguous().view(torch.int32)[token_X], 0))
    return torch.cat(columns, 1)


def _member_records(
    records: torch.Tensor, record_Y: torch.Tensor, member_Y: torch.Tensor, top_k: int
) -> torch.Tensor:
    """int32 [Y, 1 + K (+ K)], by member, out of relayed rail records."""
    mine = records[record_Y]
    here_YK = mine[:, 1 + top_k : 1 + 2 * top_k] == member_Y[:, None]
    columns = [mine[:, :1], torch.where(here_YK, mine[:, 1 : 1 + top_k], -1)]
    if mine.shape[1] > 1 + 2 * top_k:
        columns.append(torch.where(here_YK, mine[:, 1 + 2 * top_k :], 0))
    return torch.cat(columns, 1)


def _pairs(owner_NK: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int64 [M] each: every record n and owner_NK[n, k] that is not -1, by owner, then by record."""
    record, k = (owner_NK >= 0).nonzero(as_tuple=True)
    owner, order = owner_NK[record, k].sort(stable=True)
    return record[order], owner.long()


def _distinct(owner_NK: torch.Tensor, size: int) -> torch.Tensor:
    """The different owners, below `size`, of each row, ascending, then -1."""
    ascending = torch.where(owner_NK < 0, size, owner_NK).sort(1).values
    again = torch.zeros_like(ascending, dtype=torch.bool)
    again[:, 1:] = ascending[:, 1:] == ascending[:, :-1]
    once = torch.where(again, size, ascending).sort(1).values
    return torch.where(once == size, -1, once).to(torch.int32).contiguous()


def _by_source(count_DS: torch.Tensor) -> torch.Tensor:
    """int64 [N]: place of each record in (source domain, index) order, when they came in (index, domain) order."""
    count_DS = count_DS.long()
    came_DS = (count_DS.T.flatten().cumsum(0).view(count_DS.T.shape).T - count_DS).flatten()
    count = count_DS.flatten()
    shift = came_DS - (count.cumsum(0) - count)
    return torch.arange(int(count.sum()), device=count.device) + shift.repeat_interleave(count)


def _on_rail(rank: int, size: int, ranks: int, count_D: torch.Tensor) -> tuple[int, ...]:
    """Splits over all ranks: count_D[d] for the rank of domain d on this rank's rail."""
    splits = torch.zeros(ranks, dtype=torch.int64)
    splits[rank % size :: size] = count_D.cpu().to(torch.int64)
    return tuple(splits.tolist())


def _in_domain(rank: int, size: int, ranks: int, count_S: torch.Tensor) -> tuple[int, ...]:
    """Splits over all ranks: count_S[i] for the i-th rank of this rank's domain."""
    splits = torch.zeros(ranks, dtype=torch.int64)
    first = rank // size * size
    splits[first : first + size] = count_S.cpu().to(torch.int64)
    return tuple(splits.tolist())


def _divide(rank: torch.Tensor, size: int) -> torch.Tensor:
    return rank.div(size, rounding_mode="floor")


def _rail_op(op: str) -> str:
    """The name of the rail's part of an operation."""
    call, what = op.split(".")
    return f"{call}.rail_{what}"


def _hops(route: Route) -> Hops:
    assert route.one_sided is not None
    assert route.one_sided.hops is not None
    return route.one_sided.hops
