"""What every command shares about its output: --json PATH, and where people's output goes meanwhile.

With `--json -` the JSON owns standard output, so tables and progress go to standard error.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

STDOUT = "-"

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Also write the result as JSON; - is standard output."),
]


def console(json_path: str | None) -> Console:
    """The console for people: standard error when the JSON takes standard output, else standard output."""
    return Console(stderr=json_path == STDOUT, highlight=False)


def write_json(path: str | None, result: Any) -> None:
    """Write `result` to the file `path`, making its folders; "-" is standard output, None writes nothing."""
    if path is None:
        return
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    file = Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
