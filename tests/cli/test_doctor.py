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
from flexep.cli._handle_kinds import AllocationProperties
from flexep.transport import _fd_passing, _memory

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
    gloo, windows = {"process_group:gloo", "process_group:nccl", "local"}, {"windows:shm", "windows:local"}
    assert report["transports"].keys() == gloo | windows
    for part in ("handle_kinds", "dispatchers", "transports"):
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


def test_allocation_properties_have_the_layout_of_the_driver() -> None:
    # CUmemAllocationProp: two enums, a location of two ints, a pointer, eight bytes.
    import ctypes

    assert ctypes.sizeof(AllocationProperties) == 32
    assert AllocationProperties.location_type.offset == 8
    assert AllocationProperties.flags.offset == 24


@pytest.mark.gpu
def test_gpu_machine() -> None:
    report = json.loads(flexep("doctor", "--json", "-").stdout)
    assert report["gpus"][0]["memory"] > 0
    assert report["transports"]["process_group:nccl"]["usable"]
    assert any(found["usable"] for found in report["handle_kinds"].values())
