"""What to reach, and what others have published: rows of bf16 at H = 7168, E = 256, K = 8."""

from __future__ import annotations

import math
from typing import Any

LEVELS = ("must", "aim", "stretch")
TOKENS = 4096  # the targets in microseconds are for so many a rank, and grow with them
COPY_RATE = 392.0  # GB/s of the copy engine that they go with

# Two H200, (op, layout, alignment): microseconds by level. Flat rows have no padding.
TWO_GPUS: dict[tuple[str, str, int | None], tuple[float, float, float]] = {
    ("dispatch", "flat", None): (240.0, 187.0, 166.0),
    ("dispatch", "expert_major", 16): (300.0, 205.0, 175.0),
    ("dispatch", "expert_major", 128): (320.0, 240.0, 205.0),
    ("combine", "flat", None): (225.0, 187.0, 170.0),
    ("combine", "expert_major", 16): (265.0, 205.0, 175.0),
}
OF_COPY_ENGINE = (0.72, 0.80, 0.88)  # four and eight GPUs: the share of the copy engine's rate by level
EIGHT_GPUS_MUST = 300.0  # GB/s between a rank and the others

# Eight GPUs of one host: who, op, GB/s between a rank and the others. bf16 rows unless the name says fp8.
PUBLISHED: tuple[tuple[str, str, float], ...] = (
    ("DeepEP V1, 8xH100, 20 SMs", "dispatch", 288.0),
    ("DeepEP V1, 8xH100, 20 SMs", "combine", 251.0),
    ("DeepEP V1, 8xH20", "dispatch", 302.0),
    ("DeepEP V1, 8xH20", "combine", 291.0),
    ("UCCL-EP, 8xH200, fp8", "dispatch", 280.0),
    ("UCCL-EP, 8xH200", "combine", 279.0),
    ("HybridEP, 8xH100", "dispatch", 273.3e3 / 661),
    ("HybridEP, 8xH100", "combine", 273.3e3 / 624),
    ("NCCL all-to-all, 8xH100", "dispatch", 273.3e3 / 1265),
    ("NCCL all-to-all, 8xH100", "combine", 273.3e3 / 1277),
)


def rate(row: dict[str, Any], must_cross_bytes: dict[str, float]) -> float:
    """GB/s of the bytes that must cross."""
    return float(must_cross_bytes[row["op"]] / row["median_us"] / 1e3)


def fastest_other(row: dict[str, Any], results: list[dict[str, Any]]) -> float:
    """Microseconds of the fastest other library that does the same in the same run."""
    same = ("op", "layout", "wire", "tokens")
    times = [
        other["median_us"]
        for other in results
        if other["library"] not in ("flexep", "copy_engine")
        and all(other[name] == row[name] for name in same)
    ]
    return min(times, default=math.inf)


def reached(
    row: dict[str, Any],
    must_cross_bytes: dict[str, float],
    copied: dict[str, Any] | None,
    fastest_us: float = math.inf,
) -> list[str] | None:
    """The levels that a row reaches; None where there is no target for it. `copied`: the copy engine of its run;
    `fastest_us`: of other libraries there, which `must` is to beat on two GPUs. Libraries that were absent stand in
    with the microseconds of the table."""
    if copied is None or (row["wire"], row["hidden"], row["experts"], row["top_k"]) != ("bf16", 7168, 256, 8):
        return None
    if row["op"] not in ("dispatch", "combine"):
        return None
    if row["ranks"] == 2:
        alignment = None if row["layout"] == "flat" else row["alignment"]
        allowed = TWO_GPUS.get((row["op"], row["layout"], alignment))
        if allowed is None:
            return None
        copy_rate = copied[row["op"]]["bytes_per_second"] / 1e9
        scale = row["tokens"] / TOKENS * COPY_RATE / copy_rate
        limits = [us * scale for us in allowed]
        limits[0] = min(limits[0], fastest_us)
        return [level for level, us in zip(LEVELS, limits, strict=True) if row["median_us"] <= us]
    if row["ranks"] not in (4, 8):
        return None
    share = row["ratio_to_copy_engine"]
    levels = [level for level, least in zip(LEVELS, OF_COPY_ENGINE, strict=True) if share >= least]
    slow = row["ranks"] == 8 and rate(row, must_cross_bytes) < EIGHT_GPUS_MUST
    return [] if slow else levels


def beside_published(row: dict[str, Any], must_cross_bytes: dict[str, float]) -> list[dict[str, Any]]:
    """A row of eight GPUs beside every published figure of its operation."""
    ours = rate(row, must_cross_bytes)
    return [
        {"who": who, "op": op, "published_gb_s": figure, "gb_s": ours, "ratio": ours / figure}
        for who, op, figure in PUBLISHED
        if op == row["op"]
    ]
