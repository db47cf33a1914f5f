"""The result of `flexep bench` for people: a table of every number, and bars of the roundtrips."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

BAR = 48  # characters of the longest bar
EIGHTHS = " ▏▎▍▌▋▊▉"


def show(result: dict[str, Any], out: Console) -> None:
    """Prints everything."""
    from rich.markup import escape

    rows, machine, copy = result["results"], result["machine"], result["copy"]
    names = ("ranks", "tokens", "hidden", "experts", "top_k", "wire")
    said = [f"{name} {rows[0][name]}" for name in names]
    if (size := result["domain_size"]) is not None:
        said.insert(1, f"domains {rows[0]['ranks'] // size}x{size}")
    out.print(f"\n[bold]{', '.join(said)}[/bold]")
    for library in dict.fromkeys(row["library"] for row in rows):
        row = next(row for row in rows if row["library"] == library)
        fresh = "fresh" if row["fresh"] else "cached"
        out.print(
            f"[dim]{library}: {row['routing']} routing, {row['layout']}, alignment {row['alignment']}, "
            f"{row['mode']} sizes, {fresh} plans[/dim]"
        )
    out.print(
        f"[dim]copy {copy['bytes_per_second'] / 1e9:.2f} GB/s: {copy['method']}\n{machine['cores']} cores, "
        f"load {machine['load_before']:.1f} before and {machine['load_after']:.1f} after[/dim]\n"
    )
    out.print(_table(result))
    if result["plan"]:
        out.print(_plans(result))
    for line in bars(rows):
        out.print(line)
    for text in result["problems"][:20]:
        out.print(f"[red]wrong[/red] {escape(text)}")
    verdict = "[red]wrong results[/red]" if result["problems"] else "[green]all results right[/green]"
    out.print(f"\n{verdict} in {result['seconds']} s")
    out.print(f"[dim]{escape(result['command'])}[/dim]", soft_wrap=True)


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    rows = result["results"]
    with_host = any(row["host_us"] is not None for row in rows)
    numbers = (
        "median ms",
        "p99 ms",
        *(["host us"] if with_host else []),
        "vs torch",
        "remote MB",
        "logical MB",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in (*numbers, "x floor"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("right")
    for op in ("dispatch", "combine", "roundtrip"):
        some = [row for row in rows if row["op"] == op]
        best = min(row["median_us"] for row in some)
        table.add_row(f"[bold]{op}[/bold]")
        for row in some:
            speed = result["speedup"].get(op, {}).get(row["dispatcher"])
            table.add_row(
                f"  {_name(row)}", _ms(row["median_us"]), _ms(row["p99_us"]),
                *(["" if row["host_us"] is None else f"{row['host_us']:.0f}"] if with_host else []),
                "" if speed is None else f"{speed:.2f}x",
                f"{row['remote_bytes'] / 1e6:.2f}", f"{row['logical_bytes'] / 1e6:.2f}",
                f"{row['median_us'] / row['floor_us']:.2f}" if row["floor_us"] else "",
                "[green]yes[/green]" if row["checked"] else "[red]NO[/red]",
                style="bold" if row["median_us"] == best else None,
            )  # fmt: skip
        table.add_row()
    return table


def _plans(result: dict[str, Any]) -> Table:
    """The part of a fresh dispatch that comes before its rows."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("[bold]plan[/bold], inside dispatch", no_wrap=True)
    for name in ("median ms", "p99 ms", "of roundtrip"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in result["plan"]:
        share = f"{row['of_roundtrip']:.1%}"
        table.add_row(f"  {_name(row)}", _ms(row["median_us"]), _ms(row["p99_us"]), share)
    table.add_row()
    return table


def bars(rows: list[dict[str, Any]]) -> list[str]:
    """One bar a library for the roundtrip, the floor below them, to one scale."""
    some = [row for row in rows if row["op"] == "roundtrip"]
    longest = max(row["median_us"] for row in some)
    lines = [
        f"{_name(row):<13}[cyan]{bar(row['median_us'] / longest):<{BAR}}[/cyan]{_ms(row['median_us']):>10} ms"
        for row in some
    ]
    floor = some[0]["floor_us"]
    return [*lines, f"[dim]{'floor':<13}{bar(floor / longest):<{BAR}}{_ms(floor):>10} ms[/dim]"]


def bar(share: float) -> str:
    """A bar of `share` of the longest, to an eighth of a character."""
    eighths = max(1, round(share * BAR * 8))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _name(row: dict[str, Any]) -> str:
    return row["dispatcher"] if row["library"] == "flexep" else row["library"]


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"
