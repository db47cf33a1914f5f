"""Compiles the plan's headers by themselves, runs them over teams of threads, and plants bugs in copies of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp.compile import HERE, ROOT, compile_program, copy_planted, run_program

# Under TSan a missing sync is a report (and exit code 66) even when the words come out right.
FLAGS = ("-O1", "-g", "-fsanitize=thread")


def test_any_number_of_lanes_writes_the_same_plan(tmp_path: Path) -> None:
    done = run_program(compile_program(tmp_path / "lanes", [HERE / "plan_lanes.cpp"], ROOT / "csrc", *FLAGS))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


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
    include = copy_planted(tmp_path, *MUTANTS[name])
    done = run_program(compile_program(tmp_path / "lanes", [HERE / "plan_lanes.cpp"], include, *FLAGS))
    assert done.returncode != 0, f"{name}: {done.stdout}"
