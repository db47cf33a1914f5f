"""Tables and pictures of docs/performance.md, from what the suites and a sweep have left.

    python -m bench.suites.figures --side-by-side bench/results/ep2-h200.json --no-cliffs no-cliffs.json \\
        --scaleup ep2-scaleup.json --images docs/images --out performance-tables.md

The curve is that of scaleup, or of sweeps, one a layout: `--curve curve.json --curve curve-flat.json`.
Any of the files may be left out, and what needs it is then missing. The model of the curve and the roofs are the rates
in the file of no_cliffs, which measures them for some numbers of multiprocessors: ask it for those of the curve. Bytes
of a row are counted by the oracle's plan, as no_cliffs does. Pictures are `curve.png` and `roofline.png`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.suites import pictures, record, side_by_side
from bench.suites.measured import OPS
from bench.suites.no_cliffs import Judged, Key, Load, Rates, cliffs, load_of, model_us, way
from flexep.benchmark.case import BenchCase
from flexep.benchmark.sweep import runs
from flexep.cli._bench_sweep import Curve, curves

Found = dict[str, Any]
ByRates = dict[Key, Rates]
WORDS = {"flat": "flat", "expert_major": "expert-major"}


@dataclass(frozen=True)
class Point:
    """One operation of one of our dispatchers: what it moved, and how fast. GB/s; `limits`: rates at its
    multiprocessors, where no_cliffs has them."""

    row: Found
    load: Load
    copy_gb_s: float | None
    limits: Rates | None

    @property
    def link_gb_s(self) -> float:
        return self.load.link / self.row["median_us"] / 1e3

    @property
    def local_gb_s(self) -> float:
        return self.load.local / self.row["median_us"] / 1e3


def case_of(row: Found, of_run: Found) -> BenchCase:
    """A case with the rows of a result whose capacity has dropped none."""
    same = ("ranks", "tokens", "hidden", "experts", "top_k", "layout", "alignment", "routing", "fresh")
    return BenchCase(
        send_ahead=of_run.get("sends_ahead", False),
        dispatchers=(row["dispatcher"],), baselines=(), num_sms=row["sms"], **{k: row[k] for k in same}
    )  # fmt: skip


def rates_of(no_cliffs: Found) -> ByRates:
    """The rates that no_cliffs has measured."""
    return {
        (one["num_sms"], one["op"], one["sent_ahead"]): Rates(one["link"], one["local"], one["constant_us"])
        for one in no_cliffs["rates"]
    }


def points(runs_: list[Found], rates: ByRates) -> list[Point]:
    """Dispatch and combine of our one-sided dispatchers. With one domain hybridep is deepep, and stays out."""
    return [
        Point(
            row,
            load_of(case_of(row, one), row["op"]),
            _copy_gb_s(one, row["op"]),
            rates.get((row["sms"], row["op"], case_of(row, one).sends_ahead)),
        )
        for one in runs_
        for row in one["results"]
        if row["dispatcher"] == "deepep" and row["library"] == "flexep" and row["op"] in OPS
    ]


def _copy_gb_s(one: Found, op: str) -> float | None:
    copied = one["copy_engine"]
    return None if copied is None else copied[op]["bytes_per_second"] / 1e9


def roofline_table(found: list[Point]) -> str:
    """What each operation reaches of the copy engine, and of local memory at its multiprocessors."""
    lines = [
        [
            WORDS[p.row["layout"]], p.row["op"], str(p.row["alignment"]), str(p.row["tokens"]), str(p.row["sms"]),
            f"{p.row['median_us']:.0f}", f"{p.link_gb_s:.0f}", _share(p.link_gb_s, p.copy_gb_s),
            f"{p.local_gb_s:.0f}", _share(p.local_gb_s, p.limits and p.limits.local / 1e3),
        ]
        for p in found
    ]  # fmt: skip
    heads = [
        "layout",
        "op",
        "alignment",
        "T",
        "SMs",
        "us",
        "link GB/s",
        "of the copy",
        "local GB/s",
        "of its rate",
    ]
    return record.table(heads, lines)


def _share(of: float, limit: float | None) -> str:
    return "" if not limit else f"{of / limit:.2f}"


def curves_of(scaleup: Found) -> list[Found]:
    """The curve that scaleup has measured, as a sweep for each layout."""
    every = [
        run
        for part in scaleup["parts"]
        if part["part"] == "curve"
        for run in part["found"]
        if "results" in run
    ]
    found = []
    for layout in WORDS:
        mine = [run for run in every if run["results"][0]["layout"] == layout]
        if mine:
            found.append({
                "command": scaleup["command"], "commit": scaleup["commit"],
                "results": [row for run in mine for row in run["results"]],
                "runs": [
                    {**run, "value": run["results"][0]["sms"], "rows": len(run["results"])} for run in mine
                ],
            })  # fmt: skip
    return found


def modelled(sweep: Found, op: str, rates: ByRates) -> Curve:
    """GB/s of what must cross by multiprocessors, where there are rates: a sweep of num_sms as the model has it."""
    found: Curve = {}
    for value, rows, rest in runs(sweep):
        case = case_of(next(row for row in rows if row["op"] == op), rest)
        at = rates.get((value, op, case.sends_ahead))
        if at is not None:
            found[value] = rest["must_cross_bytes"][op] / model_us(load_of(case, op), at) / 1e3
    return found


def all_curves(sweeps: list[Found], op: str, rates: ByRates) -> Iterator[tuple[str, Curve]]:
    """(name, curve) of every sweep: its dispatchers, their model, and the copy engine of the first."""
    for i, sweep in enumerate(sweeps):
        layout = WORDS[sweep["results"][0]["layout"]]
        for name, curve in curves(sweep, op).items():
            if name != pictures.COPY:
                yield f"{name}, {layout}", curve
            elif i == 0:
                yield name, curve
        if model := modelled(sweep, op, rates):
            yield f"{pictures.MODEL}, {layout}", model


def curve_table(sweeps: list[Found], op: str, rates: ByRates) -> str:
    """One line a curve, one column a number of multiprocessors."""
    found = list(all_curves(sweeps, op, rates))
    values = sorted({value for _, curve in found for value in curve})
    lines = [[name, *(f"{curve[v]:.0f}" if v in curve else "" for v in values)] for name, curve in found]
    return record.table([f"{op}, GB/s at SMs", *map(str, values)], lines)


def cliff_table(no_cliffs: Found) -> str:
    """Rates, and how far the shapes are from the model."""
    judged = [Judged(**one) for one in no_cliffs["results"]]
    lines = []
    for (sms, op, ahead), at in rates_of(no_cliffs).items():
        of_rates = [one for one in judged if (one.num_sms, one.op, one.sent_ahead) == (sms, op, ahead)]
        here = sorted(of_rates, key=lambda one: one.ratio)
        worst = max(here, key=lambda one: abs(one.ratio - 1))
        far = len(cliffs(here, no_cliffs["tolerance"]))
        lines.append([
            f"{op}, {sms} SMs, {way(ahead)}",
            f"{at.link / 1e3:.0f}", f"{at.local / 1e3:.0f}", f"{at.constant_us:.1f}",
            f"{here[0].ratio:.2f} to {here[-1].ratio:.2f}", f"{far} of {len(here)}",
            f"H {worst.hidden}, K {worst.top_k}, {worst.routing}",
        ])  # fmt: skip
    heads = ["", "link GB/s", "local GB/s", "constant us", "measured / model", "too far", "furthest"]
    return record.table(heads, lines)


def blocks(
    side: Found | None, sweeps: list[Found], no_cliffs: Found | None, found: list[Point], rates: ByRates
) -> Iterator[str]:
    """Tables, each behind the command and, where it is known, the commit that it is of."""
    if side is not None:
        runs_ = side_by_side.runs_of(side)
        yield f"{_origin(side)}\n\n{side_by_side.table(runs_)}"
        yield "\n".join(f"- {line}" for line in side_by_side.left_out(runs_))
        yield roofline_table(found)
    yield from dict.fromkeys(map(_origin, sweeps))
    if sweeps:
        yield from (curve_table(sweeps, op, rates) for op in OPS)
    if no_cliffs is not None:
        yield f"{_origin(no_cliffs)}\n\n{cliff_table(no_cliffs)}"


def _origin(found: Found) -> str:
    commit = f", commit {found['commit']}" if "commit" in found else ""
    return f"`{found['command']}`{commit}"


def _read(path: Path | None) -> Found | None:
    return None if path is None else json.loads(path.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--side-by-side", type=Path)
    parser.add_argument("--no-cliffs", type=Path)
    parser.add_argument(
        "--curve", type=Path, action="append", default=[], help="of a sweep of num_sms; again: more"
    )
    parser.add_argument("--scaleup", type=Path, help="a file of scaleup, for its curve")
    parser.add_argument("--images", type=Path, help="where the pictures go; without it, there are none")
    parser.add_argument("--out", type=Path, help="where the tables go, beside standard output")
    given = parser.parse_args()
    side, no_cliffs = _read(given.side_by_side), _read(given.no_cliffs)
    sweeps = [json.loads(path.read_text()) for path in given.curve]
    if given.scaleup is not None:
        sweeps += curves_of(json.loads(given.scaleup.read_text()))
    rates = {} if no_cliffs is None else rates_of(no_cliffs)
    found = [] if side is None else points(side_by_side.runs_of(side), rates)
    text = "\n\n".join(filter(None, blocks(side, sweeps, no_cliffs, found, rates))) + "\n"
    print(text, end="")
    if given.out is not None:
        given.out.write_text(text)
    if given.images is not None:
        given.images.mkdir(parents=True, exist_ok=True)
    if given.images is not None and sweeps:
        pictures.draw_curves(
            given.images / "curve.png", {op: dict(all_curves(sweeps, op, rates)) for op in OPS}
        )
    if given.images is not None and found:
        pictures.draw_roofline(given.images / "roofline.png", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
