"""The router's text for a warp, run by 32 fibers on the CPU, against its specification; planted bugs are seen."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.cpp.compile import ROOT, compile_program, copy_planted, run_program

# Under TSan a lane that reads what another wrote without a sync between them is a report (and exit code 66).
FLAGS = ("-O1", "-g", "-ffp-contract=off", "-fsanitize=thread")


def run_lanes(to: Path, include: Path) -> subprocess.CompletedProcess[str]:
    sources = [Path(__file__).with_name("route_lanes.cpp"), include / "ops" / "route_cpu.cpp"]
    return run_program(compile_program(to / "lanes", sources, include, *FLAGS))


def test_a_warp_writes_the_bits_of_the_specification(tmp_path: Path) -> None:
    done = run_lanes(tmp_path, ROOT / "csrc")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "equal" in done.stdout


MUTANTS = {
    "ties go to the higher id": (
        "warp.min(mine.key == key ? mine.at : 0xffffffffu)",
        "warp.max(mine.key == key ? mine.at : 0u)",
    ),
    "a taken key is taken again": ("keys[at] = 0;", ""),
    "the second best of another lane is forgotten": (
        "warp.max(first == best && !twice ? second : first)",
        "warp.max(second)",
    ),
    "logits are read before they are there": (
        "to[e] = widen(row[e]);\n  }\n  warp.sync();",
        "to[e] = widen(row[e]);\n  }",
    ),
    "groups are scored before all keys are there": (
        "s.word[e] = order_of(a.bias ? key + a.bias[e] : key);\n  }\n  warp.sync();",
        "s.word[e] = order_of(a.bias ? key + a.bias[e] : key);\n  }",
    ),
    "groups are read while they are taken": (
        "rule.topk_groups);\n  warp.sync();",
        "rule.topk_groups);",
    ),
    "chosen logits are overwritten": ("warp.sync();  // spread_grad writes", "// spread_grad writes"),
    "gradients are read before they are added": (
        "s.word[id] = bits_of(float_of(s.word[id]) + by);\n    warp.sync();",
        "s.word[id] = bits_of(float_of(s.word[id]) + by);",
    ),
    "shares count twice": ("s.logit[e] = prob, s.word", "s.logit[e] = prob * 2.0f, s.word"),
    "padding has a gradient": ("out[e] = Logit{};", "(void)e;"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_planted_bug_is_seen(name: str, tmp_path: Path) -> None:
    done = run_lanes(tmp_path, copy_planted(tmp_path, "ops/route_warp.h", *MUTANTS[name]))
    assert done.returncode != 0, f"{name}: {done.stdout}"
