"""Time boxes of bench/suites/scaleup: what is cut, what is kept, and that nothing is left running."""

from __future__ import annotations

import sys
import time
from pathlib import Path

from bench.suites.scaleup.boxes import Box, read_lines, run_box, run_boxes
from bench.suites.scaleup.report import in_words, wrong

# Writes a line and a half, and stays.
LOOP = """
import sys, time
with open(sys.argv[1], "w") as file:
    file.write('{"a": 1}\\n{"b"')
    file.flush()
    time.sleep(600)
"""


def test_a_cut_part_leaves_no_process_behind(tmp_path: Path) -> None:
    grandchild = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {LOOP!r}, sys.argv[1] + '.x']); "
    script = grandchild + "open(sys.argv[1], 'w').write('{\"pid\": %d}\\n' % p.pid); p.wait()"
    outcome = run_box(Box("tree", 8.0), [sys.executable, "-c", script], tmp_path)
    assert outcome.state == "cut"
    (found,) = outcome.found
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and runs(found["pid"]):
        time.sleep(0.05)
    assert not runs(found["pid"])


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie that waits for whoever collects it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_part_that_is_cut_keeps_what_it_said_and_closes_what_it_opened(tmp_path: Path) -> None:
    script = f"""
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit("cut"))
try:
    exec({LOOP!r})
finally:
    open(sys.argv[1] + ".closed", "w")
"""
    began = time.monotonic()
    outcome = run_box(Box("closing", 8.0), [sys.executable, "-c", script], tmp_path)
    assert time.monotonic() - began < 60
    assert (outcome.state, outcome.found) == ("cut", [{"a": 1}])  # the line that was cut is not there
    assert (tmp_path / "closing.jsonl.closed").exists()


def test_a_part_that_fails_says_why_and_the_next_one_runs(tmp_path: Path) -> None:
    scripts = {
        "bad": "raise SystemExit('no such machine')",
        "good": "open(__import__('sys').argv[1], 'w').write('{}\\n')",
    }
    outcomes = run_boxes(
        [Box("bad", 20.0), Box("good", 20.0)],
        lambda box: [sys.executable, "-c", scripts[box.part]],
        tmp_path,
        40.0,
    )
    assert [(one.state, one.found) for one in outcomes] == [("failed", []), ("done", [{}])]
    assert outcomes[0].said == "no such machine"
    assert wrong(outcomes)
    assert not wrong(outcomes[1:])
    assert "bad: failed" in in_words(outcomes)


def test_no_time_is_left_for_the_last_part(tmp_path: Path) -> None:
    outcomes = run_boxes(
        [Box("first", 60.0), Box("second", 60.0)], lambda box: [sys.executable, "-c", LOOP], tmp_path, 2.0
    )
    assert [(one.state, one.part) for one in outcomes] == [("cut", "first"), ("skipped", "second")]


def test_lines_of_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_lines(tmp_path / "nothing") == []
