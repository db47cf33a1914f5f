"""`flexep doctor` as a user runs it: in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from flexep.cli import _probe
from flexep.cli._handle_kinds import handle_kinds
from flexep.transport import _fd_passing, _memory
from tests.transport.fake_driver import CUresult, FakeDriver

DISPATCHERS = ("allgather", "alltoall", "deepep", "hybridep")


def flexep(*arguments: str, first_on_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flexep", *arguments]
    environment = {**os.environ, "COLUMNS": "200"}
    if first_on_path:
        environment["PYTHONPATH"] = f"{first_on_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)


def test_json_on_standard_output_is_the_whole_report() -> None:
    done = flexep("doctor", "--json", "-")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["python"]["version"] == ".".join(map(str, sys.version_info[:3]))
    assert report["torch"]["version"] == torch.__version__
    assert report["compilers"].keys() == {"c++", "cmake", "nvcc"}
    assert report["built"].keys() == {"cuda_archs", "nvshmem", "why_not"}
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert [len(row) for row in report["peer_access"]] == [len(report["gpus"])] * len(report["gpus"])
    assert report["handle_kinds"].keys() == {"posix_fd", "fabric", "legacy_ipc"}
    assert report["dispatchers"].keys() == set(DISPATCHERS)
    assert report["services"].keys() == {"mps"}
    gloo, windows = {"process_group:gloo", "process_group:nccl", "local"}, {"windows:shm", "windows:local"}
    assert report["transports"].keys() == gloo | windows | {"windows:peer", "windows:gpu"}
    for part in ("handle_kinds", "dispatchers", "transports", "services"):
        for found in report[part].values():
            assert found["usable"] == (found["why_not"] is None)
    for name in DISPATCHERS:
        assert report["dispatchers"][name]["usable"], report["dispatchers"][name]
    for name in ("local", *windows):
        assert report["transports"][name]["usable"], report["transports"][name]
    assert report["transports"]["process_group:gloo"]["usable"]
    assert report["transports"]["process_group:nccl"]["usable"] == torch.cuda.is_available()
    # People still get their tables, beside the JSON and not in it.
    assert "dispatcher alltoall" in done.stderr


def test_json_to_a_file_leaves_the_tables_on_standard_output(tmp_path: Path) -> None:
    path = tmp_path / "doctor.json"
    done = flexep("doctor", "--json", str(path))
    assert done.returncode == 0, done.stderr
    assert "dispatcher alltoall" in done.stdout
    assert json.loads(path.read_text())["platform"]


def test_a_machine_that_runs_nothing_exits_1_and_says_why(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('planted: torch is broken')")
    done = flexep("doctor", "--json", "-", first_on_path=tmp_path)
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["torch"]["version"] is None
    assert report["torch"]["why_not"] == "planted: torch is broken"
    assert not any(found["usable"] for found in report["dispatchers"].values())
    assert "planted: torch is broken" in done.stderr


def test_help_and_version_are_quick_and_load_no_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise AssertionError('torch was imported')")
    began = time.monotonic()
    done = flexep("--help", first_on_path=tmp_path)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr
    assert "doctor" in done.stdout
    assert seconds < 5, "one second on a quiet machine"
    assert flexep("--version", first_on_path=tmp_path).stdout.startswith("flexep ")


def test_unknown_command_is_bad_usage() -> None:
    assert flexep("heal").returncode == 2


def test_a_probe_reports_the_reason() -> None:
    def fail() -> None:
        raise RuntimeError("first line\nsecond line")

    assert _probe.usable(fail) == {"usable": False, "why_not": "first line"}
    assert _probe.usable(lambda: None) == {"usable": True, "why_not": None}


@pytest.mark.parametrize(
    ("owner", "name", "raised", "said"),
    [
        (_memory.os, "memfd_create", OSError(38, "Function not implemented"), "Function not implemented"),
        (_memory.os, "posix_fallocate", OSError(28, "No space left on device"), "No space left on device"),
        (
            _fd_passing.socket.socket,
            "sendmsg",
            OSError(1, "Operation not permitted"),
            "Operation not permitted",
        ),
        (_memory, "_free_bytes", None, "16777216 free"),
    ],
)
def test_windows_that_do_not_work_say_why(
    monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, raised: OSError | None, said: str
) -> None:
    """A kernel without memfd, too little shared memory, sockets that pass nothing, a limit below the windows."""

    def refuse(*_: object) -> None:
        assert raised is not None
        raise raised

    monkeypatch.setattr(owner, name, refuse if raised else lambda: [(_memory.HOST, 16 << 20)])
    found = _probe.transports()["windows:shm"]
    assert not found["usable"]
    assert said in found["why_not"]


def test_a_window_that_is_not_shared_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        _memory.Mapping, "shared", staticmethod(lambda fd, nbytes: _memory.Mapping.private(nbytes))
    )
    assert "did not read" in _probe.transports()["windows:shm"]["why_not"]


def test_a_dispatcher_that_does_not_exist_is_not_usable() -> None:
    assert not _probe.usable(lambda: _probe._use_dispatcher("carrier_pigeon"))["usable"]


def test_handle_kinds_that_the_driver_refuses_say_so_and_leave_nothing(driver: FakeDriver) -> None:
    before = len(os.listdir("/proc/self/fd"))
    found = handle_kinds()
    assert found["posix_fd"] == {"usable": True, "why_not": None}
    assert found["fabric"]["why_not"] == "cuMemCreate: CUDA_ERROR_NOT_PERMITTED"
    assert found["legacy_ipc"] == {"usable": True, "why_not": None}
    assert driver.live == (0, 0, 0)
    assert len(os.listdir("/proc/self/fd")) == before
    driver.refuse = {"cuIpcGetMemHandle": CUresult.CUDA_ERROR_NOT_SUPPORTED}
    assert handle_kinds()["legacy_ipc"]["why_not"] == "cuIpcGetMemHandle: CUDA_ERROR_NOT_SUPPORTED"


def test_without_a_gpu_every_handle_kind_says_why(driver: FakeDriver) -> None:
    driver.gpus = 0
    assert {found["why_not"] for found in handle_kinds().values()} == {
        "no CUDA GPU: cuInit: CUDA_ERROR_NO_DEVICE"
    }


def test_windows_between_gpus_are_tried(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert _probe.usable(lambda: _probe._share_windows("cuda")) == {"usable": True, "why_not": None}
    assert driver.live == (0, 0, 0)
    driver.blind = {(0, 1)}
    assert "rank 0 not that of ranks [1]" in _probe.usable(lambda: _probe._share_windows("cuda"))["why_not"]
    monkeypatch.setenv("FLEXEP_PEER", "0")
    assert "FLEXEP_PEER=1" in _probe.usable(lambda: _probe._share_windows("cuda"))["why_not"]


def test_an_mps_daemon_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "nvidia-cuda-mps-control" in _probe.mps()["why_not"]


@pytest.mark.gpu
def test_gpu_machine() -> None:
    report = json.loads(flexep("doctor", "--json", "-").stdout)
    assert report["gpus"][0]["memory"] > 0
    assert report["transports"]["process_group:nccl"]["usable"]
    assert report["handle_kinds"]["posix_fd"]["usable"], report["handle_kinds"]
    assert report["transports"]["windows:gpu"]["usable"], report["transports"]
    assert "FLEXEP_PEER=1" in report["transports"]["windows:peer"]["why_not"]
