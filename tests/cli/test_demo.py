"""`flexep demo` on a few steps: its files, its verdict."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexep.cli.demo import largest_gap
from flexep.cli.main import app


def test_leaves_a_picture_and_the_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flexep", "demo", "--out", str(tmp_path), "--ranks", "2", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    runs = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    assert set(runs) == {"1-rank-alltoall", "2-ranks-allgather", "2-ranks-alltoall"}
    assert runs["2-ranks-allgather"]["losses"] == runs["2-ranks-alltoall"]["losses"]
    assert {name: report["dispatcher"] for name, report in runs.items()} == {
        name: name.rsplit("-", 1)[1] for name in runs
    }


def test_bad_usage_is_exit_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--ranks", "0"])
    assert result.exit_code == 2
    assert "ranks = 0" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_largest_gap() -> None:
    assert largest_gap([3.0, 2.0, 1.0], [3.0, 2.5, 1.25]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        largest_gap([1.0], [1.0, 2.0])
