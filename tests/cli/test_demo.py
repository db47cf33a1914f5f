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
from flexep.training import launch
from flexep.training.config import TrainConfig


def test_leaves_a_picture_and_the_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "flexep", "demo", "--out", str(tmp_path), "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    runs = {file.stem: json.loads(file.read_text()) for file in tmp_path.glob("*.json")}
    names = ("allgather", "alltoall", "deepep", "hybridep")
    assert set(runs) == {"1-rank-allgather", *(f"4-ranks-{name}" for name in names)}
    for name in names:
        run = runs[f"4-ranks-{name}"]
        assert run["config"]["domain_size"] == 2
        assert run["losses"] == runs["4-ranks-alltoall"]["losses"]
    assert {name: report["dispatcher"] for name, report in runs.items()} == {
        name: name.rsplit("-", 1)[1] for name in runs
    }


def test_bad_usage_is_exit_2(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--ranks", "0"])
    assert result.exit_code == 2
    assert "ranks = 0" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_other_bits_are_exit_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One unit in the last place of one loss of one dispatcher is enough; the gap to one rank is not."""

    def run_ranks(device: str, ranks: int, main: object, config: TrainConfig, path: str, table: bool) -> None:
        losses = [3.0, 2.0 + (2**-51 if config.dispatcher == "hybridep" else 0)]
        report = {
            "losses": losses, "dispatcher": config.dispatcher, "ranks": ranks, "tokens_per_second": 1.0,
            "seconds": 1.0, "config": {"domain_size": config.domain_size},
        }  # fmt: skip
        Path(path).write_text(json.dumps(report))

    monkeypatch.setattr(launch, "run_ranks", run_ranks)
    result = CliRunner().invoke(app, ["demo", "--out", str(tmp_path), "--ranks", "3", "--steps", "2"])
    assert result.exit_code == 1
    assert result.stderr == "flexep demo: other bits than the first dispatcher's: 3-ranks-hybridep\n"


def test_largest_gap() -> None:
    assert largest_gap([3.0, 2.0, 1.0], [3.0, 2.5, 1.25]) == 0.5
    with pytest.raises(ValueError, match="zip"):
        largest_gap([1.0], [1.0, 2.0])
