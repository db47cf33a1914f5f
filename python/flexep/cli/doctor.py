"""`flexep doctor`: what this machine and this build can run, and why not."""

from __future__ import annotations

import platform
import sys
from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from flexep import __version__
from flexep.cli import _output, _probe
from flexep.errors import ArgumentError


def register(app: typer.Typer) -> None:
    app.command("doctor")(doctor)


def doctor(json_path: _output.JsonOption = None) -> None:
    """Show what this machine and this build can run, and why not.

    Exit code 0 if at least one dispatcher runs here, 1 if none does, 2 bad usage.
    """
    try:
        _output.check_json(json_path)
    except ArgumentError as error:
        print(f"flexep doctor: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    result = examine()
    show(result, _output.console(json_path))
    _output.write_json(json_path, result)
    raise typer.Exit(0 if any(found["usable"] for found in result["dispatchers"].values()) else 1)


def examine() -> dict[str, Any]:
    """Everything the command prints, as plain data."""
    torch = _probe.torch_version()
    built = _probe.built()
    works = torch["why_not"] is None and built["why_not"] is None
    return {
        "flexep": __version__,
        "python": _probe.python(),
        "platform": platform.platform(),
        "torch": torch,
        "compilers": _probe.compilers(),
        "built": built,
        "gpus": _probe.gpus() if works else [],
        "peer_access": _probe.peer_access() if works else [],
        "handle_kinds": _handle_kinds() if works else {},
        "services": {"mps": _probe.mps()},
        "dispatchers": _probe.dispatchers() if works else {},
        "transports": _probe.transports() if works else {},
    }


def _handle_kinds() -> dict[str, _probe.Finding]:
    from flexep.cli._handle_kinds import handle_kinds  # imports torch

    return handle_kinds()


def show(result: dict[str, Any], console: Console) -> None:
    """The same for people."""
    table = Table("", "", show_header=False, box=None, pad_edge=False)
    table.add_row(
        "flexep", f"{result['flexep']}, CUDA kernels: {', '.join(result['built']['cuda_archs']) or 'none'}"
    )
    table.add_row("python", f"{result['python']['version']} on {result['platform']}")
    table.add_row("torch", f"{result['torch']['version']}, CUDA {result['torch']['cuda'] or 'none'}")
    for name, found in result["compilers"].items():
        table.add_row(name, f"{found['version']} ({found['path']})" if found else "not found")
    for index, gpu in enumerate(result["gpus"]):
        reaches = [
            str(peer) for peer, can in enumerate(result["peer_access"][index]) if can and peer != index
        ]
        memory = f"{gpu['memory'] / 2**30:.0f} GiB"
        peers = f"reaches GPU {', '.join(reaches)}" if reaches else "reaches no other GPU"
        table.add_row(
            f"GPU {index}", f"{gpu['name']}, sm_{gpu['capability'].replace('.', '')}, {memory}, {peers}"
        )
    console.print(table)
    for part in ("torch", "built"):
        if result[part]["why_not"]:
            console.print(f"[red]{part}: {escape(result[part]['why_not'])}[/red]")

    findings = Table("", "usable", "why not", box=None, pad_edge=False)
    for title in ("dispatchers", "transports", "handle_kinds", "services"):
        for name, found in result[title].items():
            mark = "[green]yes[/green]" if found["usable"] else "[red]no[/red]"
            findings.add_row(
                f"{title.replace('_', ' ').removesuffix('s')} {name}", mark, escape(found["why_not"] or "")
            )
    console.print()
    console.print(findings)
