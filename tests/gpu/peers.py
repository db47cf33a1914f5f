"""Pools of ranks that are processes with GPUs, and cases for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from flexep.config import WINDOWED
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext

SMALL = Case(ranks=8, experts=11, hidden=64, top_k=3, tokens=33, seed=3, spread="ragged", alignment=8)
# Both modes, layouts and directions; more rows than fit, few rows a chunk, tokens without slots, NaN.
HOW = (
    {},
    {"weights": "inside", "cached": 2},
    {"capacity": "one_over", "layout": "flat"},
    {"capacity": "far_over", "window": "tenth", "dtype": "fp32", "combine_wire": "bf16"},
    {"layout": "flat", "y_layout": "flat", "weights": "inside", "dtype": "fp16", "empty": 0.3},
    {"payload": "nonfinite", "window": "least", "routing": "duplicates"},
    {"hidden": 1024, "tokens": 200, "repeats": 19},
    {"window": "ahead", "weights": "inside", "cached": 2},
    {"window": "ahead", "capacity": "one_over", "layout": "flat"},
    {
        "window": "ahead",
        "hidden": 2048,
        "tokens": 300,
        "dtype": "fp32",
        "fresh": 2,
        "repeats": 4,
    },  # in pieces
)


def shaped(ranks: int, domain_size: int | None) -> list[Case]:
    return [
        replace(SMALL, **{"ranks": ranks, "experts": ranks + 3, "domain_size": domain_size, **how})
        for how in HOW
    ]


def contract(ctx: RankContext, cases: Sequence[Case]) -> list[str]:
    """What one-sided dispatchers get wrong, with the case that shows it; [] is agreement with the oracle's bits."""
    found = [m for case in cases for m in check_dispatchers(case, ctx.group, list(WINDOWED))]
    return [f"{m.case.to_json()}: rank {m.rank}: {m.what}: {m.detail}" for m in found]


def failures(pool: RankPool, cases: Sequence[Case]) -> list[str]:
    return [line for lines in pool.run(contract, list(cases)) for line in lines]
