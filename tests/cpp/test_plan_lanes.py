"""Compiles the plan's headers by themselves, runs them over teams of threads, and plants bugs in copies of them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = Path(__file__).with_name("plan_lanes.cpp")


def compile_and_run(include: Path, out: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the tests need the C++ compiler that built flexep"
    program = out / "plan_lanes"
    subprocess.run(
        [compiler, "-std=c++20", "-O1", "-pthread", *flags, f"-I{include}", str(SOURCE), "-o", str(program)],
        check=True,
        timeout=120,
    )
    return subprocess.run([str(program)], capture_output=True, text=True, timeout=60)


def test_any_number_of_lanes_writes_the_same_plan(tmp_path: Path) -> None:
    done = compile_and_run(ROOT / "csrc", tmp_path, *THREADS_CHECKED)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


# Under TSan a missing sync is a report (and exit code 66) even when the words come out right.
THREADS_CHECKED = ("-fsanitize=thread", "-g")

MUTANTS = {
    "lanes start at zero": ("plan/assign.h", "sum += n;", ""),
    "counts are summed before all lanes have counted": ("plan/counts.h", "team.sync();", ""),
    "slots are placed before the scan": ("plan/assign.h", "team.sync();\n    place_slots", "place_slots"),
    "the last lane is counted from": ("plan/assign.h", "team.rank() == team.size() - 1", "team.rank() == 0"),
    "compaction forgets lower lanes": ("plan/receive.h", "at += workspace[l];", ""),
    "unused positions keep old tokens": ("plan/assign.h", "send_token[i] = -1;", "(void)i;"),
    "rows start where the last rank's did": ("plan/resolve.h", "kept[p] = total;", "kept[p] = base[p];"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str, tmp_path: Path) -> None:
    file, right, wrong = MUTANTS[name]
    include = shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    text = (include / file).read_text()
    assert text.count(right) >= 1, f"the mutant {name!r} no longer fits {file}"
    (include / file).write_text(text.replace(right, wrong, 1))
    done = compile_and_run(include, tmp_path, *THREADS_CHECKED)
    assert done.returncode != 0, f"{name}: {done.stdout}"
