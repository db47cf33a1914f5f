"""The suites: side by side, scaleup with its time boxes, and what they compare with; small, on the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.suites import no_cliffs, side_by_side
from bench.suites.scaleup import __main__ as scaleup
from bench.suites.scaleup import part
from bench.suites.scaleup.boxes import Outcome
from bench.suites.scaleup.report import in_words, tables
from flexep.benchmark.case import BenchCase
from flexep.errors import Unavailable
from flexep.testing import pool as pools
from flexep.testing.pool import RankPool
from tests.bench import plants
from tests.bench.test_no_cliffs import Machine
from tests.bench.test_targets import row

ROOT = Path(__file__).parents[2]
HERE = part.Place("cpu", 2, 2)


@pytest.mark.parametrize("alignment", [16, 128])
@pytest.mark.parametrize("tokens", [1, 64, 4096])
def test_static_sizes_hold_even_routing(tokens: int, alignment: int) -> None:
    factor = side_by_side.capacity_for(tokens, 8, 256, 2, alignment)
    rows = factor * tokens * 8
    assert rows >= 128 * alignment  # the least that a dispatcher accepts
    assert rows >= tokens * 8 + (64 * alignment if tokens == 4096 else 0)
    assert tokens < 4096 or factor < (1.1 if alignment == 16 else 1.35)


COPIED = {"bytes_per_second": 1e9, "inside_bytes_per_second": None}


def test_side_by_side_keeps_every_case(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "results" / "ep2.json"
    cases = list(side_by_side.grid("cpu", 2, tokens=(8,)))
    assert [(case.layout, case.alignment, case.mode) for case in cases] == [
        ("flat", 16, "capacity"), ("expert_major", 16, "capacity"), ("expert_major", 128, "capacity"),
    ]  # fmt: skip
    monkeypatch.setattr(side_by_side, "grid", lambda *_: iter(cases[:2]))
    monkeypatch.setattr(side_by_side, "copy_facts", lambda device, size: COPIED)
    monkeypatch.setattr(sys, "argv", ["side_by_side", "--commit", "abc", "--out", str(out)])
    assert side_by_side.main() == 0
    found = json.loads(out.read_text())
    assert (found["commit"], found["command"].split()[:3]) == (
        "abc",
        ["python", "-m", "bench.suites.side_by_side"],
    )
    assert [r["layout"] for r in found["results"] if r["dispatcher"] == "deepep"] == ["flat"] * 3 + [
        "expert_major"
    ] * 3
    assert len(found["reached"]) == len(found["results"])
    assert all(r["checked"] for r in found["results"])


def test_no_cliffs_ends_with_what_it_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Fake(Machine):
        def __enter__(self) -> Fake:
            return self

        def __exit__(self, *_: object) -> None:
            """Nothing is held."""

    out = tmp_path / "out.json"
    command = [
        "no_cliffs",
        "--tokens",
        "512",
        "--num-sms",
        "8",
        "--shapes",
        "12",
        "--commit",
        "abc",
        "--out",
        str(out),
    ]
    monkeypatch.setattr(sys, "argv", command)
    for cliff, code in ((1.0, 0), (1.4, 1)):
        monkeypatch.setattr(no_cliffs, "Measured", lambda *_, cliff=cliff: Fake(cliff))
        assert no_cliffs.main() == code
        found = json.loads(out.read_text())
        assert len(found["results"]) == 24
        assert [(each["num_sms"], each["op"]) for each in found["rates"]] == [(8, "dispatch"), (8, "combine")]
    monkeypatch.setattr(sys, "argv", [*command, "--tokens", "1"])
    assert no_cliffs.main() == 2


def test_boxes_of_all_parts_take_the_time_that_is_given() -> None:
    every = [box.part for box in scaleup.BOXES]
    assert sum(box.seconds for box in scaleup.boxes(every, scaleup.TOTAL)) <= scaleup.TOTAL < 8 * 60
    assert [box.part for box in scaleup.boxes(["curve"], 47.0)] == ["curve"]
    assert list(part.PARTS) == every


def test_the_dry_run_of_every_part(monkeypatch: pytest.MonkeyPatch) -> None:
    emitted: list[dict[str, Any]] = []
    monkeypatch.setattr(part, "CASES", 3)
    part.contract(HERE, part.Clock(60.0), emitted.append)
    assert emitted == [{"domains": "1x2", "cases": 3, "failed": []}]
    emitted.clear()
    part.training(HERE, part.Clock(60.0), emitted.append)
    assert len({tuple(e["losses"]) for e in emitted}) == 1  # fp32 on the CPU: the same bits everywhere
    assert [e["dispatcher"] for e in emitted] == ["allgather", "alltoall", "deepep", "hybridep"]
    emitted.clear()
    part.latency(HERE, part.Clock(0.0), emitted.append)  # no time is left
    assert emitted == []


def test_half_of_the_contract_is_for_two_domains(monkeypatch: pytest.MonkeyPatch) -> None:
    shares: list[int] = []
    monkeypatch.setattr(part, "RankPool", Nothing)
    monkeypatch.setattr(part.Clock, "share", lambda self, parts: shares.append(parts))
    monkeypatch.setattr(
        part, "check_cases", lambda pool, cases, clock: {"sizes": {c.domain_size for c in cases}}
    )
    emitted: list[dict[str, Any]] = []
    part.contract(part.Place("cpu", 8, 8), part.Clock(1.0), emitted.append)
    assert emitted == [{"domains": "1x8", "sizes": {None}}, {"domains": "2x4", "sizes": {4}}]
    assert shares == [2, 1]


@pytest.mark.parametrize("name", ["speed", "curve", "latency", "training"])
def test_ranks_that_share_gpus_are_not_timed(name: str) -> None:
    emitted: list[dict[str, Any]] = []
    part.run(name, part.Place("cuda", 8, 2), part.Clock(60.0), emitted.append)
    (entry,) = emitted
    assert entry["left_out"].startswith("8 ranks share 2 GPUs")


def test_eight_ranks_on_two_gpus_are_clients_of_a_daemon(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    class Daemon(Nothing):
        environment: dict[str, str]

        def __init__(self, ranks_a_gpu: int) -> None:
            self.environment = {"RANKS_A_GPU": str(ranks_a_gpu)}

    monkeypatch.setattr(pools, "Mps", Daemon)
    monkeypatch.setattr(pools, "RankPool", lambda *args, **how: asked.append((args, how)) or Nothing())
    with part.Place("cuda", 8, 2).pool():
        pass
    ((args, how),) = asked
    assert args[:2] == (8, "cuda")
    assert how == {"gpus": 2, "environment": {"RANKS_A_GPU": "4", "FLEXEP_PEER": "1"}}


class Nothing:
    """A pool that is not used."""

    def __init__(self, *_: object) -> None: ...
    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None: ...


def test_parts_say_why_they_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    with RankPool(2, setup=plants.no_windows) as pool:
        cases = part.random_cases(2, 1, seed=2, limit=2**16)
        found = part.check_cases(
            pool, [part.replace(case, transport="process") for case in cases], part.Clock(60.0)
        )
        assert plants.NO_WINDOWS in found["left_out"]
        trained = part.train_on(pool, part.training_config(HERE, "deepep"))
        assert plants.NO_WINDOWS in trained["left_out"]

    def refuse(*_: object) -> None:
        raise Unavailable(plants.NO_WINDOWS)

    monkeypatch.setattr(side_by_side, "measure", refuse)
    emitted: list[dict[str, Any]] = []
    part.run("curve", HERE, part.Clock(1.0), emitted.append)
    assert emitted == [{"dispatcher": "everybody", "left_out": plants.NO_WINDOWS}]
    text = in_words([Outcome("curve", "done", 1.0, 2.0, found=emitted)])
    assert f"left out everybody: {plants.NO_WINDOWS}" in text


def test_the_report_shows_every_part() -> None:
    emitted: list[dict[str, Any]] = []
    case = side_by_side.at("cpu", 2, 8, "flat", time_limit=0.02, dispatchers=("deepep",), baselines=())
    side_by_side.measure(iter([case]), "cpu", 2, emitted.append, copy_bytes=1 << 20)
    (run,) = emitted
    on_eight = {**run, "results": [row(ranks=8, median_us=1000.0)], "must_cross_bytes": {"dispatch": 288e6}}
    on_eight["results"] = [{**run["results"][0], **on_eight["results"][0]}]
    on_eight["reached"] = [["must"]]
    text = tables([
        Outcome("contract", "done", 1.0, 2.0, found=[{"domains": "1x8", "cases": 9, "failed": []}]),
        Outcome("speed", "done", 1.0, 2.0, found=[on_eight]),
        Outcome("curve", "done", 1.0, 2.0, found=[run]),
        Outcome("training", "done", 1.0, 2.0, found=[
            {"dispatcher": "deepep", "losses": [5.0, 4.5], "tokens_per_second": 1234.5, "seconds": 1.0},
            {"dispatcher": "hybridep", "left_out": "no windows"},
        ]),
    ])  # fmt: skip
    assert "| 1x8 | 9 | passed |" in text
    assert "| deepep | dispatch | flat | 16 | 4096 |" in text
    assert "| must | yes |" in text
    assert "| DeepEP V1, 8xH100, 20 SMs | dispatch | 288 | 288 | 1.00 |" in text
    assert "| deepep | 1,234 | 4.5000 |" in text
    assert "| hybridep | left out |  |" in text


def test_the_command_writes_one_file_and_one_table(tmp_path: Path) -> None:
    out, table = tmp_path / "out.json", tmp_path / "out.md"
    command = [
        sys.executable, "-m", "bench.suites.scaleup", "--device", "cpu", "--ranks", "2", "--parts", "training",
        "--seconds", "200", "--commit", "abc", "--out", str(out), "--table", str(table),
    ]  # fmt: skip
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert [(one["part"], one["state"]) for one in found["parts"]] == [("training", "done")]
    assert len(found["parts"][0]["found"]) == 4
    assert "| deepep |" in table.read_text()
    assert asdict(Outcome("a", "done", 0.0, 1.0)).keys() == found["parts"][0].keys()


def test_cases_are_accepted_on_gpus() -> None:
    for case in side_by_side.grid("cuda", 8):
        assert (case.hidden, case.experts, case.top_k, case.mode) == (7168, 256, 8, "capacity")
    assert isinstance(side_by_side.at("cuda", 8, 1, "expert_major"), BenchCase)
