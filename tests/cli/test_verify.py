"""`flexep verify`: exit codes, JSON, reproducers, usage errors by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flexep
from flexep.cli.main import app
from flexep.cli.verify import _names
from flexep.testing.case import Case

runner = CliRunner()


def test_json_says_what_ran(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = runner.invoke(
        app, ["verify", "--ranks", "3", "--cases", "8", "--seed", "7", "--json", str(path)]
    )
    assert result.exit_code == 0, result.output
    assert "all passed" in result.output
    found = json.loads(path.read_text())
    assert found["cases"] == 8
    assert found["failures"] == []
    assert found["dispatchers"] == list(flexep.BACKENDS)
    assert (found["seed"], found["ranks"], found["device"]) == (7, 3, "cpu")
    assert list(found["coverage"]) == [*map(str, range(1, 20)), "domains", "window"]
    assert all(found["coverage"][row]["cases"] for row in ("19", "domains", "window"))
    for row in found["coverage"].values():
        assert row["title"]
        assert row["cases"] or row["rest"], row  # nothing uncovered without a reason


def test_all_are_those_that_run_on_the_device() -> None:
    assert _names("all", "cpu") == list(flexep.BACKENDS)
    assert _names("all", "cuda") == ["allgather", "alltoall"]
    assert _names("deepep", "cuda") == ["deepep"]  # who asks is told why not by the dispatcher


def test_one_case_again() -> None:
    case = Case(ranks=2, experts=3, hidden=16, top_k=2, tokens=5, dispatcher="allgather")
    args = ["verify", "--case", case.to_json(), "--dispatchers", "allgather", "--json", "-"]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert (found["cases"], found["ranks"], found["dispatchers"]) == (1, 2, ["allgather"])


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"hidden": 7}, "hidden = 7"),
        ({"top_k": 99}, "top_k = 99"),
        ({"domain_size": 3}, "domain_size = 3"),
    ],
)
def test_a_case_that_no_dispatcher_accepts_is_bad_usage(changed: dict[str, int], named: str) -> None:
    fields = {"ranks": 2, "experts": 3, "hidden": 16, "top_k": 2, "tokens": 5, **changed}
    result = runner.invoke(app, ["verify", "--case", json.dumps(fields)])
    assert result.exit_code == 2
    assert result.stderr.startswith(f"flexep verify: {named}: expected ")
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--ranks", "0"], "ranks = 0"),
        (["--cases", "0"], "cases = 0"),
        (["--seed", "-5"], "seed = -5"),
        (["--dispatchers", "alltoall,alltoall"], "dispatchers = 'alltoall,alltoall'"),
        (["--dispatchers", "alltoall,smoke"], "dispatchers = 'smoke'"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--device", "cuda", "--ranks", "1000"], "1000 ranks"),
        (["--case", "{}"], "experts"),
        (["--case", "nonsense"], "JSON object"),
        (["--ranks", "two"], "--ranks"),
    ],
)
def test_bad_usage_is_named(args: list[str], named: str) -> None:
    result = runner.invoke(app, ["verify", *args])
    assert result.exit_code == 2
    assert named in result.stderr
