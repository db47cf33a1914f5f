"""The tables and pictures of docs/performance.md, from files of a machine that takes as long as the model says."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from bench.suites import figures, no_cliffs, pictures, side_by_side
from bench.suites.measured import OPS
from bench.suites.no_cliffs import load_of, model_us
from flexep.benchmark.case import BenchCase
from tests.bench.test_no_cliffs import BASE, TRUE, Machine

COPY = {op: {"median_us": 10.0, "remote_bytes": 3920, "bytes_per_second": 3.92e8} for op in OPS}
RATES = {(sms, op, False): rates for sms, rates in TRUE.items() for op in OPS}


def case(layout: str, sms: int, alignment: int = 16) -> BenchCase:
    return replace(BASE, layout=layout, num_sms=sms, top_k=2, alignment=alignment, fresh=True)


def run_of(one: BenchCase, slower: float = 1.0) -> dict[str, Any]:
    """What a run leaves, `slower` times as slow as the model."""
    rows = [
        {
            "library": "flexep", "dispatcher": "deepep", "op": op, "layout": one.layout, "alignment": one.alignment,
            "mode": "capacity", "wire": "bf16", "routing": one.routing, "fresh": one.fresh, "tokens": one.tokens,
            "hidden": one.hidden, "experts": one.experts, "top_k": one.top_k, "ranks": one.ranks,
            "sms": one.num_sms, "median_us": slower * model_us(load_of(one, op), TRUE[one.num_sms or 0]),
            "p99_us": 99.0, "host_us": 5.0, "remote_bytes": 1e6, "ratio_to_copy_engine": 0.5, "checked": True,
        }
        for op in OPS
    ]  # fmt: skip
    return {
        "command": one.command(), "results": rows, "reached": [["must"], []], "left_out": [], "copy_engine": COPY,
        "must_cross_bytes": {op: load_of(one, op).link for op in OPS},
    }  # fmt: skip


def written(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """As side_by_side writes them."""
    return {
        "command": "python -m bench.suites.side_by_side", "commit": "abc",
        "results": [row for one in runs for row in one["results"]],
        "reached": [levels for one in runs for levels in one["reached"]],
        "runs": [
            {k: v for k, v in one.items() if k not in ("results", "reached")} | {"rows": len(one["results"])}
            for one in runs
        ],
    }  # fmt: skip


def sweep(layout: str, slower: float = 1.0) -> dict[str, Any]:
    """As `flexep bench --sweep` writes it; 12 multiprocessors have no rates, and take as long as 8."""
    runs = {sms: run_of(case(layout, 8 if sms == 12 else sms), slower) for sms in (8, 12, 64)}
    return {
        "command": f"flexep bench --layout {layout}", "sweep": {"key": "num_sms", "values": list(runs)},
        "results": [row for one in runs.values() for row in one["results"]],
        "runs": [
            {k: v for k, v in one.items() if k != "results"} | {"value": sms, "rows": len(one["results"])}
            for sms, one in runs.items()
        ],
    }  # fmt: skip


def cliffs_file() -> dict[str, Any]:
    """As no_cliffs writes it, with one shape that is twice as slow."""
    shapes = list(no_cliffs.shapes(replace(BASE, tokens=512)))[:3]
    judged = [
        one for sms in TRUE for shape in shapes
        for one in no_cliffs.judge(replace(shape, num_sms=sms), RATES, Machine())
    ]  # fmt: skip
    judged[0] = replace(judged[0], ratio=2.0)
    return {
        "command": "python -m bench.suites.no_cliffs", "commit": "abc", "tolerance": 0.15,
        "rates": [
            {"num_sms": sms, "op": op, "sent_ahead": ahead, **asdict(rates)}
            for (sms, op, ahead), rates in RATES.items()
        ],
        "results": [asdict(one) for one in judged],
    }  # fmt: skip


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
@pytest.mark.parametrize("op", OPS)
def test_the_model_of_a_curve_is_that_of_no_cliffs(layout: str, op: str) -> None:
    found = dict(figures.all_curves([sweep(layout), sweep(layout, 2.0)], op, RATES))
    name = figures.WORDS[layout]
    ours, model = found[f"deepep, {name}"], found[f"model, {name}"]
    assert list(found).count("copy_engine") == 1
    assert (set(ours), set(model)) == ({8, 12, 64}, {8, 64})
    assert all(2 * ours[sms] == pytest.approx(model[sms]) for sms in model)


def test_the_curve_of_scaleup_is_that_of_sweeps() -> None:
    """It measures both layouts of a number of multiprocessors before the next number."""
    found = [run_of(case(layout, sms)) for sms in (8, 64) for layout in ("flat", "expert_major")]
    speed = [run_of(case("flat", 8), 3.0)]
    parts = [{"part": "curve", "found": [*found, {"domains": "1x2"}]}, {"part": "speed", "found": speed}]
    sweeps = figures.curves_of({"command": "scaleup", "commit": "abc", "parts": parts})
    got = dict(figures.all_curves(sweeps, "dispatch", RATES))
    want = dict(figures.all_curves([sweep("flat"), sweep("expert_major")], "dispatch", RATES))
    assert got.keys() == want.keys()
    for name, curve in got.items():
        assert curve == {sms: want[name][sms] for sms in curve}
        assert curve.keys() == {8, 64}


def test_points_are_what_a_row_moved() -> None:
    runs = [run_of(case("expert_major", 64, alignment)) for alignment in (16, 128)]
    runs[0]["results"].append({**runs[0]["results"][0], "library": "torch"})
    runs[0]["reached"].append(None)
    found = figures.points(side_by_side.runs_of(written(runs)), RATES)
    assert [(p.row["op"], p.row["alignment"]) for p in found] == [(op, a) for a in (16, 128) for op in OPS]
    for point in found:
        us, rates = point.row["median_us"], TRUE[64]
        assert point.link_gb_s == point.load.link / us / 1e3
        nearest = max(point.load.link / rates.link, point.load.local / rates.local)
        assert us - rates.constant_us == pytest.approx(nearest)
    assert found[2].load.local > found[0].load.local  # padding to 128
    lines = figures.roofline_table(found).splitlines()[2:]
    assert lines[0].split(" | ")[-3] == f"{found[0].link_gb_s / 0.392:.2f}"
    assert lines[0].split(" | ")[-1] == f"{found[0].local_gb_s / (TRUE[64].local / 1e3):.2f} |"
    bare = figures.points(side_by_side.runs_of(written(runs)), {})
    assert figures.roofline_table(bare).splitlines()[2].endswith(" |  |")


def test_cliffs_are_counted() -> None:
    lines = figures.cliff_table(cliffs_file()).splitlines()[2:]
    assert len(lines) == len(RATES)
    assert "1.00 to 2.00 | 1 of 3 | H 2048, K 1, uniform" in lines[0]
    assert all("| 0 of 3 |" in line for line in lines[1:])


def test_a_roof_is_the_lower_of_link_and_memory() -> None:
    assert pictures.roof(350.0, 1400.0, 2.0) == 350.0
    assert pictures.roof(350.0, 1400.0, 8.0) == 175.0


def test_the_command_writes_what_it_was_given_files_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    side = written([run_of(case(layout, sms)) for layout, sms in (("flat", 8), ("expert_major", 64))])
    files = {"side": side, "cliffs": cliffs_file(), "flat": sweep("flat"), "major": sweep("expert_major")}
    for name, content in files.items():
        (tmp_path / name).write_text(json.dumps(content))
    words = ["--side-by-side", "side", "--no-cliffs", "cliffs", "--curve", "flat", "--curve", "major"]
    given = [word if word.startswith("--") else str(tmp_path / word) for word in words]
    out, images = tmp_path / "tables.md", tmp_path / "new"
    monkeypatch.setattr(sys, "argv", ["figures", *given, "--images", str(images), "--out", str(out)])
    assert figures.main() == 0
    text = out.read_text()
    assert text == capsys.readouterr().out
    for content in files.values():
        assert f"`{content['command']}`" in text
    assert "| deepep, flat |" in text
    assert "| model, expert-major |" in text
    assert all((images / name).read_bytes()[:4] == b"\x89PNG" for name in ("curve.png", "roofline.png"))
    monkeypatch.setattr(sys, "argv", ["figures", *given[:2]])
    assert figures.main() == 0
    assert "model" not in capsys.readouterr().out
