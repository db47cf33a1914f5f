"""Covering arrays: few rows in which every pair of values of every two axes still meets.

Greedy, one row at a time: start from the uncovered pair that is hardest to place and give each further axis
the value that covers most new pairs. Plain enough to keep here; what the generators on offer lack is the
order of preference among equals (cheap values first), which is what keeps the contract run short.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Row = dict[str, Any]
Allowed = Callable[[Row], bool]
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def pairs_of(row: Row, order: Sequence[str]) -> set[Pair]:
    """Every pair of (axis, value) in a row, axes in `order`."""
    items = [(axis, row[axis]) for axis in order if axis in row]
    return set(itertools.combinations(items, 2))


def covering_array(
    axes: Mapping[str, Sequence[Any]], tiers: Sequence[Allowed], cheap_first: Sequence[str], seed: int = 0
) -> list[Row]:
    """Rows that together hold every pair for which the last of `tiers` says yes.

    `tiers` go from the strictest idea of an acceptable row to the loosest: a pair is placed in the first tier
    that can hold it, so only pairs that must be dear make dear rows. Each is asked about partial rows too
    (missing axes: the kindest assumption) and must be monotone: a refused row stays refused when axes are
    added. Among values that cover equally many pairs the one listed first is taken on the axes `cheap_first`,
    any on the others.
    """
    rng, order = random.Random(seed), list(axes)
    uncovered = {
        pair
        for a, b in itertools.combinations(order, 2)
        for pair in itertools.product(((a, v) for v in axes[a]), ((b, w) for w in axes[b]))
    }
    rank = {(axis, value): i for axis in order for i, value in enumerate(axes[axis])}
    rows: list[Row] = []
    for allowed in tiers:
        todo = [pair for pair in uncovered if allowed(dict(pair))]
        todo.sort(key=lambda pair: (sum(rank[item] for item in pair), str(pair)))
        for pair in reversed(todo):  # the dearest values first: they leave the fewest choices
            if pair not in uncovered:
                continue
            mixed = {axis: v if axis in cheap_first else rng.sample(v, len(v)) for axis, v in axes.items()}
            row = _complete(dict(pair), mixed, allowed, uncovered, rng)
            if row is not None:  # else no row of this tier can hold the pair
                uncovered -= pairs_of(row, order)
                rows.append(row)
    return rows


def _complete(
    row: Row, axes: Mapping[str, Sequence[Any]], allowed: Allowed, uncovered: set[Pair], rng: random.Random
) -> Row | None:
    """Fills the missing axes one by one, stepping back where no value is allowed."""
    order = list(axes)
    missing = [axis for axis in order if axis not in row]
    if not missing:
        return row
    axis = rng.choice(missing)
    place = {name: i for i, name in enumerate(order)}

    def gain(value: Any) -> int:
        mine = (axis, value)
        return sum(
            ((item, mine) if place[item[0]] < place[axis] else (mine, item)) in uncovered
            for item in row.items()
        )

    for value in sorted(
        axes[axis], key=gain, reverse=True
    ):  # a stable sort keeps cheap values first among equals
        if allowed({**row, axis: value}):
            full = _complete({**row, axis: value}, axes, allowed, uncovered, rng)
            if full is not None:
                return full
    return None
