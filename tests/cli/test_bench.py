"""`flexep bench`: exit codes, JSON, the command that repeats a run, the report and the picture."""

from __future__ import annotations

import io
import json
import shlex
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from flexep.benchmark import run as driver
from flexep.benchmark import sweep
from flexep.benchmark.case import ALL, BenchCase
from flexep.cli._bench_plot import plot_bench
from flexep.cli._bench_report import BAR, bar, name_of, show
from flexep.cli._bench_sweep import curves, plot_sweep, show_sweep
from flexep.cli.main import app
from flexep.testing.pool import RankPool
from tests.bench import plants

runner = CliRunner()
TINY = "--ranks 2 --dispatchers alltoall --tokens 24 --hidden 16 --experts 4 --top-k 2 --time-limit 0.1 --pairs 8"


@pytest.fixture(autouse=True)
def _quick_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    quick = partial(driver.copy_facts, size=1 << 20)
    for module in (driver, sweep):
        monkeypatch.setattr(module, "copy_facts", lambda device, size: quick(device))


def test_json_on_standard_output_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "bench.png"
    result = runner.invoke(app, ["bench", *TINY.split(), "--json", "-", "--plot", str(picture)])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert all(row["checked"] for row in found["results"])
    assert "all results right" in result.stderr
    assert "x floor" in result.stderr
    assert "plan, inside dispatch" in result.stderr
    assert found["command"] in result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_failed_check_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(driver, "RankPool", partial(RankPool, setup=plants.wrong_row_in_alltoall))
    path = tmp_path / "out.json"
    result = runner.invoke(app, ["bench", *TINY.split(), "--json", str(path)])
    assert result.exit_code == 1
    assert "wrong results" in result.output
    checked = {row["dispatcher"]: row["checked"] for row in json.loads(path.read_text())["results"]}
    assert checked == {"alltoall": False, "all_to_all_single": True}


@pytest.mark.parametrize(
    "case",
    [
        BenchCase(),
        BenchCase(
            ranks=3, dispatchers=("alltoall",), baselines=(), tokens=5, hidden=64, experts=7, top_k=2,
            dtype="fp32", routing="W6", layout="flat", mode="capacity", capacity=2.5, fresh=False, alignment=8,
            seed=9, time_limit=0.5, pairs=3,
        ),
        BenchCase(dispatchers=(), weights="combine"),
        BenchCase(dispatchers=("hybridep",), domain_size=2),
        BenchCase(
            device="cuda", ranks=1, dispatchers=ALL, baselines=("symm_mem", "copy_engine"), routing="next_rank",
            num_sms=24, beside="gemm",
        ),
    ],
)  # fmt: skip
def test_the_printed_command_repeats_the_case(monkeypatch: pytest.MonkeyPatch, case: BenchCase) -> None:
    seen: list[BenchCase] = []

    def stop(case: BenchCase, progress: Any) -> None:
        seen.append(case)
        raise KeyboardInterrupt

    monkeypatch.setattr(driver, "run", stop)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    runner.invoke(app, shlex.split(case.command())[1:])
    assert seen == [case]


@pytest.mark.parametrize(
    ("args", "named"),
    [
        (["--ranks", "0"], "ranks = 0"),
        (["--dispatchers", "alltoall,smoke"], "dispatchers = 'smoke'"),
        (["--dispatchers", "alltoall,alltoall"], "dispatchers = 'alltoall,alltoall'"),
        (["--baselines", "numpy"], "baselines = 'numpy'"),
        (["--baselines", "torch,copy_engine"], "baselines = 'copy_engine': expected torch on the CPU"),
        (["--baselines", "deep_ep"], "baselines = 'deep_ep'"),
        (["--num-sms", "0"], "num_sms = 0"),
        (["--beside", "gemm"], "beside = 'gemm': expected none on the CPU"),
        (["--sweep", "hidden=64"], "sweep = 'hidden=64'"),
        (["--sweep", "tokens=8,many"], "sweep = 'tokens=8,many'"),
        (["--sweep", "tokens=8,8"], "sweep = 'tokens=8,8'"),
        (["--sweep", "tokens=8,0"], "tokens = 0"),
        (["--device", "tpu"], "device = 'tpu'"),
        (["--device", "cuda", "--ranks", "1000"], "1000 ranks"),
        (["--hidden", "7"], "hidden = 7"),
        (["--domain-size", "3"], "domain_size = 3"),
        (["--routing", "W9"], "routing = 'W9'"),
        (["--plot", "out.pdf"], "plot = 'out.pdf'"),
        (["--tokens", "many"], "--tokens"),
    ],
)
def test_bad_usage_is_named(args: list[str], named: str) -> None:
    result = runner.invoke(app, ["bench", *args])
    assert result.exit_code == 2
    assert named in result.stderr


def test_a_sweep_is_one_result_and_a_picture(tmp_path: Path) -> None:
    picture, path = tmp_path / "sweep.png", tmp_path / "out.json"
    args = [*TINY.split(), "--sweep", "tokens=8,24", "--json", str(path), "--plot", str(picture)]
    result = runner.invoke(app, ["bench", *args])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert [row["tokens"] for row in found["results"]] == [8] * 6 + [24] * 6
    assert [(one["value"], one["rows"]) for one in found["runs"]] == [(8, 6), (24, 6)]
    rows = [row for row in found["results"] if (row["dispatcher"], row["op"]) == ("alltoall", "combine")]
    must_cross = [one["must_cross_bytes"]["combine"] for one in found["runs"]]
    assert 0 < must_cross[0] <= 8 * 32 < must_cross[1] <= 24 * 32  # a row of 16 bf16 a token
    assert curves(found, "combine")["alltoall"] == {
        row["tokens"]: nbytes / row["median_us"] / 1e3 for row, nbytes in zip(rows, must_cross, strict=True)
    }
    assert "all results right" in result.output
    assert "--sweep tokens=8,24" in found["command"]
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_all_says_who_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    result = runner.invoke(app, ["bench", *TINY.split(), "--baselines", "all", "--json", str(path)])
    assert result.exit_code == 0, result.output
    found = json.loads(path.read_text())
    assert {row["library"] for row in found["results"]} == {"flexep", "torch"}
    assert [name_of(one) for one in found["left_out"]] == [
        "symm_mem", "deep_ep.Buffer", "deep_ep.ElasticBuffer", "copy_engine",
    ]  # fmt: skip
    assert "left out copy_engine: it moves memory of GPUs" in result.output


@pytest.mark.parametrize(("asked", "code"), [("all", 0), ("deepep,alltoall", 2)])
def test_a_dispatcher_that_cannot_run_here(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, asked: str, code: int
) -> None:
    """Among all it is left out with its reason; by name it is an error."""
    monkeypatch.setattr(driver, "RankPool", partial(RankPool, setup=plants.no_windows))
    path = tmp_path / "out.json"
    result = runner.invoke(app, ["bench", *TINY.split(), "--dispatchers", asked, "--json", str(path)])
    assert result.exit_code == code, result.output
    if asked == "all":
        found = json.loads(path.read_text())
        assert {name_of(row) for row in found["results"]} == {"allgather", "alltoall", "torch"}
        assert [(name_of(one), one["reason"]) for one in found["left_out"]] == [
            ("deepep", plants.NO_WINDOWS), ("hybridep", plants.NO_WINDOWS),
        ]  # fmt: skip
    else:
        assert f"dispatchers = 'deepep': {plants.NO_WINDOWS}" in result.stderr


def as_on_gpus(run: dict[str, Any]) -> dict[str, Any]:
    """A result with what only GPUs fill in: one row's ratio and host time are there, another's are not."""
    engine = {"median_us": 10.0, "remote_bytes": 100, "bytes_per_second": 1e7}
    beside = {"library": "flexep", "dispatcher": "alltoall", "op": "dispatch", "what": "gemm", "ratio": 1.07}
    for i, row in enumerate(run.get("results", ())):
        row.update(sms=24 if i % 2 else None, host_us=31.0 if i % 2 else None)
        row["ratio_to_copy_engine"] = 0.83 if i % 2 else None
    out = {"library": "deep_ep", "dispatcher": "Buffer", "reason": "no [such] module"}
    return {
        **run,
        "copy_engine": dict.fromkeys(("dispatch", "combine"), engine),
        "beside": [beside],
        "left_out": [out],
    }


def test_what_gpus_fill_in_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert runner.invoke(app, ["bench", *TINY.split(), "--json", str(path)]).exit_code == 0
    result = as_on_gpus(json.loads(path.read_text()))
    out = Console(record=True, width=160, file=io.StringIO())
    show(result, out)
    text = out.export_text()
    for said in (
        "SMs",
        "24",
        "31",
        "of copy engine",
        "0.83",
        "dispatch 0.01 ms",
        "gemm beside alltoall dispatch: 1.07x",
    ):
        assert said in text, said
    assert "left out deep_ep.Buffer: no [such] module" in text
    plot_bench(tmp_path / "bench.png", result)


def test_a_sweep_shows_the_copy_engine_and_products_beside(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    assert (
        runner.invoke(app, ["bench", *TINY.split(), "--sweep", "num_sms=8,24", "--json", str(path)]).exit_code
        == 0
    )
    found = json.loads(path.read_text())
    found["runs"] = [as_on_gpus(one) for one in found["runs"]]
    out = Console(record=True, width=160, file=io.StringIO())
    show_sweep(found, out)
    text = out.export_text()
    for said in (
        "num_sms",
        "copy_engine",
        "gemm, times as long as alone beside",
        "alltoall dispatch",
        "1.07",
    ):
        assert said in text, said
    must_cross = found["runs"][0]["must_cross_bytes"]["dispatch"]
    assert curves(found, "dispatch")["copy_engine"] == dict.fromkeys((8, 24), must_cross / 10.0 / 1e3)
    plot_sweep(tmp_path / "sweep.png", found)


def test_bars_have_the_length_of_their_share() -> None:
    assert bar(1.0) == "█" * BAR
    assert bar(0.5) == "█" * (BAR // 2)
    assert bar(0.0) == "▏"
