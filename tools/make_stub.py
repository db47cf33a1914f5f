"""Write the type stub of the compiled module to PATH: `python tools/make_stub.py PATH` (`make stubs`)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "# Written by `make stubs` from the compiled module; do not edit.\n"


def stub_text() -> str:
    """The stub of the flexep._C that this interpreter imports, from the signatures of its bindings."""
    with tempfile.TemporaryDirectory() as folder:
        code = "from mypy.stubgen import main; main()"
        subprocess.run([sys.executable, "-c", code, "--quiet", "-m", "flexep._C", "-o", folder], check=True)
        text = (Path(folder) / "flexep" / "_C.pyi").read_text()
    # pybind11 spells an int argument so; the one caller, flexep._native, passes ints.
    text = text.replace("typing.SupportsInt | typing.SupportsIndex", "int")
    text = text.replace("typing.SupportsFloat | typing.SupportsIndex", "float")
    # A class that only results are made of.
    text = text.replace("def __init__(self, *args, **kwargs) -> None: ...", "def __init__(self) -> None: ...")
    if "typing." not in text:
        text = text.replace("import typing\n", "")
    formatter = [sys.executable, "-m", "ruff", "format", "--stdin-filename", "_C.pyi", "-"]
    formatted = subprocess.run(formatter, input=text, capture_output=True, text=True, check=True).stdout
    return HEADER + formatted


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(stub_text())
