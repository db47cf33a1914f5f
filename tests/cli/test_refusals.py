"""What every command refuses before it works: where it cannot write, a missing GPU, a missing compiled module."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from flexep.cli import _output
from flexep.cli.main import app

COMMANDS = {name: (name, "--json") for name in ("train", "verify", "doctor", "plan", "bench")}
WRITERS = {**COMMANDS, "bench-plot": ("bench", "--plot"), "demo": ("demo", "--out")}


def refused(arguments: list[str], named: str) -> Result:
    """Runs the command in this process; checks exit code 2 and one line that starts with what is refused."""
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith(f"flexep {arguments[0]}: {named}: expected "), result.stderr
    assert result.stderr.count("\n") == 1
    return result


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("path", ["", "folder", "missing/out.json", "file/out.json", "x" * 300])
def test_a_json_path_that_cannot_be_written(
    command: str, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    refused([command, "--json", path], f"json = {path!r}")
    assert sorted(os.listdir()) == ["file", "folder"]


@pytest.mark.parametrize("path", ["folder.png", "missing/out.png"])
def test_a_plot_that_cannot_be_written(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder.png").mkdir()
    refused(["bench", "--plot", path], f"plot = {path!r}")
    assert os.listdir() == ["folder.png"]


@pytest.mark.parametrize("path", ["", "file", "file/out"])
def test_a_folder_that_cannot_be_made(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    refused(["demo", "--out", path], f"out = {path!r}")


@pytest.mark.parametrize("exists", [False, True])
@pytest.mark.parametrize("writer", WRITERS)
def test_no_permission(writer: str, exists: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's answer is planted, because root may write everywhere."""
    command, option = WRITERS[writer]
    path = tmp_path / "out.png"
    if exists and option != "--out":
        path.touch()
    monkeypatch.setattr(_output.os, "access", lambda path, mode: not mode & os.W_OK)
    result = refused([command, option, str(path)], f"{option[2:]} = {str(path)!r}")
    assert "permission denied" in result.stderr


def test_cuda_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert "expected a CUDA GPU" in refused(["train", "--device", "cuda"], "device = 'cuda'").stderr


@pytest.mark.parametrize("command", ["train", "verify", "plan", "bench", "demo"])
def test_without_the_compiled_module(command: str, tmp_path: Path) -> None:
    hide = "import sys; sys.modules['flexep._C'] = None; from flexep.cli.main import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", hide, command],
        capture_output=True, text=True, timeout=120, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"flexep {command}: flexep._C, the compiled module, is missing")
    assert done.stderr.count("\n") == 1
