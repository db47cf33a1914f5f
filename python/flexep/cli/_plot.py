"""The picture of the demo: loss curves, and how far they are apart."""

from __future__ import annotations

import math
from itertools import cycle
from pathlib import Path
from typing import Any

GREY, INK = "#b8bcc4", "#22252b"
COLOURS = ("#c2410c", "#1d4ed8", "#15803d", "#7e22ce")
DASHES = ("-", (0, (4, 3)), (0, (1, 2)), (0, (6, 2, 1, 2)))
MARKERS = ("o", "x", "+", "s")


def plot_losses(path: Path, losses: dict[str, list[float]], tolerance: float) -> None:
    """Write a PNG: the curves on top, below their distance to the first one and `tolerance`.

    Raises Unavailable where matplotlib is not installed.
    """
    plt = pyplot()
    (first, reference), *others = losses.items()
    steps = range(1, len(reference) + 1)
    style = {
        "axes.spines.top": False, "axes.spines.right": False, "font.size": 9, "axes.edgecolor": INK,
        "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK,
    }  # fmt: skip
    with plt.rc_context(style):
        figure, (top, bottom) = plt.subplots(
            2, 1, figsize=(6.4, 5.0), sharex=True, height_ratios=(3, 2), layout="constrained"
        )
        top.plot(steps, reference, color=GREY, linewidth=6, solid_capstyle="round", label=first)
        styles = zip(cycle(COLOURS), cycle(DASHES), cycle(MARKERS), strict=False)
        for (label, curve), (colour, dash, marker) in zip(others, styles, strict=False):
            top.plot(steps, curve, color=colour, linestyle=dash, linewidth=1.6, label=label)
            gaps = [abs(a - b) or math.nan for a, b in zip(curve, reference, strict=True)]  # no mark: no gap
            bottom.plot(steps, gaps, marker, color=colour, markersize=5, markerfacecolor="none")
        top.set_ylabel("loss, nats a byte")
        top.legend(frameon=False)
        top.set_title("The same batches, the experts spread over ranks", loc="left", fontsize=10)
        bottom.axhline(tolerance, color=GREY, linewidth=1)
        bottom.annotate(
            f"tolerance {tolerance:g}",
            (1, tolerance),
            xytext=(0, -3),
            textcoords="offset points",
            va="top",
            color="#6b7280",
        )
        bottom.set_yscale("log")
        bottom.set_ylim(1e-8, tolerance * 3)
        bottom.set_ylabel("gap to 1 rank\n(no mark: equal)")
        bottom.set_xlabel("step")
        bottom.set_xlim(0.5, len(reference) + 0.5)
        figure.savefig(path, dpi=140)
        plt.close(figure)


def pyplot() -> Any:
    """matplotlib.pyplot, drawing to files. Raises Unavailable without matplotlib."""
    from flexep.errors import Unavailable

    try:
        import matplotlib
    except ImportError as error:
        raise Unavailable("the picture needs matplotlib: pip install 'flexep[plot]'") from error
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
