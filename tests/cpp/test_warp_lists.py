"""Compiles the text of a warp that reads the plan's lists, runs it on 32 fibers, and plants bugs in copies of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cpp.compile import HERE, ROOT, compile_program, copy_planted, run_program

# Before csrc: what stands for CUDA's own headers, and movers that keep what they are given.
STAND_INS = (f"-I{HERE / 'warp/stand_in'}", f"-I{HERE}")
SOURCES = [HERE / "warp_lists.cpp"]


def test_a_warp_finds_what_one_lane_finds(tmp_path: Path) -> None:
    # A read behind a list is a report: lists are as long as they say.
    flags = (*STAND_INS, "-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    done = run_program(compile_program(tmp_path / "lists", SOURCES, ROOT / "csrc", *flags))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


LISTS, FED, SUMS = "kernels/device_lists.cuh", "kernels/device_fed.cuh", "kernels/device_sums.cuh"

MUTANTS = {
    "integers end a place early": (
        LISTS,
        "first_ + warp_lane() < end_ ?",
        "first_ + warp_lane() + 1 < end_ ?",
    ),
    "the 33rd integer is one of the first 32": (LISTS, "i >= first_ + 32", "i > first_ + 32"),
    "a search goes on behind its range": (LISTS, "min(last + stride, range.end)", "last + stride"),
    "the last place near an end is not looked at": (LISTS, "most - 32", "most - 33"),
    "a turn is asked of the 32 before it": (LISTS, "turn >= from_ + 32", "turn > from_ + 32"),
    "a chunk's end is narrowed by its begin": (LISTS, "end_.narrow(at_end)", "end_.narrow(at_begin)"),
    "a weight of the row's first slot": (FED, "part_weights[slot]", "part_weights[slot - groups.place()]"),
    "a lane without a row takes no turn": (
        FED,
        "turn = turn_of(groups, slots, now.row)",
        "turn = now.here ? turn_of(groups, slots, now.row) : 0",
    ),
    "an own row is that of its token's lane": (
        FED,
        "next_own, __popc(owns & groups.below())",
        "next_own, warp_lane()",
    ),
    "a first ring is compared with that of another token": (
        FED,
        "(groups.place() == 0 || ring != before)",
        "ring != before",
    ),
    "slots of an own token are those of the first group": (
        FED,
        "__popc(owns & groups.before()) * groups.width",
        "0",
    ),
    "a rank that sends is my own": (FED, "(mine_at <= other)", "(mine_at < other)"),
    "a tail has tokens of others": (FED, "return token < mine.end && groups", "return groups"),
    "terms are added by descending row": (FED, "other < row", "other > row"),
    "a sum that has terms is cleared": (FED, "here && count == 0 &&", "here &&"),
    "a row's last piece is as long as the others": (FED, "min(most, row_bytes_ - offset)", "most"),
    "an own sum is rounded a term late": (FED, "turn + 1 == own", "turn == own"),
    "every term ends a group": (SUMS, "ring / args_.nest != after / args_.nest", "ring != after"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str, tmp_path: Path) -> None:
    include = copy_planted(tmp_path, *MUTANTS[name])
    done = run_program(compile_program(tmp_path / "lists", SOURCES, include, *STAND_INS, "-O0"))
    assert done.returncode == 1, f"{name}: {done.stdout}"
