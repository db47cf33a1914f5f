"""Everything about R GPUs of one host in under eight minutes: one JSON file and one table.

    python -m bench.suites.scaleup --ranks 8 --out bench/results/ep8-h200.json --table ep8.md

The contract test on peer memory (one domain, and two); dispatch and combine of bf16 in both layouts at T = 4096 and
8192 beside NCCL and the copy engine, against the targets and the published figures; the SM-against-bandwidth curve;
latency at T = 1, 8, 64, 128; steps of a two-layer model on every dispatcher. Each part has a box of seconds; one that
overruns it is cut, and what it had measured is kept. `--device cpu` is a small dry run. Exit code 1 if something was
wrong.
"""

from __future__ import annotations

import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from bench.suites import record
from bench.suites.measured import reach_peers
from bench.suites.scaleup.boxes import Box, Outcome, run_boxes
from bench.suites.scaleup.part import Place
from bench.suites.scaleup.report import in_words, tables, wrong
from flexep.benchmark.machine import machine_facts, versions

TOTAL = 450.0  # seconds; a part that is cut may take some more to end
BOXES = (
    Box("contract", 80.0), Box("speed", 190.0), Box("curve", 70.0), Box("latency", 60.0), Box("training", 70.0),
)  # fmt: skip


def boxes(parts: list[str], total: float) -> list[Box]:
    """The boxes of some parts, made longer or shorter together so that those of all parts take `total` seconds."""
    scale = total / sum(box.seconds for box in BOXES)
    return [Box(box.part, round(box.seconds * scale, 1)) for box in BOXES if box.part in parts]


def measure(place: Place, parts: list[str], total: float) -> list[Outcome]:
    """The outcome of every part."""
    reach_peers(place.device)

    def command(box: Box) -> list[str]:
        where = [place.device, str(place.ranks), str(place.gpus)]
        return [sys.executable, "-m", "bench.suites.scaleup.part", box.part, *where, str(box.seconds)]

    with tempfile.TemporaryDirectory() as folder:
        return run_boxes(boxes(parts, total), command, Path(folder), total)


def main() -> int:
    names = [box.part for box in BOXES]
    parser = record.arguments(__doc__, "cuda", 8)
    parser.add_argument(
        "--gpus", type=int, help="fewer than ranks: several on one under MPS, contract test alone"
    )
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--seconds", type=float, default=TOTAL, help="of all parts together")
    parser.add_argument("--table", type=Path, help="where the table goes; it is printed too")
    given = parser.parse_args()
    place = Place(given.device, given.ranks, given.gpus or given.ranks)
    outcomes = measure(place, given.parts, given.seconds)
    text = "\n\n".join([tables(outcomes), in_words(outcomes)])
    print(text)
    if given.table is not None:
        given.table.write_text(text + "\n")
    if given.out is not None:
        results = [row for one in outcomes for run in one.found for row in run.get("results", ())]
        record.write(
            given.out, "bench.suites.scaleup", given.commit, versions=versions(),
            machine=machine_facts(given.device), results=results, parts=[asdict(one) for one in outcomes],
        )  # fmt: skip
    return 1 if wrong(outcomes) else 0


if __name__ == "__main__":
    sys.exit(main())
