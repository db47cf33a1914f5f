"""The outcomes of a scaleup as tables, and what went wrong in words."""

from __future__ import annotations

from typing import Any

from bench.suites import record, side_by_side, targets
from bench.suites.scaleup.boxes import Outcome

Entry = dict[str, Any]


def found(outcomes: list[Outcome], part: str) -> list[Entry]:
    """What a part wrote."""
    return [entry for one in outcomes if one.part == part for entry in one.found]


def runs(outcomes: list[Outcome], part: str) -> list[Entry]:
    """What a part wrote about runs that were measured."""
    return [entry for entry in found(outcomes, part) if "results" in entry]


def tables(outcomes: list[Outcome]) -> str:
    """One table a part that measured something."""
    blocks = []
    if entries := found(outcomes, "contract"):
        lines = [[e["domains"], str(e["cases"]), _verdict(e)] for e in entries]
        blocks.append(record.table(["contract test", "cases", "verdict"], lines))
    for part in ("speed", "curve", "latency"):
        if entries := runs(outcomes, part):
            blocks.append(f"{part}\n\n{side_by_side.table(entries)}")
    if lines := published(runs(outcomes, "speed")):
        heads = ["published, eight GPUs", "op", "GB/s", "here GB/s", "ratio"]
        blocks.append(record.table(heads, lines))
    if entries := found(outcomes, "training"):
        blocks.append(record.table(["training", "tokens/s", "last loss"], [_trained(e) for e in entries]))
    return "\n\n".join(blocks)


def published(measured: list[Entry]) -> list[list[str]]:
    """The flat rows of deepep on eight GPUs beside what others report."""
    return [
        [
            each["who"],
            each["op"],
            f"{each['published_gb_s']:.0f}",
            f"{each['gb_s']:.0f}",
            f"{each['ratio']:.2f}",
        ]
        for run in measured
        for row in run["results"]
        if (row["ranks"], row["tokens"], row["layout"], row["dispatcher"]) == (8, 4096, "flat", "deepep")
        for each in targets.beside_published(row, run["must_cross_bytes"])
    ]


def in_words(outcomes: list[Outcome]) -> str:
    """How every part ended, and who was left out of it."""
    lines = []
    for one in outcomes:
        line = f"- {one.part}: {one.state} after {one.seconds:.0f} s of {one.box:.0f}"
        left_out = side_by_side.left_out([entry for entry in one.found if "results" in entry])
        left_out += [
            f"{entry.get('dispatcher', entry.get('domains'))}: {entry['left_out']}"
            for entry in one.found
            if "results" not in entry and "left_out" in entry
        ]
        lines += [line, *(f"  - left out {reason}" for reason in left_out)]
        lines += [f"  - {said}" for said in one.said.splitlines()]
    return "\n".join(lines)


def wrong(outcomes: list[Outcome]) -> bool:
    """Whether a part failed, a case differed, or a timed result was not right."""
    entries = [entry for one in outcomes for entry in one.found]
    return any(one.state == "failed" for one in outcomes) or any(
        entry.get("failed") or entry.get("problems") for entry in entries
    )


def _verdict(entry: Entry) -> str:
    if "left_out" in entry:
        return f"left out: {entry['left_out']}"
    return f"failed: {entry['failed'][1]}" if entry["failed"] else "passed"


def _trained(entry: Entry) -> list[str]:
    if "left_out" in entry:
        return [entry["dispatcher"], "left out", ""]
    return [entry["dispatcher"], f"{entry['tokens_per_second']:,.0f}", f"{entry['losses'][-1]:.4f}"]
