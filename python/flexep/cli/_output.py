"""What every command shares about its output: --json PATH, and where people's output goes meanwhile.

With `--json -` the JSON owns standard output, so tables and progress go to standard error.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from flexep.errors import ArgumentError

STDOUT = "-"

JsonOption = Annotated[
    str | None,
    typer.Option("--json", metavar="PATH", help="Also write the result as JSON; - is standard output."),
]


def console(json_path: str | None) -> Console:
    """The console for people: standard error when the JSON takes standard output, else standard output."""
    return Console(stderr=json_path == STDOUT, highlight=False)


def check_json(path: str | None) -> None:
    """Refuses a --json PATH that could not be written, before work starts whose result would be lost."""
    if path not in (None, STDOUT):
        check_file("json", path)


def check_file(argument: str, path: str) -> None:
    """Refuses a path where no file can be written; touches nothing. Raises ArgumentError naming it."""
    folder = os.path.dirname(path) or os.curdir
    if not path:
        raise ArgumentError(argument, path, "the path of a file")
    if os.path.isdir(path):
        raise ArgumentError(argument, path, "a file, not a directory")
    if not os.path.isdir(folder):
        raise ArgumentError(argument, path, f"a file in a directory that exists, not in {folder}")
    try:
        os.stat(path)
    except FileNotFoundError:
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError as error:  # such as a name that is too long
        raise ArgumentError(argument, path, f"a file that can be written ({error.strerror})") from None
    else:
        writable = os.access(path, os.W_OK)
    if not writable:
        raise ArgumentError(argument, path, "a file that can be written (permission denied)")


def make_folder(argument: str, path: str) -> Path:
    """The folder `path`, made with its parents if missing. Raises ArgumentError naming it."""
    if not path:
        raise ArgumentError(argument, path, "the path of a directory")
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(argument, path, f"a directory, or where to make one ({error.strerror})") from None
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ArgumentError(argument, path, "a directory that can be written (permission denied)")
    return folder


def split_names(argument: str, text: str) -> list[str]:
    """Names separated by commas. Raises ArgumentError naming one that is there twice."""
    names = text.split(",")
    for name in names:
        if names.count(name) > 1:
            raise ArgumentError(argument, text, f"each name once; {name!r} is repeated")
    return names


def write_json(path: str | None, result: Any) -> None:
    """Write `result` to the file `path`; "-" is standard output, None writes nothing."""
    if path is None:
        return
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    if path == STDOUT:
        sys.stdout.write(text)
        return
    Path(path).write_text(text)
