"""`flexep train` as a user runs it: its own ranks, torchrun's ranks, JSON, and refusals by exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flexep.cli.main import app
from flexep.training.text import load_text

SIZES = {"steps": 3, "hidden": 32, "inner": 32, "layers": 1, "experts": 3, "seq": 16, "batch": 3, "seed": 5}
SMALL = [text for name, value in SIZES.items() for text in (f"--{name}", str(value))]
TRAIN = [sys.executable, "-m", "flexep", "train", *SMALL]


def run(command: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, env={**os.environ, **variables}
    )


@pytest.fixture(scope="module")
def own_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict]:
    """(standard output, JSON) of a run on two ranks that the command starts itself."""
    file = tmp_path_factory.mktemp("train") / "out.json"
    done = run([*TRAIN, "--ranks", "2", "--dispatcher", "allgather", "--json", str(file)])
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(file.read_text())


def test_starts_its_ranks_and_writes_json(own_run: tuple[str, dict]) -> None:
    stdout, report = own_run
    assert len(report["losses"]) == 3
    assert all(isinstance(loss, float) for loss in report["losses"])
    assert (report["dispatcher"], report["ranks"]) == ("allgather", 2)
    assert report["text_sha256"] == load_text().sha256
    assert report["tokens_per_second"] * report["seconds"] == pytest.approx(3 * 3 * 16)
    assert report["config"] | SIZES == report["config"]
    assert report["config"]["dtype"] == "float32"
    assert set(report["versions"]) == {"python", "torch", "flexep"}
    assert f"{report['losses'][-1]:.4f}" in stdout


def test_joins_the_ranks_of_torchrun(own_run: tuple[str, dict], tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    # A rendezvous on a free port of this host.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = run([*launcher, "-m", "flexep", "train", *SMALL, "--json", str(file)], OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    report = json.loads(file.read_text())
    assert report["ranks"] == 2
    assert report["losses"] == own_run[1]["losses"]


def test_json_alone_on_standard_output_and_auto_is_resolved() -> None:
    done = run([*TRAIN, "--json", "-"])
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["dispatcher"], report["ranks"]) == ("deepep", 1)
    assert "tokens/s" in done.stderr


def test_a_loss_that_is_not_finite_is_exit_1(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    done = run([*TRAIN, "--lr", "1e30", "--json", str(file)])
    assert done.returncode == 1
    assert "the loss of step" in done.stderr
    assert not file.exists()


def test_what_a_rank_refuses_is_exit_2() -> None:
    """The length of the text is known where it is read, in the ranks."""
    done = run([*TRAIN, "--seq", "100000000"])
    assert done.returncode == 2
    assert "seq = 100000000" in done.stderr


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        ("--dispatcher", "pigeon", "dispatcher = 'pigeon': expected one of auto, allgather, alltoall"),
        ("--ranks", "0", "ranks = 0"),
        ("--steps", "0", "steps = 0"),
        ("--device", "tpu", "device = 'tpu'"),
        ("--hidden", "33", "hidden = 33"),
        ("--weights-at", "nowhere", "weights_at = 'nowhere'"),
    ],
)
def test_bad_usage_is_exit_2_and_names_the_value(option: str, value: str, named: str) -> None:
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, ["train", *SMALL, option, value])
    assert result.exit_code == 2, result.output
    assert named in result.stderr


def test_ranks_must_agree_with_the_launcher() -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2"}
    result = CliRunner(env=variables).invoke(app, ["train", *SMALL, "--ranks", "3"])
    assert result.exit_code == 2
    assert "ranks = 3" in result.stderr
