"""Parts of a suite in processes of their own, each with a limit in seconds; what a part said before is kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EARLY = 0.85  # of its box after which a part starts nothing new
GRACE_SECONDS = 15.0  # between asking a part that overran to end, and ending it
LAST_LINES = 12  # of what a failed part printed


@dataclass(frozen=True)
class Box:
    """A part and its seconds."""

    part: str
    seconds: float


@dataclass(frozen=True)
class Outcome:
    """`state`: done, cut (it overran its box and was ended), failed (`said`: its last words), skipped (no time)."""

    part: str
    state: str
    seconds: float
    box: float
    said: str = ""
    found: list[dict[str, Any]] = field(default_factory=list)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines; the last one may have been cut."""
    if not path.exists():
        return []
    lines = path.read_text().splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def run_box(box: Box, command: Sequence[str], folder: Path) -> Outcome:
    """Runs `command` and the path of a file that it appends JSON lines to; ends it and all that it started when its
    seconds are over."""
    found, said = folder / f"{box.part}.jsonl", folder / f"{box.part}.log"
    started, state = time.monotonic(), "done"
    with said.open("w") as log:
        process = subprocess.Popen([*command, str(found)], stdout=log, stderr=log, start_new_session=True)
        try:
            code = process.wait(box.seconds)
            state = "done" if code == 0 else "failed"
        except subprocess.TimeoutExpired:
            state = "cut"
        finally:
            end_session(process)
    seconds = round(time.monotonic() - started, 1)
    words = (
        "\n".join(said.read_text(errors="replace").splitlines()[-LAST_LINES:]) if state == "failed" else ""
    )
    return Outcome(box.part, state, seconds, box.seconds, words, read_lines(found))


def end_session(process: subprocess.Popen[bytes]) -> None:
    """Ends a process that leads a session, with some seconds to stop daemons of its own, and then whatever is left of
    the session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(GRACE_SECONDS)
    with contextlib.suppress(ProcessLookupError):  # all have ended by themselves
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def run_boxes(
    boxes: Sequence[Box], command: Callable[[Box], Sequence[str]], folder: Path, total: float
) -> list[Outcome]:
    """All parts one after the other within `total` seconds: a box is cut to what is left."""
    deadline, outcomes = time.monotonic() + total, []
    for box in boxes:
        left = deadline - time.monotonic()
        if left < 1:
            outcomes.append(Outcome(box.part, "skipped", 0.0, box.seconds, "no time was left"))
            continue
        shorter = Box(box.part, round(min(box.seconds, left), 1))
        outcomes.append(run_box(shorter, command(shorter), folder))
    return outcomes
