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
    show_head(result, out)
    if (copied := result["copy_engine"]) is not None:
        said = [f"{op} {_ms(one['median_us'])} ms" for op, one in copied.items()]
        out.print(f"[dim]copy engine, the remote bytes alone: {', '.join(said)}[/dim]\n")
    out.print(_table(result))
    if result["plan"]:
        out.print(_plans(result))
    for one in result["beside"]:
        out.print(f"{one['what']} beside {name_of(one)} {one['op']}: {one['ratio']:.2f}x its time alone")
    for line in bars(result["results"]):
        out.print(line)
    show_left_out(result, out)
    show_verdict(result, out)


def show_head(result: dict[str, Any], out: Console) -> None:
    """What ran, on what."""
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


def show_left_out(result: dict[str, Any], out: Console) -> None:
    """Who was not measured."""
    from rich.markup import escape

    for one in result["left_out"]:
        out.print(f"[yellow]left out[/yellow] {name_of(one)}: {escape(one['reason'])}")


def show_verdict(result: dict[str, Any], out: Console) -> None:
    """Whether all results were right, and how to run it again."""
    from rich.markup import escape

    for text in result["problems"][:20]:
        out.print(f"[red]wrong[/red] {escape(text)}")
    verdict = "[red]wrong results[/red]" if result["problems"] else "[green]all results right[/green]"
    out.print(f"\n{verdict} in {result['seconds']} s")
    out.print(f"[dim]{escape(result['command'])}[/dim]", soft_wrap=True)


def _table(result: dict[str, Any]) -> Table:
    from rich.table import Table

    rows = result["results"]
    with_host = any(row["host_us"] is not None for row in rows)
    with_sms = any(row["sms"] is not None for row in rows)
    copied = result["copy_engine"] is not None
    numbers = (
        *(["SMs"] if with_sms else []),
        "median ms",
        "p99 ms",
        *(["host us"] if with_host else []),
        "vs torch",
        "remote MB",
        "logical MB",
    )
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("", no_wrap=True)
    for name in (*numbers, "x floor", *(["of copy engine"] if copied else [])):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("right")
    for op in ("dispatch", "combine", "roundtrip"):
        some = [row for row in rows if row["op"] == op]
        best = min(row["median_us"] for row in some)
        table.add_row(f"[bold]{op}[/bold]")
        for row in some:
            speed = result["speedup"].get(op, {}).get(row["dispatcher"])
            table.add_row(
                f"  {name_of(row)}",
                *([_number(row["sms"], "d")] if with_sms else []),
                _ms(row["median_us"]), _ms(row["p99_us"]),
                *([_number(row["host_us"], ".0f")] if with_host else []),
                "" if speed is None else f"{speed:.2f}x",
                f"{row['remote_bytes'] / 1e6:.2f}", f"{row['logical_bytes'] / 1e6:.2f}",
                f"{row['median_us'] / row['floor_us']:.2f}" if row["floor_us"] else "",
                *([_number(row["ratio_to_copy_engine"], ".2f")] if copied else []),
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
        table.add_row(f"  {name_of(row)}", _ms(row["median_us"]), _ms(row["p99_us"]), share)
    table.add_row()
    return table


def bars(rows: list[dict[str, Any]]) -> list[str]:
    """One bar a library for the roundtrip, the floor below them, to one scale."""
    some = [row for row in rows if row["op"] == "roundtrip"]
    longest = max(row["median_us"] for row in some)
    width = max(12, *(len(name_of(row)) for row in some)) + 1
    lines = [
        f"{name_of(row):<{width}}[cyan]{bar(row['median_us'] / longest):<{BAR}}[/cyan]"
        f"{_ms(row['median_us']):>10} ms"
        for row in some
    ]
    floor = some[0]["floor_us"]
    return [*lines, f"[dim]{'floor':<{width}}{bar(floor / longest):<{BAR}}{_ms(floor):>10} ms[/dim]"]


def bar(share: float) -> str:
    """A bar of `share` of the longest, to an eighth of a character."""
    eighths = max(1, round(share * BAR * 8))
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def name_of(row: dict[str, Any]) -> str:
    """What a column is called: our dispatchers by name, others by library, with the class where there are two."""
    if row["library"] == "flexep":
        return str(row["dispatcher"])
    return f"deep_ep.{row['dispatcher']}" if row["library"] == "deep_ep" else str(row["library"])


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _ms(us: float) -> str:
    return f"{us / 1e3:.2f}"
