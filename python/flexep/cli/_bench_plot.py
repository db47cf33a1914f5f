"""The picture of `flexep bench`: times by operation, and bytes that crossed, one colour a library."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flexep.cli._bench_report import name_of
from flexep.cli._plot import pyplot

GREY, INK, SOFT = "#9aa0aa", "#22252b", "#6b7280"
COLOURS = ("#1d4ed8", "#0f9d8a", "#7e22ce", "#15803d", "#c2410c", "#0e7490", "#a16207", "#be185d")
TORCH = "#c8ccd4"
OPS = ("dispatch", "combine", "roundtrip")
STYLE = {
    "axes.spines.top": False, "axes.spines.right": False, "axes.spines.left": False, "font.size": 9,
    "axes.edgecolor": GREY, "axes.labelcolor": INK, "text.color": INK, "xtick.color": SOFT, "ytick.color": INK,
}  # fmt: skip


def plot_bench(path: Path, result: dict[str, Any]) -> None:
    """Writes a PNG. Raises Unavailable where matplotlib is not installed."""
    plt = pyplot()
    rows = result["results"]
    names = list(dict.fromkeys(name_of(row) for row in rows))
    ours = [name for name in names if name != "torch"]
    colour = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(ours)} | {"torch": TORCH}
    # One line a bar, operations from top to bottom with a gap between them.
    place = {
        (op, name): -(i * (len(names) + 1.1) + j) for i, op in enumerate(OPS) for j, name in enumerate(names)
    }
    with plt.rc_context(STYLE):
        figure, (times, sent) = plt.subplots(
            1, 2, figsize=(9.6, 1.3 + 0.27 * len(OPS) * (len(names) + 1.1)), width_ratios=(3, 2),
            sharey=True, layout="constrained",
        )  # fmt: skip
        _times(times, result, place, colour)
        _sent(sent, rows, place, colour)
        times.set_yticks(list(place.values()), [name for _, name in place], fontsize=8.5)
        for axes in (times, sent):
            axes.tick_params(axis="y", length=0)
            axes.set_ylim(min(place.values()) - 0.7, 1.2)
            axes.grid(axis="x", color="#e5e7eb", linewidth=0.7)
            axes.set_axisbelow(True)
        for op in OPS:
            times.annotate(
                op, (0, place[op, names[0]] + 0.55), xytext=(-4, 0), textcoords="offset points", ha="right",
                va="bottom", xycoords=("axes fraction", "data"), fontweight="bold", fontsize=9,
            )  # fmt: skip
        figure.suptitle(_title(rows[0]), x=0.01, ha="left", fontsize=10.5)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _times(
    axes: Any, result: dict[str, Any], place: dict[tuple[str, str], float], colour: dict[str, str]
) -> None:
    """Bars to the median, a thin line on to p99, and a mark where a plain copy of the bytes would end."""
    rows = result["results"]
    longest = max(row["median_us"] for row in rows) / 1e3
    for row in rows:
        name, op, median = name_of(row), row["op"], row["median_us"] / 1e3
        y = place[op, name]
        axes.barh(y, median, height=0.78, color=colour[name])
        axes.plot([row["floor_us"] / 1e3] * 2, [y - 0.39, y + 0.39], color="#c2410c", linewidth=1.6)
        speed = result["speedup"].get(op, {}).get(row["dispatcher"])
        text = f"{median:.3g} ms" + ("" if speed is None or name == "torch" else f"   {speed:.2g}x")
        text += "" if row["checked"] else "   WRONG"
        axes.annotate(
            text, (median, y), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8,
            color=INK if row["checked"] else "#b91c1c",
        )  # fmt: skip
    axes.set_xlim(0, longest * 1.22)
    axes.set_xlabel("median, ms" + ("  (x: times faster than plain torch)" if result["speedup"] else ""))
    axes.plot([], [], color="#c2410c", linewidth=1.6, label="floor: the same rows at copy bandwidth")
    axes.legend(frameon=False, fontsize=8, loc="lower right", bbox_to_anchor=(1.0, 1.0), borderaxespad=0.1)


def _sent(
    axes: Any, rows: list[dict[str, Any]], place: dict[tuple[str, str], float], colour: dict[str, str]
) -> None:
    """Bytes that the busiest rank moves: to or from others in full colour, its own pale."""
    most = max(row["logical_bytes"] for row in rows) / 1e6
    for row in rows:
        name, y = name_of(row), place[row["op"], name_of(row)]
        remote, logical = row["remote_bytes"] / 1e6, row["logical_bytes"] / 1e6
        axes.barh(y, logical, height=0.78, color=colour[name], alpha=0.35)
        axes.barh(y, remote, height=0.78, color=colour[name])
        axes.annotate(
            f"{remote:.3g} MB",
            (logical, y),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axes.set_xlim(0, most * 1.2)
    axes.set_xlabel("MB a rank sends or pulls (pale: its own)")


def _title(row: dict[str, Any]) -> str:
    fresh = "fresh" if row["fresh"] else "cached"
    return (
        f"{row['ranks']} ranks, {row['tokens']} tokens each, hidden {row['hidden']}, {row['experts']} experts, "
        f"top-{row['top_k']}, {row['wire']}, {row['routing']} routing, {fresh} plans"
    )
