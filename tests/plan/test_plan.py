"""The compiled plan against brute force, over every routing of small worlds and over random larger ones."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep._native.plan import (
    PlanTable,
    assign_rows,
    compact_rows,
    count_slots,
    invert_rows,
    pack_meta,
    resolve,
)
from flexep.errors import ArgumentError
from tests.plan.brute import World, largest_cut, padded, rows_of_slots, sent_tokens, slots_by_place


def check_world(world: World) -> None:
    """Every step of the plan, for every rank as source and as receiver, against brute force."""
    table, R = world.table, world.num_ranks
    places = slots_by_place(world)
    counted = [count_slots(idx, table) for idx in world.topk_idx]
    for s, (counts_E, tokens_R) in enumerate(counted):
        assert counts_E.tolist() == [sum(slot[0] == s for slot in slots) for slots in places]
        no_cut = World(world.topk_idx, table, world.alignment, None)
        assert tokens_R.tolist() == [len(tokens) for tokens in sent_tokens(no_cut, s)]

    resolved = resolve(torch.stack([c for c, _ in counted]), table, world.alignment, world.capacity)
    for rank in range(R):
        totals = [len(slots) for slots in places[table.places(rank)]]
        cut = largest_cut(world, totals)
        kept = [min(n, cut) for n in totals]
        assert resolved.kept_E[table.places(rank)].tolist() == kept
        assert resolved.dropped_E[table.places(rank)].tolist() == [
            n - k for n, k in zip(totals, kept, strict=True)
        ]
        assert int(resolved.rows_R[rank]) == sum(padded(k, world.alignment) for k in kept)

    rows = rows_of_slots(world)
    for s, idx in enumerate(world.topk_idx):
        check_source(world, s, idx, rows, resolved)


def check_source(world: World, s: int, idx: torch.Tensor, rows: dict, resolved: object) -> None:
    """Rows, send order, metadata and their inverses of one source rank: dense, then with fixed splits."""
    (T, K), R = idx.shape, world.num_ranks
    sent = sent_tokens(world, s)
    for split in (None, T):
        S = sum(map(len, sent)) if split is None else R * split
        got = assign_rows(idx, s, resolved, world.table, num_send=S, split=split)
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
        check_meta(idx, got)


def check_meta(idx: torch.Tensor, got: object) -> None:
    """What travels with each token: its index, the rows of its slots on that rank, their weights."""
    (T, K), S = idx.shape, got.send_token.shape[0]
    weights = torch.arange(T * K, dtype=torch.float32).view(T, K) + 0.5
    meta = pack_meta(got, weights)
    assert meta.shape == (S, 1 + 2 * K)
    assert torch.equal(pack_meta(got, None), meta[:, : 1 + K])
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
    counts, tokens = count_slots(torch.tensor([[3, -2], [2, 99]], dtype=torch.int32), table)
    assert counts.tolist() == [0, 0, 1]
    assert tokens.tolist() == [0, 1]


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
        (lambda: count_slots(torch.zeros(3, 1, dtype=torch.int64), PlanTable(1, 1)), "topk_idx", torch.int64),
        (lambda: resolve(torch.zeros(2, 2, dtype=torch.int32), PlanTable(3, 2), 1, None), "counts", (2, 2)),
        (lambda: resolve(torch.zeros(1, 1, dtype=torch.int32), PlanTable(1, 1), 0, None), "alignment", 0),
    ],
)
def test_bad_input_names_the_argument_and_its_value(call: object, argument: str, value: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        call()
    assert (caught.value.argument, caught.value.value) == (argument, value)
