"""Compiles a C++ test program with headers of csrc, or of a copy of csrc in which bugs are planted."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent


class NotCompiled(Exception):
    """The compiler's messages."""


def compile_program(program: Path, sources: Sequence[Path], include: Path, *flags: str) -> Path:
    compiler = shutil.which("c++") or shutil.which("g++")
    assert compiler, "the tests need the C++ compiler that built flexep"
    done = subprocess.run(
        [
            *[compiler, "-std=c++20", "-pthread", *flags, f"-I{include}"],
            *[str(source) for source in sources],
            *["-o", str(program)],
        ],
        capture_output=True,
        text=True,
        timeout=240,
    )
    if done.returncode != 0:
        raise NotCompiled(done.stderr)
    return program


def run_program(program: Path, *args: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *args],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def copy_planted(to: Path, file: str, right: str, wrong: str) -> Path:
    """A copy of csrc under `to` in which the first `right` of `file` reads `wrong`."""
    include = Path(shutil.copytree(ROOT / "csrc", to / "csrc"))
    text = (include / file).read_text()
    assert right in text, f"the planted bug no longer fits {file}: {right}"
    (include / file).write_text(text.replace(right, wrong, 1))
    return include
