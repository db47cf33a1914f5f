"""The plan of one rank in one step: against brute force, and against the steps of many ranks with one."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep._native.plan import (
    HEADER_INTS,
    PlanTable,
    assign_rows,
    count_slots,
    invert_rows,
    plan_permutation,
    resolve,
)
from flexep.errors import ArgumentError
from tests.plan.brute import World, padded, rows_of_slots


def check(idx: torch.Tensor, E: int, alignment: int, num_rows: int | None) -> None:
    """Rows, their sources and the counts of `idx`, whose ids may lie outside the experts."""
    (T, K), inside = idx.shape, torch.where((idx < 0) | (idx >= E), -1, idx).int()
    rows = rows_of_slots(World([inside], PlanTable(E, 1), alignment, num_rows))
    kept, asked = [0] * E, [0] * E
    row_map = torch.full((T, K), -1, dtype=torch.int32)
    for t, k in itertools.product(range(T), range(K)):
        e, (_, row) = int(inside[t, k]), rows.get((0, t, k), (0, -1))
        row_map[t, k] = row
        if e >= 0:
            asked[e] += 1
            kept[e] += row >= 0
    used = sum(padded(n, alignment) for n in kept)
    row_src = torch.full((used if num_rows is None else num_rows,), -1, dtype=torch.int32)
    row_src[row_map[row_map >= 0].long()] = (row_map.flatten() >= 0).nonzero().flatten().int()

    for given_idx in (idx.int(), idx.long()):
        ids, outside = torch.full((T, K), -77, dtype=torch.int32), torch.full((1,), -77, dtype=torch.int32)
        got = plan_permutation(given_idx, E, alignment, num_rows, ids_TK=ids, outside=outside)
        assert torch.equal(got[0], row_map)
        assert torch.equal(got[1], row_src)
        assert got[2].tolist() == kept
        assert got[3].tolist() == [padded(n, alignment) for n in kept]
        assert got[4].tolist() == [a - n for a, n in zip(asked, kept, strict=True)]
        assert torch.equal(ids, inside)
        assert int(outside) == int(((idx < -1) | (idx >= E)).sum())


def test_all_small_worlds() -> None:
    for T, K, E in ((0, 2, 2), (1, 1, 1), (3, 1, 3), (2, 2, 2), (1, 4, 2), (2, 2, 3)):
        for choice in itertools.product(range(-2, E + 1), repeat=T * K):
            idx = torch.tensor(choice, dtype=torch.int64).view(T, K)
            for alignment, num_rows in ((1, None), (2, None), (1, E), (2, 2 * E), (2, 2 * E + 3)):
                check(idx, E, alignment, num_rows)


@given(
    T=st.integers(0, 40), K=st.integers(1, 6), E=st.integers(1, 12), alignment=st.sampled_from([1, 2, 3, 8]),
    extra=st.none() | st.integers(0, 60), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_random_worlds(T: int, K: int, E: int, alignment: int, extra: int | None, seed: int) -> None:
    idx = torch.randint(-2, E + 2, (T, K), generator=torch.Generator().manual_seed(seed))
    check(idx, E, alignment, None if extra is None else E * alignment + extra)


@pytest.mark.parametrize("num_rows", [None, 0, 100, 3000, 20000])
def test_the_steps_of_many_ranks_say_the_same_of_one(num_rows: int | None) -> None:
    idx, table = torch.randint(-1, 64, (1500, 6), dtype=torch.int32), PlanTable(64, 1)
    counted = count_slots(idx, table)
    resolved = resolve(counted.said[None, HEADER_INTS : HEADER_INTS + 64], table, 16, num_rows)
    row_map = assign_rows(counted, 0, resolved, table, num_send=1500).slot_row
    row_src = invert_rows(row_map, int(resolved.rows_R[0]) if num_rows is None else num_rows)
    got = plan_permutation(idx, 64, 16, num_rows)
    for value, want in zip(got, (row_map, row_src, resolved.kept_E), strict=False):
        assert torch.equal(value, want)
    assert torch.equal(got[4], resolved.dropped_E)


def test_bad_input_names_the_argument() -> None:
    idx = torch.zeros(4, 2, dtype=torch.int32)
    for argument, call in (
        ("topk_idx", lambda: plan_permutation(idx[0], 3, 1, None)),
        ("topk_idx", lambda: plan_permutation(idx.float(), 3, 1, None)),
        ("alignment", lambda: plan_permutation(idx, 3, 2**30, None)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
