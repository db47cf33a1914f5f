"""Covering arrays hold every possible pair, and the conformance array stays small enough to run."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from flexep.testing.axes import AXES, DEFAULT_LIMIT, allowed, covering_cases
from flexep.testing.covering import covering_array, pairs_of


def every_pair(axes):
    for a, b in itertools.combinations(axes, 2):
        for v, w in itertools.product(axes[a], axes[b]):
            yield (a, v), (b, w)


@given(st.lists(st.integers(1, 5), min_size=2, max_size=6), st.integers(0, 5))
def test_every_pair_meets(sizes: list[int], seed: int) -> None:
    axes = {f"axis {i}": tuple(range(n)) for i, n in enumerate(sizes)}
    rows = covering_array(axes, [lambda row: True], (), seed)
    assert all(set(row) == set(axes) for row in rows)
    covered = set().union(*(pairs_of(row, list(axes)) for row in rows))
    assert covered == set(every_pair(axes))
    assert len(rows) <= sizes[0] * sizes[1] * len(sizes) ** 2


def test_refused_rows_never_appear_and_every_other_pair_does() -> None:
    axes = {"a": (0, 1, 2), "b": (0, 1, 2), "c": (0, 1, 2, 3), "d": ("x", "y")}

    def fine(row):
        return row.get("a", 0) + row.get("b", 0) + row.get("c", 0) <= 4 and (
            row.get("d") != "y" or row.get("a") != 1
        )

    rows = covering_array(axes, [fine], ("a", "b", "c"))
    assert all(fine(row) for row in rows)
    possible = set()
    for values in itertools.product(*axes.values()):
        row = dict(zip(axes, values, strict=True))
        if fine(row):
            possible |= pairs_of(row, list(axes))
    assert set().union(*(pairs_of(row, list(axes)) for row in rows)) == possible


def test_dear_rows_only_where_a_pair_needs_them() -> None:
    axes = {"a": (1, 10, 100), "b": (1, 10, 100), "c": (1, 2)}

    def tier(limit):
        return lambda row: row.get("a", 1) * row.get("b", 1) * row.get("c", 1) <= limit

    rows = covering_array(axes, [tier(200), tier(10**6)], ("a", "b", "c"))
    dear = [row for row in rows if not tier(200)(row)]
    assert sorted((row["a"], row["b"]) for row in dear) == [(10, 100), (100, 10), (100, 100)]


def test_the_conformance_array_covers_every_axis_value_within_its_limit() -> None:
    cases = covering_cases((1, 2, 3, 4, 8))
    assert all(case.elements <= DEFAULT_LIMIT for case in cases)
    for field in set(AXES) & set(vars(cases[0])) - {"experts", "capacity"}:
        assert {getattr(case, field) for case in cases} == set(AXES[field]), field
    assert {case.ranks for case in cases} == {1, 2, 3, 4, 8}
    assert {case.transport for case in cases} == {"process", "local"}
    shapes = {(case.ranks, case.domain_size) for case in cases}
    assert shapes > {(2, 1), (4, 2), (8, 8), (8, 4), (8, 2)}
    assert {(case.tokens, case.hidden) for case in cases} == {
        (t, h)
        for t, h in itertools.product(AXES["tokens"], AXES["hidden"])
        if allowed({"tokens": t, "hidden": h})
    }
