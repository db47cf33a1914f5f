"""The axes of the conformance list, and rows of them made into cases: covering arrays and random samples."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any

from flexep.testing.case import (
    CAPACITIES,
    DTYPES,
    LAYOUTS,
    PAYLOADS,
    PLACEMENTS,
    ROUTINGS,
    SPREADS,
    WEIGHTS,
    WINDOWS,
    Case,
)
from flexep.testing.covering import Row, covering_array

DEFAULT_LIMIT = 2**26  # R * T * K * H of a case, times its uses
USES = {"once": 1, "cached": 3, "fresh": 2, "repeated": 2}

SIZES = ("tokens", "hidden", "top_k", "experts", "alignment", "use")  # cheap values first
AXES: dict[str, Sequence[Any]] = {
    "tokens": (7, 1, 2, 63, 64, 65, 0, 128, 4095, 4096),
    "hidden": (16, 8, 256, 384, 2048, 2560, 2880, 4096, 5120, 6144, 7168, 8192, 12288),
    "top_k": (2, 1, 6, 8, 9, 16, 32),
    "experts": ("R", "R-1", 8, 60, 64, 72, 160, 256, 288, 512),
    "routing": ROUTINGS,
    "spread": SPREADS,
    "empty": (0.0, 0.1, 0.5, 1.0),
    "placement": PLACEMENTS,
    "alignment": (16, 1, 8, 32, 64, 128, 256),
    "capacity": ("none", *((c, o) for c in CAPACITIES[1:] for o in ("error", "drop"))),
    "layouts": LAYOUTS,
    "weights": WEIGHTS,
    "dtype": tuple(DTYPES),
    "combine_wire": (None, *DTYPES),
    "domain": ("flat", 1, 2, 3, 4, 8, "whole"),
    "use": tuple(USES),
    "headroom": (0, 5),
    "payload": PAYLOADS,
    "window": WINDOWS,
}
LEAST_TOKENS = 128  # the most with one token a chunk: every chunk is a hand-shake of all ranks


def allowed(row: Row, limit: int = DEFAULT_LIMIT) -> bool:
    """Whether a (partial) row makes sense and is small enough."""
    size = row.get("domain", "flat")
    least_ranks = 2 * size if isinstance(size, int) and size > 1 else 1
    ranks, times = row.get("ranks", least_ranks), 3 if row.get("routing") == "W6_rotating_hot" else 1
    times *= USES[row.get("use", "once")]
    if ranks * row.get("tokens", 0) * row.get("top_k", 1) * row.get("hidden", 8) * times > limit:
        return False
    if row.get("layouts") == ("flat", "flat") and row.get("weights") == "combine":
        return False
    if row.get("window") == "least" and row.get("tokens", 0) > LEAST_TOKENS:
        return False
    if not fits(size, ranks):
        return False
    # 512 experts padded to 256 rows each are 2^17 rows of nothing: bound the padding like the tokens
    padding = num_experts(row.get("experts", "R-1"), ranks) * row.get("alignment", 1)
    return padding * row.get("hidden", 8) <= limit


def fits(domain: str | int, ranks: int) -> bool:
    """Whether a value of the domain axis says something of its own about this many ranks."""
    return not isinstance(domain, int) or domain == 1 or (ranks % domain == 0 and domain < ranks)


def num_experts(value: str | int, ranks: int) -> int:
    """E from a value of the experts axis."""
    return {"R": ranks, "R-1": max(1, ranks - 1)}[value] if isinstance(value, str) else value


def case_of(row: Row, seed: int, transport: str = "process") -> Case:
    """The case that a full row (with "ranks") describes."""
    ranks, capacity, use = row["ranks"], row["capacity"], row["use"]
    domain = {"flat": None, "whole": ranks}.get(row["domain"], row["domain"])
    plain = {f.name for f in fields(Case)} & set(AXES) - {"experts", "capacity"}
    return Case(
        ranks=ranks,
        experts=num_experts(row["experts"], ranks),
        seed=seed,
        capacity="none" if capacity == "none" else capacity[0],
        overflow="drop" if capacity == "none" else capacity[1],
        layout=row["layouts"][0],
        y_layout=row["layouts"][1],
        domain_size=domain,
        fresh=3 if row["routing"] == "W6_rotating_hot" else 2 if use == "fresh" else 1,
        cached=2 if use == "cached" else 0,
        repeats=1 if use == "repeated" else 0,
        transport=transport,
        **{name: row[name] for name in plain},
    )


def covering_cases(
    ranks: Sequence[int], axes: Mapping[str, Sequence[Any]] = AXES, limit: int = DEFAULT_LIMIT, seed: int = 0
) -> list[Case]:
    """Cases in which every possible pair of values meets, the number of ranks and the transport being axes
    too."""
    everything = {**axes, "ranks": tuple(ranks), "transport": ("process", "local")}
    everything["domain"] = [size for size in axes["domain"] if any(fits(size, r) for r in ranks)]
    sizes = [limit >> shift for shift in (8, 6, 4, 2, 1, 0)]
    rows = covering_array(everything, [partial(allowed, limit=size) for size in sizes], SIZES, seed)
    return [case_of(row, seed + i, transport=row["transport"]) for i, row in enumerate(rows)]


def random_cases(ranks: int, count: int, seed: int, limit: int = 2**20) -> list[Case]:
    """`count` random cases of R = `ranks`, each no larger than `limit` (or as small as the ranks allow);
    every fourth runs in a local group."""
    rng = random.Random(seed)
    cases: list[Case] = []
    while len(cases) < count:
        row = {"ranks": ranks, **{axis: rng.choice(values) for axis, values in AXES.items()}}
        if rng.random() < 0.3:
            row["capacity"] = "none"
        if row["empty"] == 1.0 and rng.random() < 0.8:  # nothing to send is worth a few cases, not a quarter
            continue
        if allowed(row, max(limit, ranks * 2**12)):
            transport = "local" if len(cases) % 4 == 3 else "process"
            cases.append(case_of(row, rng.randrange(2**31), transport=transport))
    return cases
