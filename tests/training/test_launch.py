"""Starting ranks: they meet, and a rank that fails ends the run and is named."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from flexep.errors import ArgumentError, FlexEPError
from flexep.training.launch import RankFailed, run_ranks
from tests.training.ranks import die, raise_error, write_sum


def test_ranks_meet_with_one_thread_each(tmp_path: Path) -> None:
    run_ranks("cpu", 3, write_sum, str(tmp_path))
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == dict.fromkeys("012", "6.0 1")


def test_a_killed_rank_ends_the_others() -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed) as failed:
        run_ranks("cpu", 3, die, 1)
    assert (failed.value.rank, failed.value.exit_code) == (1, -9)
    assert time.monotonic() - start < 50


@pytest.mark.parametrize(
    ("error", "code", "detail"),
    [
        (ArgumentError("colour", "blue", "none"), 2, ""),
        (FlexEPError("enough"), 1, ""),
        (RuntimeError("from elsewhere"), 1, "from elsewhere"),
    ],
)
def test_what_an_error_in_a_rank_becomes(error: Exception, code: int, detail: str) -> None:
    with pytest.raises(RankFailed) as failed:
        run_ranks("cpu", 2, raise_error, error)
    assert (failed.value.rank, failed.value.exit_code) == (0, code)
    assert detail in failed.value.details
    assert bool(detail) == bool(failed.value.details)


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="ranks = 1000"):
        run_ranks("cuda", 1000, die, 0)


def test_a_machine_without_a_gpu_is_refused_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ArgumentError, match="device = 'cuda'"):
        run_ranks("cuda", 1, die, 0)
