"""Every library beside every dispatcher at the shapes of the targets, in one run on one pool of ranks.

    python -m bench.suites.side_by_side --device cuda --ranks 2 --out bench/results/ep2-h200.json

bf16, H = 7168, E = 256, K = 8, static capacity, fresh plans: both layouts at T = 4096 and 8192, and expert-major at
alignment 128. Our dispatchers may take 64 multiprocessors, 128 for expert-major rows, which is more than they take when
they are not asked (24 and 88), and 24 from eight ranks on. With `--device cpu` the shapes are small. Exit code 1 if a
result was wrong.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any

from bench.suites import record, targets
from bench.suites.measured import reach_peers
from flexep.benchmark.case import ALL, BenchCase
from flexep.benchmark.columns import START_TIMEOUT
from flexep.benchmark.machine import COPY_BYTES, copy_facts, machine_facts, versions
from flexep.benchmark.run import run_on
from flexep.cli._bench_report import name_of
from flexep.testing.pool import RankPool

SLACK = 1.04  # rows of a static buffer over those expected
# Of our dispatchers between few ranks; the fastest other takes 64, and the whole GPU to expand rows and to add them.
NUM_SMS = {"flat": 64, "expert_major": 128}
NUM_SMS_OF_MANY = 24
MANY_RANKS = 8  # from here on the link is the limit in both layouts
Entry = dict[str, Any]


def capacity_for(tokens: int, top_k: int, experts: int, ranks: int, alignment: int) -> float:
    """The factor of tokens * top_k that holds even routing, its padding and a little more."""
    slots = tokens * top_k
    local = -(-experts // ranks)
    each = slots * ranks / experts  # rows of an expert: below the alignment, padding is most of what there is
    padding = local * alignment * (0.5 if each >= alignment else 1.0)
    return max(SLACK * (slots + padding) / slots + alignment / slots, local * alignment / slots)


def at(device: str, ranks: int, tokens: int, layout: str, alignment: int = 16, **change: Any) -> BenchCase:
    """The case of the targets at so many tokens; on the CPU rows and experts are few."""
    hidden, experts, top_k = (7168, 256, 8) if device == "cuda" else (64, 8 * ranks, 2)
    sms = NUM_SMS_OF_MANY if ranks >= MANY_RANKS else NUM_SMS[layout]
    asked: dict[str, Any] = {
        "num_sms": sms if device == "cuda" else None,
        "baselines": ALL if device == "cuda" else ("torch",), "time_limit": 4.0 if device == "cuda" else 0.1,
        "capacity": capacity_for(tokens, top_k, experts, ranks, alignment), "pairs": 128 if device == "cuda" else 8,
    }  # fmt: skip
    return BenchCase(
        device=device, ranks=ranks, tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, layout=layout,
        alignment=alignment, mode="capacity", **{**asked, **change},
    )  # fmt: skip


def grid(device: str, ranks: int, tokens: tuple[int, ...] | None = None) -> Iterator[BenchCase]:
    """All cases, the smaller ones first."""
    tokens = tokens or ((4096, 8192) if device == "cuda" else (32, 64))
    for some in tokens:
        for layout in ("flat", "expert_major"):
            yield at(device, ranks, some, layout)
    yield at(device, ranks, tokens[0], "expert_major", 128)


def measure(
    cases: Iterator[BenchCase],
    device: str,
    ranks: int,
    emit: Callable[[Entry], None],
    copy_bytes: int = COPY_BYTES,
) -> None:
    """Emits a run for each case as soon as it is there, every row with the targets that it reaches."""
    copy = copy_facts(device, copy_bytes)
    with RankPool(ranks, device, START_TIMEOUT) as pool:
        for case in cases:
            one = run_on(pool, case, copy, lambda *_: None)
            crossing = one["must_cross_bytes"]
            one["reached"] = [
                targets.reached(row, crossing, one["copy_engine"], targets.fastest_other(row, one["results"]))
                for row in one["results"]
            ]
            emit(one)


def runs_of(written: Entry) -> list[Entry]:
    """The runs of a file that this suite has written, each with its rows and the targets that they reach."""
    found, begin = [], 0
    for one in written["runs"]:
        end = begin + one["rows"]
        found.append({**one, **{name: written[name][begin:end] for name in ("results", "reached")}})
        begin = end
    return found


def table(runs: list[Entry]) -> str:
    """One line a library, operation and case."""
    lines = []
    for one in runs:
        for row, levels in zip(one["results"], one["reached"], strict=True):
            share = row["ratio_to_copy_engine"]
            lines.append([
                name_of(row), row["op"], row["layout"], str(row["alignment"]), str(row["tokens"]),
                "" if row["sms"] is None else str(row["sms"]), f"{row['median_us']:.0f}", f"{row['p99_us']:.0f}",
                "" if row["host_us"] is None else f"{row['host_us']:.0f}", f"{row['remote_bytes'] / 1e6:.1f}",
                f"{targets.rate(row, one['must_cross_bytes']):.3g}", "" if share is None else f"{share:.2f}",
                "" if levels is None else (levels[-1] if levels else "none"), "yes" if row["checked"] else "NO",
            ])  # fmt: skip
    heads = [
        "library", "op", "layout", "alignment", "T", "SMs", "us", "p99 us", "host us", "remote MB",
        "GB/s of what must cross", "of the copy", "target", "right",
    ]  # fmt: skip
    return record.table(heads, lines)


def left_out(runs: list[Entry]) -> list[str]:
    """Who was not measured, and why; each reason once."""
    said = [f"{name_of(one)}: {one['reason']}" for run in runs for one in run["left_out"]]
    return list(dict.fromkeys(said))


def main() -> int:
    parser = record.arguments(__doc__, "cpu", 2)
    given = parser.parse_args()
    reach_peers(given.device)
    runs: list[Entry] = []

    def emit(one: Entry) -> None:
        runs.append(one)
        print(f"{one['command']}\n{one['seconds']} s", file=sys.stderr, flush=True)
        if given.out is not None:  # again after every case: what is measured is kept
            record.write(
                given.out, "bench.suites.side_by_side", given.commit, versions=versions(),
                machine=machine_facts(given.device), results=[row for one in runs for row in one["results"]],
                reached=[levels for one in runs for levels in one["reached"]],
                runs=[
                    {k: v for k, v in one.items() if k not in ("results", "reached", "details")}
                    | {"rows": len(one["results"])} for one in runs
                ],
            )  # fmt: skip

    measure(grid(given.device, given.ranks), given.device, given.ranks, emit)
    print("\n".join([table(runs), "", *left_out(runs)]))
    return 1 if any(one["problems"] for one in runs) else 0


if __name__ == "__main__":
    sys.exit(main())
