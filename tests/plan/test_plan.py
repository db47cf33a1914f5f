"""The compiled plan against brute force, over every routing of small worlds and over random larger ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep._native.arrivals import count_peers, exact_sizes, receive_rows, relay_records
from flexep._native.plan import (
    HEADER_INTS,
    Counted,
    PlanTable,
    assign_rows,
    compact_rows,
    count_slots,
    invert_rows,
    resolve,
)
from flexep.errors import ArgumentError
from tests.plan.brute import World, largest_cut, padded, rows_of_slots, sent_tokens, slots_by_place


def check_world(world: World) -> None:
    """Every step of the plan, for every rank as source and as receiver, against brute force."""
    table, R, E = world.table, world.num_ranks, world.table.num_experts
    places = slots_by_place(world)
    counted = [count_slots(idx, table) for idx in world.topk_idx]
    no_cut = World(world.topk_idx, table, world.alignment, None)
    for s, one in enumerate(counted):
        _, counts_E, tokens_R = one.said.split([HEADER_INTS, E, R])
        assert counts_E.tolist() == [sum(slot[0] == s for slot in slots) for slots in places]
        assert tokens_R.tolist() == [len(tokens) for tokens in sent_tokens(no_cut, s)]

    said = torch.stack([one.said for one in counted])
    resolved = resolve(said[:, HEADER_INTS : HEADER_INTS + E], table, world.alignment, world.capacity)
    for rank in range(R):
        totals = [len(slots) for slots in places[table.places(rank)]]
        cut = largest_cut(world, totals)
        kept = [min(n, cut) for n in totals]
        assert resolved.kept_E[table.places(rank)].tolist() == kept
        assert resolved.dropped_E[table.places(rank)].tolist() == [
            n - k for n, k in zip(totals, kept, strict=True)
        ]
        padded_counts = [padded(k, world.alignment) for k in kept]
        assert resolved.padded_E[table.places(rank)].tolist() == padded_counts
        assert int(resolved.rows_R[rank]) == sum(padded_counts)
        if world.capacity is None:
            sizes = exact_sizes(said, table, 0, world.alignment, rank)
            assert sizes.rows == sum(padded_counts)
            assert sizes.left == sum(map(len, sent_tokens(world, rank)))
            assert sizes.flat == sum(len(sent_tokens(world, s)[rank]) for s in range(R))

    rows = rows_of_slots(world)
    for s, one in enumerate(counted):
        check_source(world, s, one, rows, resolved)


def check_source(world: World, s: int, counted: Counted, rows: dict, resolved: object) -> None:
    """Rows, send order and records of one source rank: dense, then with fixed splits."""
    (T, K), R = counted.topk_idx.shape, world.num_ranks
    sent, weights = sent_tokens(world, s), torch.arange(T * K, dtype=torch.float32).view(T, K) + 0.5
    for split in (None, T):
        S = sum(map(len, sent)) if split is None else R * split
        got, bare = (
            assign_rows(
                counted, s, resolved, world.table, num_send=S, split=split, records=True, weights_TK=w
            )
            for w in (weights, None)
        )
        begin = [sum(map(len, sent[:r])) if split is None else r * split for r in range(R)]
        send_token = [-1] * S
        for r, tokens in enumerate(sent):
            send_token[begin[r] : begin[r] + len(tokens)] = tokens
        assert got.send_token.tolist() == send_token
        assert got.send_counts.tolist() == [len(tokens) for tokens in sent]
        for t in range(T):
            ranks = [r for r in range(R) if t in sent[r]]
            positions = [begin[r] + sent[r].index(t) for r in ranks]
            empty = [-1] * (K - len(ranks))
            assert got.send_rank[t].tolist() == ranks + empty
            assert got.send_row[t].tolist() == positions + empty
            for k in range(K):
                rank, row = rows.get((s, t, k), (-1, -1))
                assert (int(got.slot_rank[t, k]), int(got.slot_row[t, k])) == (rank, row)
                assert int(got.slot_send[t, k]) == (positions[ranks.index(rank)] if rank >= 0 else -1)
        assert torch.equal(bare.meta, got.meta[:, : 1 + K])
        check_meta(got.meta, weights, got)


def check_meta(meta: torch.Tensor, weights: torch.Tensor, got: object) -> None:
    """What travels with each token: its index, the rows of its slots on that rank, their weights."""
    K, S = weights.shape[1], got.send_token.shape[0]
    assert meta.shape == (S, 1 + 2 * K)
    values = meta[:, 1 + K :].contiguous().view(torch.float32)
    for i, t in enumerate(got.send_token.tolist()):
        assert int(meta[i, 0]) == t
        for k in range(K):
            here = t >= 0 and int(got.slot_send[t, k]) == i
            assert int(meta[i, 1 + k]) == (int(got.slot_row[t, k]) if here else -1)
            assert float(values[i, k]) == (float(weights[t, k]) if here else 0.0)


def small_worlds() -> Iterator[World]:
    """Every routing of every shape with at most six slots, dense and with capacities that just fit and just do not."""
    for R, E, K, tokens in [
        (1, 1, 1, [3]), (1, 2, 2, [2]), (1, 3, 1, [3]), (2, 1, 1, [2, 1]), (2, 2, 2, [1, 1]), (2, 3, 2, [1, 1]),
        (2, 3, 1, [0, 3]), (2, 2, 1, [3, 2]), (3, 2, 1, [1, 2, 1]), (3, 3, 2, [1, 0, 1]), (3, 4, 1, [2, 1, 1]),
    ]:  # fmt: skip
        for choice in itertools.product(range(-1, E), repeat=sum(tokens) * K):
            flat = torch.tensor(choice, dtype=torch.int32).view(-1, K)
            topk_idx = list(flat.split(tokens))
            for alignment, capacity in ((1, None), (2, None), (1, E), (2, 2 * E)):
                yield World(topk_idx, PlanTable(E, R), alignment, capacity)


def test_all_small_worlds() -> None:
    number = 0
    for world in small_worlds():
        check_world(world)
        number += 1
    assert number > 5000


@given(st.data())
def test_random_worlds(data: st.DataObject) -> None:
    R, E, K = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    placement = data.draw(st.none() | st.lists(st.integers(0, R - 1), min_size=E, max_size=E))
    table = PlanTable(E, R, placement)
    alignment = data.draw(st.sampled_from([1, 3, 8]))
    least = max(table.num_local(r) for r in range(R)) * alignment
    capacity = data.draw(st.none() | st.integers(least, least + 20))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    tokens = data.draw(st.lists(st.integers(0, 9), min_size=R, max_size=R))
    topk_idx = [torch.randint(-1, E, (t, K), dtype=torch.int32, generator=generator) for t in tokens]
    check_world(World(topk_idx, table, alignment, capacity))


def test_a_place_beyond_the_table_is_an_empty_slot() -> None:
    table = PlanTable(3, 2)
    for ids in ([[3, -2], [2, 99]], [[2**40, -(2**40)], [2, 2**32]]):
        said = count_slots(torch.tensor(ids, dtype=torch.int64), table, stamp=(7, 8, 9, 10)).said
        assert said.tolist() == [3, 7, 8, 9, 10, *(0, 0, 1), *(0, 1)]


def test_what_is_wrong_is_counted() -> None:
    table, masked = PlanTable(3, 2), torch.tensor(5)
    idx, weights = torch.tensor([[0, -1], [7, 2]]), torch.tensor([[0.5, float("nan")], [0.0, float("inf")]])
    assert int(count_slots(idx, table, masked=masked).said[0]) == 1
    assert int(count_slots(idx, table, weights_TK=weights).said[0]) == 2
    assert int(masked) == 6


def test_table_places_experts_rank_by_rank() -> None:
    table = PlanTable(7, 3)
    assert [table.num_local(r) for r in range(3)] == [3, 2, 2]
    moved = PlanTable(4, 3, [2, 0, 2, 0])
    assert moved.expert_of_place.tolist() == [1, 3, 0, 2]
    assert [moved.num_local(r) for r in range(3)] == [2, 0, 2]
    assert moved.rank_of_place.tolist() == [0, 0, 2, 2]


def test_invert_rows_is_the_transpose() -> None:
    rows = torch.tensor([[2, -1], [0, 4]], dtype=torch.int32)
    assert invert_rows(rows, 6).tolist() == [2, -1, 0, -1, 3, -1]
    assert invert_rows(rows[:0], 2).tolist() == [-1, -1]


def test_received_records_are_read_into_lists_and_their_transpose() -> None:
    weights = torch.tensor([[0.5, 0.0], [2.0, 3.0]])
    records = torch.tensor([[4, 2, -1], [6, 0, 4]], dtype=torch.int32)
    meta = torch.cat([records, weights.view(torch.int32)], 1)
    got = receive_rows(meta, 2, 6)
    assert (got.token.tolist(), got.rows.tolist()) == ([4, 6], [[2, -1], [0, 4]])
    assert got.row_src.tolist() == [2, -1, 0, -1, 3, -1] == invert_rows(got.rows, 6).tolist()
    assert got.weights is not None
    assert got.weights.tolist() == [2.0, 0.0, 0.5, 0.0, 3.0, 0.0]
    flat = receive_rows(meta, 2, 6, flat_weights=True).weights
    assert torch.equal(flat, weights)
    assert receive_rows(records, 2, 6).weights is None


def test_a_tail_of_records_that_never_came_is_cleared() -> None:
    meta = torch.full((3, 5), 3, dtype=torch.int32)
    sent_RR, tokens_R = torch.tensor([[1, 1], [2, 0]], dtype=torch.int32), torch.tensor([1, 2])
    peers = count_peers(sent_RR, tokens_R.int(), 0, 1)
    assert peers.recv_base.tolist() == [0, 1, 1]
    got = receive_rows(meta, 2, 4, flat_weights=True, peers=peers)
    assert (got.token.tolist(), got.rows.tolist()) == ([3, -1, -1], [[3, 3], [-1, -1], [-1, -1]])
    assert got.weights is not None
    assert not got.weights[1:].any()


def for_ranks(meta: torch.Tensor, counts_R: torch.Tensor) -> list[torch.Tensor]:
    """The records that leave for each rank."""
    return list(meta[: int(counts_R.sum())].split(counts_R.tolist()))


def route_over_domains(world: World, domains: int, slack: int) -> list[tuple]:
    """(token, source, rows) that each rank receives over two hops, each buffer `slack` longer than it needs to be."""
    table, R, E, K = world.table, world.num_ranks, world.table.num_experts, world.topk_idx[0].shape[1]
    S = R // domains
    counted = [count_slots(idx, table, domains=domains) for idx in world.topk_idx]
    said = torch.stack([one.said for one in counted])
    resolved = resolve(said[:, HEADER_INTS : HEADER_INTS + E], table, world.alignment, world.capacity)
    assigned = [
        assign_rows(one, s, resolved, table, num_send=one.topk_idx.shape[0] * min(K, domains), records=True)
        for s, one in enumerate(counted)
    ]
    kept = torch.stack([a.send_counts for a in assigned])
    if world.capacity is None:
        assert torch.equal(kept, said[:, HEADER_INTS + E :])
    tokens = torch.tensor([len(idx) for idx in world.topk_idx], dtype=torch.int32)
    peers = [count_peers(kept, tokens, domains, rank) for rank in range(R)]
    hops = [p.hops for p in peers]
    sent = [for_ranks(a.meta, h.rail_out) for a, h in zip(assigned, hops, strict=True)]
    relayed = []
    for rank in range(R):
        rail = torch.cat([sent[s][rank] for s in range(R)])
        assert [len(sent[s][rank]) for s in range(R)] == hops[rank].rail_in.tolist()
        junk = torch.full((slack, rail.shape[1]), 99, dtype=torch.int32)
        relayed.append(
            relay_records(
                torch.cat([rail, junk]), K, hops[rank].relay_base[-1:], S, len(rail) * min(K, S) + slack
            )
        )
        assert relayed[-1].token[len(rail) :].tolist() == [-1] * slack
    passed = [for_ranks(r.meta, h.member_out) for r, h in zip(relayed, hops, strict=True)]
    out = []
    for rank in range(R):
        came = torch.cat([passed[relay][rank] for relay in range(R)])
        assert [len(passed[relay][rank]) for relay in range(R)] == hops[rank].member_in.tolist()
        junk = torch.full((slack, came.shape[1]), 0, dtype=torch.int32)
        got = receive_rows(torch.cat([came, junk]), K, 0, peers=peers[rank])
        assert got.token[len(came) :].tolist() == got.order[len(came) :].tolist() == [-1] * slack
        sources = torch.arange(R).repeat_interleave(peers[rank].recv_R.long()).tolist()
        out.append(
            [
                (s, t, tuple(row))
                for s, t, row in zip(sources, got.token.tolist(), got.rows.tolist(), strict=False)
            ]
        )
    return out


@given(st.data())
def test_records_over_two_hops_arrive_by_source_and_token(data: st.DataObject) -> None:
    domains, size = data.draw(st.integers(2, 4)), data.draw(st.integers(1, 3))
    R, E, K = domains * size, data.draw(st.integers(1, 12)), data.draw(st.integers(1, 5))
    table, generator = PlanTable(E, R), torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    capacity = data.draw(st.none() | st.integers(2 * E, 2 * E + 10))
    tokens = data.draw(st.lists(st.integers(0, 7), min_size=R, max_size=R))
    topk_idx = [torch.randint(-1, E, (t, K), dtype=torch.int32, generator=generator) for t in tokens]
    world = World(topk_idx, table, 2, capacity)
    rows = rows_of_slots(world)
    want: list[list[tuple]] = [[] for _ in range(R)]
    for s in range(R):
        for rank, sent in enumerate(sent_tokens(world, s)):
            for t in sent:
                slots = [rows.get((s, t, k), (-1, -1)) for k in range(K)]
                want[rank].append((s, t, tuple(row if r == rank else -1 for r, row in slots)))
    for slack in (0, 3):
        assert route_over_domains(world, domains, slack) == want


def test_compact_rows_keeps_order_and_clears_other_ranks() -> None:
    rows = torch.tensor([[5, 1], [-1, -1], [2, 7], [-1, 3]], dtype=torch.int32)
    ranks = torch.tensor([[0, 1], [-1, -1], [1, 1], [-1, 0]], dtype=torch.int32)
    source, kept = compact_rows(rows, 3)
    assert (source.tolist(), kept.tolist()) == ([0, 2, 3], [[5, 1], [2, 7], [-1, 3]])
    source, kept = compact_rows(rows, 3, rows_rank_MK=ranks, rank=1)
    assert (source.tolist(), kept.tolist()) == ([0, 2, -1], [[-1, 1], [2, 7], [-1, -1]])


@pytest.mark.parametrize(
    ("call", "argument", "value"),
    [
        (lambda: PlanTable(0, 1), "num_experts", 0),
        (lambda: PlanTable(1, 0), "num_ranks", 0),
        (lambda: PlanTable(2, 2, [0]), "placement", [0]),
        (lambda: PlanTable(2, 2, [0, 2]), "placement", 2),
        (lambda: count_slots(torch.zeros(3, dtype=torch.int32), PlanTable(1, 1)), "topk_idx", (3,)),
        (lambda: count_slots(torch.zeros(3, 1, dtype=torch.int16), PlanTable(1, 1)), "topk_idx", torch.int16),
        (lambda: resolve(torch.zeros(2, 2, dtype=torch.int32), PlanTable(3, 2), 1, None), "counts", (2, 2)),
        (lambda: resolve(torch.zeros(1, 1, dtype=torch.int32), PlanTable(1, 1), 0, None), "alignment", 0),
    ],
)
def test_bad_input_names_the_argument_and_its_value(call: object, argument: str, value: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert (caught.value.argument, caught.value.value) == (argument, value)
