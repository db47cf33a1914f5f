"""`flexep plan`: the JSON, what people read, usage errors by name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import flexep
from flexep.cli.main import app

runner = CliRunner()
SMALL = ["--tokens", "64", "--hidden", "64", "--experts", "16", "--top-k", "2"]


def test_json_has_bytes_times_and_memory(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    args = ["plan", *SMALL, "--topology", "2x4", "--routing", "zipf", "--rail-gbs", "50", "--json", str(path)]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert (found["topology"]["ranks"], found["topology"]["domain_size"]) == (8, 4)
    assert list(found["dispatchers"]) == ["allgather", "alltoall", "deepep", "hybridep"]
    for name, one in found["dispatchers"].items():
        assert one["runnable"] == (name in flexep.BACKENDS)
        assert (one["why_not"] is None) == one["runnable"]
        for load in ("closed_form", "drawn"):
            total = sum(one[load][op]["total_us"] for op in ("dispatch", "combine"))
            assert one[load]["total_us"] == pytest.approx(total)
            assert one[load]["memory_bytes"]
            for op in ("dispatch", "combine"):
                assert set(one[load][op]["remote_bytes"]) == {"remote", "link", "rail", "rows", "metadata"}
                assert all(term["formula"] and term["source"] for term in one[load][op]["terms"])
        assert one["drawn_over_closed_form"] > 1
    assert any(rate.startswith("rail_gbs = 50 ") and "(given)" in rate for rate in found["rates"])
    assert any(rate.startswith("link_gbs = 370 ") and "measured" in rate for rate in found["rates"])
    assert found["choice"]["closed_form"] in found["dispatchers"]
    assert found["choice"]["closed_form_runnable"] in flexep.BACKENDS
    assert found["sampling"]["exact"] is True


def test_tables_say_what_they_are_made_of() -> None:
    result = runner.invoke(app, ["plan", *SMALL], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    for words in (
        "expert reduce",
        "final reduce",
        "Assumptions",
        "lower bounds",
        "window",
    ):
        assert words in result.output


def test_json_on_standard_output_is_alone_there() -> None:
    args = ["plan", *SMALL, "--ranks", "4", "--dispatchers", "alltoall", "--capacity", "1.5", "--json", "-"]
    result = runner.invoke(app, args)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert list(found["dispatchers"]) == ["alltoall"]
    assert found["workload"]["capacity"] == 1.5
    assert "Assumptions" in result.stderr


def test_same_seed_same_prediction() -> None:
    args = ["plan", *SMALL, "--routing", "W2", "--samples", "100", "--json", "-"]
    one, two = (runner.invoke(app, [*args, "--seed", "5"]).stdout for _ in range(2))
    other = runner.invoke(app, [*args, "--seed", "6"]).stdout
    assert one == two
    assert json.loads(one)["sampling"]["exact"] is False
    assert json.loads(one)["balance"] != json.loads(other)["balance"]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--ranks", "0"], "ranks = 0"),
        (["--ranks", "8", "--domain-size", "3"], "domain_size = 3"),
        (["--topology", "nvl9"], "topology = 'nvl9'"),
        (["--topology", "nvl8", "--ranks", "8"], "ranks = 8"),
        (["--link-gbs", "0"], "link_gbs = 0.0"),
        (["--latency-us", "nan"], "latency_us = nan"),
        (["--tokens", "0"], "tokens = 0"),
        (["--hidden", "9"], "hidden = 9"),
        (["--experts", "0"], "experts = 0"),
        (["--top-k", "33"], "top_k = 33"),
        (["--dtype", "fp64"], "dtype = 'fp64'"),
        (["--wire", "fp4"], "wire = 'fp4'"),
        (["--wire", "fp32"], "wire = 'fp32'"),
        (["--layout", "rows"], "layout = 'rows'"),
        (["--alignment", "0"], "alignment = 0"),
        (["--capacity", "many"], "capacity = 'many'"),
        (["--capacity", "nan"], "capacity = nan"),
        (["--capacity", "3"], "capacity = 3"),
        (["--routing", "W9"], "routing = 'W9'"),
        (["--dispatchers", "alltoall,smoke"], "dispatchers = 'smoke'"),
        (["--dispatchers", "alltoall,alltoall"], "dispatchers = 'alltoall,alltoall'"),
        (["--samples", "0"], "samples = 0"),
        (["--tokens", "many"], "--tokens"),
    ],
)
def test_bad_usage_is_named(args: list[str], named: str) -> None:
    result = runner.invoke(app, ["plan", *args], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert named in result.stderr
