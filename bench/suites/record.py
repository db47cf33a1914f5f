"""What a suite leaves in bench/results: the command, the commit, what ran it, and a list of results."""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any


def arguments(doc: str | None, device: str, ranks: int) -> argparse.ArgumentParser:
    """What every suite is asked: where to run, and where its results go."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default=device, choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=ranks)
    parser.add_argument("--commit", help="of the measured sources, where they are no git checkout")
    parser.add_argument("--out", type=Path, help="where the JSON file goes")
    return parser


def commit_of_checkout() -> str:
    """The commit of the working tree."""
    done = subprocess.run(["git", "rev-parse", "HEAD"], stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.strip()


def command(module: str) -> str:
    """The command that was typed."""
    return shlex.join(["python", "-m", module, *sys.argv[1:]])


def write(path: Path, module: str, commit: str | None, **found: Any) -> None:
    """One JSON file; `commit` where the sources are no git checkout."""
    record = {"command": command(module), "commit": commit or commit_of_checkout(), **found}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n")


def table(columns: list[str], rows: list[list[str]]) -> str:
    """Markdown; the first column is text, the others numbers."""
    lines = [columns, ["---", *["--:"] * (len(columns) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
