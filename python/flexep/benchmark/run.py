"""A run: one case, or the same on ranks that are there, and what it leaves."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

from flexep.benchmark.case import BenchCase
from flexep.benchmark.columns import START_TIMEOUT, Run
from flexep.benchmark.copy_engine import crossing_bytes
from flexep.benchmark.machine import COPY_BYTES, copy_facts, load, machine_facts, versions
from flexep.errors import Unavailable
from flexep.testing.pool import RankPool

Progress = Callable[[str, int, int], None]


def run(case: BenchCase, progress: Progress | None = None, copy_bytes: int = COPY_BYTES) -> dict[str, Any]:
    """Measures the case; `progress(what, done, total)` is called before every step.

    Returns the JSON result: `results` (fields of the benchmark contract), `left_out` (who was not run, and why),
    `must_cross_bytes` (see `busiest`), `details`, `plan`, `copy_engine` and `beside` (see Run), `speedup` over each
    baseline, `problems` (what the checks found), and the facts of the run. Raises Unavailable if a dispatcher named in
    the case cannot run here, or nothing can.
    """
    say = progress or (lambda what, done, total: None)
    say("copy bandwidth", 0, 1)
    copy = copy_facts(case.device, copy_bytes)
    say("ranks", 0, 1)
    with RankPool(case.ranks, case.device, START_TIMEOUT) as pool:
        return run_on(pool, case, copy, say)


def run_on(pool: RankPool, case: BenchCase, copy: dict[str, Any], say: Progress) -> dict[str, Any]:
    """The same on ranks that are there, and with a copy rate that is known."""
    started, load_before = time.monotonic(), load()
    one = Run(case, pool, copy)
    steps = list(one.steps())
    for done, (what, act) in enumerate(steps):
        say(what, done, len(steps))
        act()
    if not one.opened:
        raise Unavailable("nothing could be measured: " + "; ".join(_left_out_lines(one)))
    results, details = one.rows()
    found = {
        "command": case.command(),
        "versions": versions(),
        "machine": {**machine_facts(case.device), "load_before": load_before, "load_after": load()},
        "copy": copy,
        "seed": case.seed,
        "domain_size": case.domain_size,
        "sends_ahead": case.sends_ahead,
        "results": results,
        "left_out": [
            {"library": library, "dispatcher": dispatcher, "reason": reason}
            for (library, dispatcher), reason in one.left_out.items()
        ],
        "must_cross_bytes": busiest(case),
        "details": details,
        "plan": one.plans(),
        "copy_engine": one.copy_engine(),
        "beside": one.besides(),
        "speedup": speedups(results),
        "problems": [f"{column[1]}: {text}" for column, texts in one.problems.items() for text in texts],
    }
    one.ranks("close")
    say("done", len(steps), len(steps))
    return {**found, "seconds": round(time.monotonic() - started, 1)}


def _left_out_lines(one: Run) -> list[str]:
    return [f"{column[1]}: {reason}" for column, reason in one.left_out.items()]


def busiest(case: BenchCase) -> dict[str, float]:
    """Bytes that must leave the busiest rank, by operation and averaged over steps: equal for all libraries."""
    every = [crossing_bytes(case, step) for step in range(case.steps)]
    there = statistics.mean(max(map(sum, bytes_RR)) for bytes_RR in every)
    back = statistics.mean(max(map(sum, zip(*bytes_RR, strict=True))) for bytes_RR in every)
    return {"dispatch": there, "combine": back, "roundtrip": there + back}


def speedups(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """{op: {dispatcher: how many times faster than the torch baseline of the same run}}."""
    base = {row["op"]: row["median_us"] for row in results if row["library"] == "torch"}
    return {
        op: {row["dispatcher"]: us / row["median_us"] for row in results if row["op"] == op}
        for op, us in base.items()
    }
