"""Which targets a row reaches, and what it is beside."""

from __future__ import annotations

from typing import Any

import pytest

from bench.suites import targets


def row(**fields: Any) -> dict[str, Any]:
    """A result of the shape of the targets."""
    return {
        "library": "flexep", "dispatcher": "deepep", "op": "dispatch", "layout": "flat", "alignment": 16,
        "wire": "bf16", "hidden": 7168, "experts": 256, "top_k": 8, "tokens": 4096, "ranks": 2,
        "median_us": 200.0, "ratio_to_copy_engine": 0.8, **fields,
    }  # fmt: skip


def copied(gb_s: float) -> dict[str, Any]:
    return {op: {"bytes_per_second": 1e9 * gb_s} for op in ("dispatch", "combine")}


@pytest.mark.parametrize(
    ("fields", "gb_s", "want"),
    [
        ({"median_us": 241.0}, 392.0, []),
        ({"median_us": 240.0}, 392.0, ["must"]),
        ({"median_us": 240.0}, 400.0, []),  # a faster link asks for more
        ({"median_us": 187.0}, 392.0, ["must", "aim"]),
        ({"median_us": 374.0, "tokens": 8192}, 392.0, ["must", "aim"]),
        ({"median_us": 300.0, "layout": "expert_major"}, 392.0, ["must"]),
        ({"median_us": 300.0, "layout": "expert_major", "alignment": 128}, 392.0, ["must"]),
        ({"median_us": 265.0, "layout": "expert_major", "op": "combine"}, 392.0, ["must"]),
        ({"layout": "expert_major", "alignment": 64}, 392.0, None),
        ({"op": "roundtrip"}, 392.0, None),
        ({"hidden": 4096}, 392.0, None),
        ({"ranks": 4, "ratio_to_copy_engine": 0.71}, 392.0, []),
        ({"ranks": 4, "ratio_to_copy_engine": 0.81}, 392.0, ["must", "aim"]),
        ({"ranks": 8, "ratio_to_copy_engine": 0.9, "median_us": 900.0}, 392.0, ["must", "aim", "stretch"]),
        ({"ranks": 8, "ratio_to_copy_engine": 0.9, "median_us": 920.0}, 392.0, []),  # below 300 GB/s
        ({"ranks": 3}, 392.0, None),
    ],
)
def test_targets(fields: dict[str, Any], gb_s: float, want: list[str] | None) -> None:
    crossing = {"dispatch": 273.3e6, "combine": 273.3e6}
    assert targets.reached(row(**fields), crossing, copied(gb_s)) == want
    assert targets.reached(row(**fields), crossing, None) is None


def test_must_is_faster_than_every_other_library_of_the_run() -> None:
    others = [
        row(library="deep_ep", median_us=230.0), row(library="torch", median_us=900.0),
        row(library="deep_ep", median_us=100.0, layout="expert_major"), row(library="copy_engine", median_us=150.0),
        row(dispatcher="alltoall", median_us=120.0),
    ]  # fmt: skip
    crossing, copy = {"dispatch": 58.5e6}, copied(392.0)
    assert targets.fastest_other(row(), others) == 230.0
    assert targets.reached(row(median_us=235.0), crossing, copy, 230.0) == []
    assert targets.reached(row(median_us=225.0), crossing, copy, 230.0) == ["must"]
    assert targets.fastest_other(row(), []) == float("inf")


def test_published_figures_are_beside_rows_of_the_same_operation() -> None:
    found = targets.beside_published(row(ranks=8, median_us=1000.0), {"dispatch": 288e6})
    assert {each["op"] for each in found} == {"dispatch"}
    assert found[0]["gb_s"] == pytest.approx(288.0)
    assert found[0]["ratio"] == pytest.approx(1.0)
