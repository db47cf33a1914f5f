"""The result of `flexep bench --sweep`: a table and a picture of bandwidth against the swept option."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flexep.cli._bench_plot import COLOURS, GREY, STYLE
from flexep.cli._bench_report import name_of, show_head, show_left_out, show_verdict
from flexep.cli._plot import pyplot

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Curve = dict[int, float]  # value of the swept option -> GB/s


def curves(result: dict[str, Any], op: str) -> dict[str, Curve]:
    """By library, and the copy engine where it was measured: the bytes that must cross over the time that it took, so
    that nobody gains by sending more."""
    from flexep.benchmark.sweep import runs

    found: dict[str, Curve] = {}
    for value, rows, rest in runs(result):
        nbytes, copied = rest["must_cross_bytes"][op], rest["copy_engine"]
        times = {name_of(row): row["median_us"] for row in rows if row["op"] == op}
        if copied is not None:
            times["copy_engine"] = copied[op]["median_us"]
        for name, median_us in times.items():
            found.setdefault(name, {})[value] = nbytes / median_us / 1e3
    return found


def show_sweep(result: dict[str, Any], out: Console) -> None:
    """One line a library, one column a value."""
    from rich.table import Table

    show_head(result, out)
    key, values = result["sweep"]["key"], result["sweep"]["values"]
    for op in ("dispatch", "combine"):
        table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
        table.add_column(f"[bold]{op}[/bold], GB/s of what must cross; {key}", no_wrap=True)
        for value in values:
            table.add_column(str(value), justify="right")
        for name, curve in curves(result, op).items():
            table.add_row(f"  {name}", *(f"{curve[v]:.3g}" if v in curve else "" for v in values))
        out.print(table, "")
    if any(one["beside"] for one in result["runs"]):
        out.print(_beside_table(result), "")
    for one in result["runs"][:1]:
        show_left_out(one, out)
    show_verdict(result, out)


def _beside_table(result: dict[str, Any]) -> Table:
    """How many times as long products take beside each operation as alone."""
    from rich.table import Table

    first = result["runs"][0]["beside"]
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column(f"[bold]{first[0]['what']}[/bold], times as long as alone beside", no_wrap=True)
    for value in result["sweep"]["values"]:
        table.add_column(str(value), justify="right")
    for i, one in enumerate(first):
        ratios = (f"{run['beside'][i]['ratio']:.2f}" for run in result["runs"])
        table.add_row(f"  {name_of(one)} {one['op']}", *ratios)
    return table


def plot_sweep(path: Path, result: dict[str, Any]) -> None:
    """Writes a PNG: a curve a library, dispatch and combine side by side. Raises Unavailable without matplotlib."""
    key, values = result["sweep"]["key"], result["sweep"]["values"]
    draw_sweep(path, key, values, {op: curves(result, op) for op in ("dispatch", "combine")})


def draw_sweep(path: Path, key: str, values: list[int], found: dict[str, dict[str, Curve]]) -> None:
    """Writes a PNG: by operation, the curves by name. The copy engine and a model are dashed; names that end alike
    behind a comma have one colour. Raises Unavailable without matplotlib."""
    plt = pyplot()
    kinds = list(dict.fromkeys(_kind(name) for by_name in found.values() for name in by_name))
    with plt.rc_context(STYLE):
        figure, both = plt.subplots(1, 2, figsize=(9.6, 3.6), sharey=True, layout="constrained")
        for axes, (op, by_name) in zip(both, found.items(), strict=True):
            for name, curve in by_name.items():
                given = name.startswith(("copy_engine", "model"))
                axes.plot(
                    list(curve),
                    list(curve.values()),
                    "--" if given else "-",
                    color=GREY if name == "copy_engine" else COLOURS[kinds.index(_kind(name)) % len(COLOURS)],
                    label=name,
                    marker="" if given else "o",
                )
            axes.set_title(op, loc="left", fontsize=10)
            axes.set_xscale("log", base=2)
            axes.set_xticks(values, [str(value) for value in values])
            axes.minorticks_off()
            axes.set_xlabel({"num_sms": "multiprocessors", "tokens": "tokens a rank"}[key])
            axes.grid(axis="y", color="#e5e7eb", linewidth=0.7)
        both[0].set_ylim(bottom=0)
        both[0].set_ylabel("GB/s a rank, of what must cross")
        both[1].legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _kind(name: str) -> str:
    return name.rpartition(", ")[2]
