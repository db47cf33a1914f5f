"""Every measurement of one GPU, as a table and a JSON file: `python -m bench.onegpu --out FILE` (`make bench-gpu`)."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from bench.suites import record

PARTS = ("rows", "plan", "route")


def measure(part: str) -> list[dict[str, object]]:
    """The lines that one part prints. Raises CalledProcessError if it fails."""
    command = [sys.executable, "-m", f"bench.onegpu.{part}"]
    printed = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return [json.loads(line) for line in printed.splitlines() if line.startswith("{")]


def table(results: list[dict[str, object]]) -> str:
    """One line a measurement."""
    columns = ("op", "library", "tokens", "hidden", "alignment", "median_us", "ratio_to_copy")
    rows = [columns, *([str(one.get(c, "")) for c in columns] for one in results)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--out", type=Path, help="where the JSON file goes; without it, only the table is printed"
    )
    parser.add_argument("--commit", help="of the measured sources, where they are no git checkout")
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    arguments = parser.parse_args()
    lines = [one for part in arguments.parts for one in measure(part)]
    results, host = [one for one in lines if "median_us" in one], [one for one in lines if "host_us" in one]
    print(table(results))
    print(*(f"{one['op']}: {one['host_us']:.0f} us of the host" for one in host), sep="\n")
    if arguments.out:
        record.write(arguments.out, "bench.onegpu", arguments.commit, results=results, host=host)


if __name__ == "__main__":
    main()
