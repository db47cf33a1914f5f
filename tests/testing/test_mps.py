"""The MPS daemon of a test, over a control program that stands for it."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from flexep.errors import Unavailable
from flexep.testing import mps
from flexep.testing.mps import Mps, ask_control

# Stays behind with -d, as the daemon does, holding whatever it was given to write to.
PROGRAM = """#!/bin/sh
echo "$@ $CUDA_MPS_PIPE_DIRECTORY ${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-whole}" >> SAID
if [ "$1" = -d ]; then sleep 30 & echo $! > "$CUDA_MPS_PIPE_DIRECTORY/pid"; exit 0; fi
read command
echo "$command" >> SAID
if [ "$command" = quit ]; then kill "$(cat "$CUDA_MPS_PIPE_DIRECTORY/pid")"; exit 0; fi
echo "Cannot find MPS control daemon process"; exit 1
"""


@pytest.fixture
def said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    program = tmp_path / mps.CONTROL
    program.write_text(PROGRAM.replace("SAID", str(tmp_path / "said")))
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", raising=False)
    return tmp_path / "said"


def test_a_daemon_lives_in_a_folder_of_its_own_and_ends_with_the_test(said: Path) -> None:
    with Mps(ranks_a_gpu=4) as daemon:
        folder = daemon.environment["CUDA_MPS_PIPE_DIRECTORY"]
        assert daemon.environment["CUDA_MPS_LOG_DIRECTORY"] == folder
        assert daemon.environment["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "25"
        assert daemon.environment["CUDA_MODULE_LOADING"] == "EAGER"
        pid = int(Path(folder, "pid").read_text())
        os.kill(pid, 0)
    assert said.read_text().splitlines() == [f"-d {folder} whole", f" {folder} whole", "quit"]
    assert not Path(folder).exists()


def test_refusals_name_the_program_and_its_words(said: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unavailable, match=rf"{mps.CONTROL}: exit code 1: Cannot find MPS control daemon"):
        ask_control({}, said="get_server_list\n")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Unavailable, match=mps.CONTROL), Mps(2):
        raise AssertionError("started without a program")
