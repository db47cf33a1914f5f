"""The pictures of bench.suites.figures: bandwidth against multiprocessors, and a roofline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.suites.measured import OPS
from flexep.cli._bench_plot import COLOURS, GREY, STYLE
from flexep.cli._bench_sweep import Curve, draw_sweep
from flexep.cli._plot import pyplot

if TYPE_CHECKING:
    from bench.suites.figures import Point

COPY, MODEL = "copy_engine", "model"  # how the names of curves begin that are drawn without marks
REACH = (0.7, 20.0)  # local bytes for each byte on the link


def draw_curves(path: Path, curves: dict[str, dict[str, Curve]]) -> None:
    """Writes a PNG: by operation and name. Raises Unavailable without matplotlib."""
    values = sorted({value for by_name in curves.values() for curve in by_name.values() for value in curve})
    draw_sweep(path, "num_sms", values, curves)


def draw_roofline(path: Path, points: list[Point]) -> None:
    """Writes a PNG: GB/s on the link against local bytes for each byte on it, below what link and memory allow.

    Raises Unavailable without matplotlib.
    """
    plt = pyplot()
    with plt.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(9.6, 3.8), sharey=True, layout="constrained")
        for axes, op in zip(both, OPS, strict=True):
            here = [point for point in points if point.row["op"] == op]
            _roofs(axes, here)
            _marks(axes, here)
            axes.set_title(op, loc="left", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xlim(*REACH)
            ticks = [1, 2, 4, 8, 16]
            axes.set_xticks(ticks, [str(tick) for tick in ticks])
            axes.minorticks_off()
            axes.set_xlabel("local bytes for a byte on the link")
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.7)
            axes.legend(frameon=False, fontsize=8, loc="lower left")
        both[0].set_ylim(bottom=0)
        both[0].set_ylabel("GB/s a rank, on the link")
        figure.savefig(path, dpi=160)
        plt.close(figure)


def roof(link: float, local: float, intensity: float) -> float:
    """GB/s on the link that two rates allow, at so many local bytes for each byte on it."""
    return min(link, local / intensity)


def _colours(points: list[Point]) -> dict[int, str]:
    """By number of multiprocessors."""
    return dict(zip(sorted({point.row["sms"] for point in points}), COLOURS, strict=False))


def _roofs(axes: Any, points: list[Point]) -> None:
    """The copy engine, and the rates of each number of multiprocessors that some point has."""
    copied = [point.copy_gb_s for point in points if point.copy_gb_s is not None]
    if copied:
        axes.axhline(max(copied), color=GREY, linestyle="--", label=COPY)
    steps = [REACH[0] * (REACH[1] / REACH[0]) ** (i / 200) for i in range(201)]
    limits = {point.row["sms"]: point.limits for point in points if point.limits is not None}
    for sms, at in limits.items():
        allowed = [roof(at.link / 1e3, at.local / 1e3, step) for step in steps]
        axes.plot(steps, allowed, color=_colours(points)[sms], label=f"rates at {sms} SMs")


def _marks(axes: Any, points: list[Point]) -> None:
    """A mark a point, one shape for every layout and alignment, in the colour of its roof."""
    shapes: dict[str, str] = {}
    for point in points:
        if not point.load.link:
            continue
        row, x = point.row, point.load.local / point.load.link
        name = f"{row['layout'].replace('_', '-')}, alignment {row['alignment']}"
        label = name if name not in shapes else None
        shape = shapes.setdefault(name, "osD^v<>"[len(shapes) % 7])
        axes.plot(
            [x], [point.link_gb_s], shape, color=_colours(points)[row["sms"]], markersize=5,
            markerfacecolor="none", label=label,
        )  # fmt: skip
        axes.annotate(
            f"T {row['tokens']}", (x, point.link_gb_s), xytext=(6, 0), textcoords="offset points", fontsize=7,
            va="center",
        )  # fmt: skip
