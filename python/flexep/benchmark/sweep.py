"""One case again and again with another value of one option, on the same ranks, which keep their answers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from flexep.benchmark.case import BenchCase
from flexep.benchmark.columns import START_TIMEOUT
from flexep.benchmark.machine import COPY_BYTES, copy_facts
from flexep.benchmark.run import Progress, run_on
from flexep.errors import ArgumentError
from flexep.testing.pool import RankPool

KEYS = ("num_sms", "tokens")
OF_ALL = ("versions", "machine", "copy", "seed", "domain_size")  # facts that the runs share


def parse(text: str) -> tuple[str, list[int]]:
    """`num_sms=4,8` -> the option and its values. Raises ArgumentError naming what is wrong."""
    key, _, values = text.partition("=")
    if key not in KEYS:
        raise ArgumentError("sweep", text, f"{' or '.join(KEYS)}, =, and numbers separated by commas")
    if not all(value.isdecimal() for value in values.split(",")):
        raise ArgumentError("sweep", text, f"whole numbers after {key}=, separated by commas")
    found = [int(value) for value in values.split(",")]
    if len(set(found)) != len(found):
        raise ArgumentError("sweep", text, "each value once")
    return key, found


def cases(case: BenchCase, key: str, values: list[int]) -> list[BenchCase]:
    """The case with every value; each checks itself."""
    changes: list[dict[str, Any]] = [{key: value} for value in values]
    return [replace(case, **change) for change in changes]


def run_sweep(
    case: BenchCase,
    key: str,
    values: list[int],
    progress: Progress | None = None,
    copy_bytes: int = COPY_BYTES,
) -> dict[str, Any]:
    """Runs all values. The result is that of `flexep.benchmark.run.run` with the rows of all runs in `results`, and in
    `runs`, for every value, how many of them are its own and what else its run found."""
    say = progress or (lambda what, done, total: None)
    say("copy bandwidth", 0, 1)
    copy = copy_facts(case.device, copy_bytes)
    say("ranks", 0, 1)
    found = []
    with RankPool(case.ranks, case.device, START_TIMEOUT) as pool:
        for value, one in zip(values, cases(case, key, values), strict=True):
            found.append(run_on(pool, one, copy, lambda what, *of, at=value: say(f"{key} {at}, {what}", *of)))
    rest = [{k: v for k, v in one.items() if k not in (*OF_ALL, "results")} for one in found]
    return {
        "command": f"{case.command()} --sweep {key}={','.join(map(str, values))}",
        **{name: found[-1][name] for name in OF_ALL},
        "sweep": {"key": key, "values": values},
        "results": [row for one in found for row in one["results"]],
        "runs": [
            {"value": value, "rows": len(one["results"]), **rest_}
            for value, one, rest_ in zip(values, found, rest, strict=True)
        ],
        "problems": [
            f"{key} {v}: {text}" for v, one in zip(values, found, strict=True) for text in one["problems"]
        ],
        "seconds": round(sum(one["seconds"] for one in found), 1),
    }


def runs(result: dict[str, Any]) -> Iterator[tuple[int, list[dict[str, Any]], dict[str, Any]]]:
    """(value, its rows, what else its run found) of a sweep's result."""
    begin = 0
    for one in result["runs"]:
        yield one["value"], result["results"][begin : begin + one["rows"]], one
        begin += one["rows"]
