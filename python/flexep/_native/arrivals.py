"""The receiver's side of the plan, and the relay's: how many records come, and what they say.

Shape letters: R ranks, D domains, K top-k, Q relayed records, Y records that leave inside the domain, N received rows,
M expert-major rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from flexep._native._load import _C
from flexep._native._step import carve, int32, ints, run_step, workspace
from flexep._native.operands import INT32_MAX
from flexep._native.plan import HEADER_INTS, PlanTable
from flexep.errors import ArgumentError


@dataclass(frozen=True)
class HopCounts:
    """Records of each hop between this rank and every other: over the rail, then inside the domain. int32.

    rail_out, rail_in, member_out, member_in [R]. arrival [R]: first record of each source rank, in the order in which
    relays send them. relay_base [D + 1]: first record of each source domain over the rail.
    """

    rail_out: torch.Tensor
    rail_in: torch.Tensor
    member_out: torch.Tensor
    member_in: torch.Tensor
    arrival: torch.Tensor
    relay_base: torch.Tensor


@dataclass(frozen=True)
class Peers:
    """Tokens of every rank [R]; those that this rank sends each, send_R, and gets from each, recv_R; the first of them,
    recv_base [R + 1]; `hops` over several domains. int32."""

    tokens_of: torch.Tensor
    send_R: torch.Tensor
    recv_R: torch.Tensor
    recv_base: torch.Tensor
    hops: HopCounts | None


@dataclass(frozen=True)
class Relayed:
    """What a relay passes on: token [Q], -1 tail; slot_send [Q, K], the record that carries each slot, or -1; members
    [Q, K], indices in the domain that hold a slot, ascending, then -1; send_item [Y], the relayed record behind each,
    -1 unused; meta [Y, 1 + K (+ K)]."""

    token: torch.Tensor
    slot_send: torch.Tensor
    members: torch.Tensor
    send_item: torch.Tensor
    meta: torch.Tensor


@dataclass(frozen=True)
class Received:
    """Received rows in (source rank, token) order.

    token [N], -1 tail. rows [N, K]: row of each slot, -1 elsewhere. row_src [M]: n * K + k that fills each row, -1
    padding. weights: fp32 [M], 0 on padding, or flat [N, K], 0 elsewhere; None if none came. order [N]: record of each
    row, -1 tail, if they did not come in order. If asked for: expert [N, K], local expert of each slot, -1 elsewhere;
    row_map [M], received row of each expert-major row, -1 padding.
    """

    token: torch.Tensor
    rows: torch.Tensor
    row_src: torch.Tensor
    weights: torch.Tensor | None
    order: torch.Tensor | None
    expert: torch.Tensor | None = None
    row_map: torch.Tensor | None = None


@dataclass(frozen=True)
class Sizes:
    """Lengths of one rank's tensors: records that leave for ranks or, over the rail, for domains; received (flat) rows;
    expert-major rows; records that are relayed, and those that leave for them inside the domain."""

    left: int
    flat: int
    rows: int
    relayed: int = 0
    handed: int = 0


def exact_sizes(said_Rn: torch.Tensor, table: PlanTable, domains: int, alignment: int, rank: int) -> Sizes:
    """Sizes without a capacity, from what everybody said, int32 [R, HEADER_INTS + E + R (+ D)] on the CPU."""
    counts, E = said_Rn.data_ptr() + 4 * HEADER_INTS, table.num_experts
    sent = _C.SentCounts(
        counts=counts + 4 * E, stride=said_Rn.stride(0), ranks=table.num_ranks, domains=domains
    )
    return Sizes(*_C.exact_sizes(sent, counts, table.view(said_Rn.device), alignment, rank))


def count_peers(sent_RR: torch.Tensor, tokens_R: torch.Tensor, domains: int, rank: int) -> Peers:
    """What goes between this rank and the others.

    Args:
        sent_RR: int32 [R, R (+ D)], rows of any stride: distinct tokens from each rank to each rank (and domain).
        tokens_R: [R] of the same stride: T of every rank.
    """
    device, R = sent_RR.device, sent_RR.shape[0]
    tokens_of, send, recv, base, *hops = carve(
        device, R, R, R, R + 1, *((R, R, R, R, R, domains + 1) if domains else ())
    )
    names = ("rail_out", "rail_in", "member_out", "member_in", "arrival", "relay_base")
    run_step(
        _C.count_peers,
        device,
        sent=_C.SentCounts(counts=sent_RR.data_ptr(), stride=sent_RR.stride(0), ranks=R, domains=domains),
        tokens=tokens_R,
        tokens_stride=tokens_R.stride(0),
        rank=rank,
        tokens_of=tokens_of,
        send=send,
        recv=recv,
        recv_base=base,
        **dict(zip(names, hops or (None,) * len(names), strict=True)),
    )
    return Peers(tokens_of, send, recv, base, HopCounts(*hops) if hops else None)


def relay_records(
    rail_Qn: torch.Tensor, top_k: int, used: torch.Tensor, members: int, num_send: int
) -> Relayed:
    """What a relay passes on of the records that came over the rail: the first used[0] of int32 [Q, 1 + 2K (+ K)].

    `members`: ranks of a domain. `num_send`: Y, at least as many as leave.
    """
    rail_Qn = int32("records", rail_Qn, 2)
    device, Q, K, has_weights = rail_Qn.device, rail_Qn.shape[0], top_k, rail_Qn.shape[1] > 1 + 2 * top_k
    token, slot_send, send_member, send_item = carve(device, Q, Q * K, Q * K, num_send)
    scratch, send_row, counts = carve(device, Q * K, Q * K, members)
    meta = ints(num_send, 1 + K * (1 + has_weights), device=device)
    order = _C.SendOrder(
        rows=Q, top_k=K, owners=members, unit=1, split=-1, num_send=num_send, order=scratch.data_ptr(),
        slot_send=slot_send.data_ptr(), send_row=send_row.data_ptr(), send_first=send_member.data_ptr(),
        send_token=send_item.data_ptr(),
    )  # fmt: skip
    run_step(
        _C.relay_records,
        device,
        rail=rail_Qn,
        has_weights=has_weights,
        used=used,
        token=token,
        order=order,
        send_counts=counts,
        meta=meta,
        workspace=workspace(1, members, device),
    )
    return Relayed(token, slot_send.view(Q, K), send_member.view(Q, K), send_item, meta)


def receive_rows(
    meta_Nn: torch.Tensor,
    top_k: int,
    num_rows: int,
    *,
    flat_weights: bool = False,
    peers: Peers | None = None,
    start_L: torch.Tensor | None = None,
) -> Received:
    """Reads the records that came, int32 [N, 1 + K (+ K)].

    Args:
        num_rows: M. flat_weights: weights per slot of received rows, not per expert-major row.
        peers: how many records have come, and in which order; None: all, as they lie.
        start_L: first row of each local expert, if `expert` and `row_map` are asked for.
    """
    meta_Nn = int32("records", meta_Nn, 2)
    device, (N, width), K = meta_Nn.device, meta_Nn.shape, top_k
    if N * K > INT32_MAX:
        raise ArgumentError("received", N, f"at most {INT32_MAX} slots")
    arrival = None if peers is None or peers.hops is None else peers.hops.arrival
    maps = (0, 0) if start_L is None else (N * K, num_rows)
    token, rows, row_src, order, expert, row_map = carve(
        device, N, N * K, num_rows, 0 if arrival is None else N, *maps
    )
    weights = None  # the caller's in the end, so not of one memory with the plan
    if width > 1 + K:
        weights = torch.empty((N, K) if flat_weights else (num_rows,), dtype=torch.float32, device=device)
    run_step(
        _C.receive_rows,
        device,
        meta=meta_Nn,
        top_k=K,
        has_weights=weights is not None,
        received=N,
        num_rows=num_rows,
        ranks=0 if peers is None else peers.tokens_of.shape[0],
        base=None if peers is None else peers.recv_base,
        arrival=arrival,
        experts=0 if start_L is None else start_L.shape[0],
        start=start_L,
        token=token,
        rows=rows,
        weights=weights if flat_weights else None,
        expert=None if start_L is None else expert,
        row_src=row_src,
        row_weights=None if flat_weights else weights,
        row_map=None if start_L is None else row_map,
        order=None if arrival is None else order,
    )
    received = Received(token, rows.view(N, K), row_src, weights, None if arrival is None else order)
    return received if start_L is None else replace(received, expert=expert.view(N, K), row_map=row_map)
