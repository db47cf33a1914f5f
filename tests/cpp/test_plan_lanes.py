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
    "warps start at zero": ("plan/numbering.h", "sum += n[j];", ""),
    "blocks start at zero": ("plan/numbering.h", "sums.below += first + j < row ? n[j] : 0;", ""),
    "parts of a column are forgotten": (
        "plan/numbering.h",
        "sums.below += part_below[part * keys + key];",
        "",
    ),
    "a warp's counts change while lanes read them": (
        "plan/numbering.h",
        "team.warp_sync();\n    if (key",
        "if (key",
    ),
    "warps are added up before all have counted": (
        "plan/numbering.h",
        "team.sync();\n    FLEXEP_ROLLED\n    for (int key",
        "FLEXEP_ROLLED\n    for (int key",
    ),
    "a token in two batches counts twice": ("plan/first_slot.h", "last_token_[r] = t;", "(void)t;"),
    "an owner begins while others read where": (
        "plan/send_order.h",
        "team.sync();\n    clear_unused",
        "clear_unused",
    ),
    "unused positions keep old tokens": ("plan/send_order.h", "send_token[i] = -1;", "(void)i;"),
    "unused records keep old words": ("plan/send_order.h", "      records.clear(i);", ""),
    "a slot has a position of its first owner alone": (
        "plan/send_order.h",
        " && its == owner) send",
        ") send",
    ),
    "a row's lists keep old words": ("plan/send_order.h", "k >= owners_here", "k > owners_here"),
    "a record has slots that leave for another owner": (
        "plan/send_order.h",
        "records.write_slot(there, leaving.slot, k, its * unit, unit)",
        "records.write_slot(there, leaving.slot, k, owner * unit, unit)",
    ),
    "a slot is written into the record of its own owner alone": (
        "plan/send_order.h",
        "if (valid && there >= 0 && there < num_send)",
        "if (valid && its == owner && there >= 0 && there < num_send)",
    ),
    "slots of lower warps are forgotten": (
        "plan/counts.h",
        "number[i] = slot.number + places.below(team, slot.place);",
        "(void)i;",
    ),
    "peers are added up before all are counted": ("plan/peers.h", "team.sync();\n", ""),
    "a batch gets what another has read": ("plan/block.h", "if (i == j) found", "if (i > j) found"),
    "only the first batches are read": (
        "plan/block.h",
        "if (ahead.i < end) values",
        "if (ahead.i < end && at == begin) values",
    ),
    "slots that leave are read for the wrong token": (
        "plan/block.h",
        "read(t + j * whole + token, k)",
        "read(t + token, k)",
    ),
    "a map keeps old words": ("plan/receive.h", "if (row_map) row_map[i] = -1;", ""),
    "the first block alone has a layout": (
        "plan/assign.h",
        "const ResolveRows layout = resolved_in(shared, team.block() == 0);\n      layout.lay_out(team, 0, 1);",
        "const ResolveRows layout = resolved_in(shared, team.block() == 0);\n"
        "      if (team.block() == 0) layout.lay_out(team, 0, 1);",
    ),
    "the layout is copied out before it is made": (
        "plan/assign.h",
        "team.sync();\n      if (team.block() == 0) copy_out",
        "if (team.block() == 0) copy_out",
    ),
    "the layout's kept rows are not copied out": ("plan/assign.h", ", resolve.kept[p] = layout.kept[p]", ""),
    "every block says what was dropped": ("plan/assign.h", "layout.dropped = memory + 3 * E, ", ""),
    "compaction forgets lower blocks": ("plan/receive.h", "*below + kept", "kept"),
    "the layout is read before it is made": (
        "plan/permutation.h",
        "team.sync();\n    const int32_t cut",
        "const int32_t cut",
    ),
    "padding keeps old words": ("plan/permutation.h", "row_src[start[e] + i] = -1;", "(void)i;"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str, tmp_path: Path) -> None:
    include = copy_planted(tmp_path, *MUTANTS[name])
    program = compile_program(tmp_path / "lanes", [HERE / "plan_lanes.cpp"], include, *FLAGS)
    done = run_program(program, TSAN_OPTIONS="halt_on_error=1")
    assert done.returncode != 0, f"{name}: {done.stdout}"
