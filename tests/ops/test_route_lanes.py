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
    "a lane gives two at most": ("if (mine.left > 0) continue;", "continue;"),
    "a tie with the last that was taken is lost": (
        "keys[i] < key || (keys[i] == key && index > at)",
        "keys[i] < key",
    ),
    "the second best of another lane is forgotten": ("second = low > high ? low : high;", "second = high;"),
    "logits are read before they are there": (
        "to[e] = widen(row[e]); });\n  }\n  warp.sync();",
        "to[e] = widen(row[e]); });\n  }",
    ),
    "groups are scored before all keys are there": (
        "set(e, sqrt_softplus_fixed(s.logit[e])); });\n  }\n  warp.sync();",
        "set(e, sqrt_softplus_fixed(s.logit[e])); });\n  }",
    ),
    "groups are taken before they are scored": (
        "of_order(second)) : first;\n  });\n  warp.sync();",
        "of_order(second)) : first;\n  });",
    ),
    "groups are read before they are taken": (
        "// by the lane that reads it\n  });\n  warp.sync();",
        "\n  });",
    ),
    "keys are read before they are masked": (
        "s.word[e] = kOrderOut; });\n  });\n  warp.sync();",
        "s.word[e] = kOrderOut; });\n  });",
    ),
    "chosen logits are overwritten": ("warp.sync();  // spread_grad writes", "// spread_grad writes"),
    "gradients are read before they are added": (
        "s.word[id] = bits_of(float_of(s.word[id]) + by);\n    warp.sync();",
        "s.word[id] = bits_of(float_of(s.word[id]) + by);",
    ),
    "padding has a gradient": ("out[e] = Logit{};", "(void)e;"),
}


IN_REGISTERS = {
    "NaN is a number": ("h.logit[j] - high)", "(high == high ? h.logit[j] - high : 0.0f))"),
    "a tie has many winners": ("if (is_tie(warp.vote(won)))", "if (false)"),
    "a lane gives two at most": ("if (--mine.left > 0) continue;", "continue;"),
    "a tie with the last that was taken is lost": (
        "h.key[j] < key || (h.key[j] == key && index > at)",
        "h.key[j] < key",
    ),
    "ids are read before they are taken": ("    });\n  }\n  warp.sync();", "    });\n  }"),
    "two equal bests of a group count once": ("first == top && !tie ? second", "first == top ? second"),
    "the second best of a lane is forgotten": (
        "first == top && !tie ? second : first",
        "first == top && !tie ? 0 : first",
    ),
    "equal groups go to the higher": ("other == mine && g < warp.rank()", "other == mine && g > warp.rank()"),
    "groups end after 32 experts": ("g = 0, left = each;", "g = 0, left = 1;"),
    "what is no expert is in the sum": ("total += e < experts ? h.score[j] : 0.0f", "total += h.score[j]"),
    "what is no expert is chosen": (
        "h.key[j] = e < experts ? order_of(key) : 0;",
        "h.key[j] = order_of(key);",
    ),
}


@pytest.mark.parametrize(
    ("file", "name"),
    [
        *(("ops/route_warp.h", name) for name in MUTANTS),
        *(("ops/route_registers.h", name) for name in IN_REGISTERS),
    ],
)
def test_a_planted_bug_is_seen(file: str, name: str, tmp_path: Path) -> None:
    mutants = MUTANTS if file == "ops/route_warp.h" else IN_REGISTERS
    done = run_lanes(tmp_path, copy_planted(tmp_path, file, *mutants[name]))
    assert done.returncode != 0, f"{name}: {done.stdout}"
