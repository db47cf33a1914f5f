"""`pytest bench` runs every column through pytest-benchmark, with the times that the ranks measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import flexep
from bench.suite import Clock, case_of

ROOT = Path(__file__).parents[2]


def test_the_entry_runs(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    shape = "ranks=2,tokens=16,hidden=16,experts=4,top_k=2"
    command = [sys.executable, "-m", "pytest", "bench", "-q", "-p", "no:cacheprovider", "--shape", shape]
    done = subprocess.run(
        [*command, f"--benchmark-json={path}"], cwd=ROOT, capture_output=True, text=True, timeout=120
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(path.read_text())["benchmarks"]
    assert len(found) == 3 * (len(flexep.BACKENDS) + 1)
    for each in found:
        assert 1e-6 < each["stats"]["min"] < 5
        assert each["extra_info"]["remote_bytes"] > 0
        assert each["group"] in ("dispatch", "combine", "roundtrip")


def test_a_shape_is_fields_of_a_case() -> None:
    case = case_of("ranks=3,hidden=64,routing=zipf")
    assert (case.ranks, case.hidden, case.routing) == (3, 64, "zipf")


def test_the_clock_shows_what_it_is_told() -> None:
    clock = Clock()
    start = clock.read()
    clock.advance(250.0)
    assert clock.read() - start > 249e-6
