"""Write the type stub of the compiled module to PATH: `python tools/make_stub.py PATH` (`make stubs`)."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

HEADER = "# Written by `make stubs` from the compiled module; do not edit.\n"


def stub_text() -> str:
    """The stub of the flexep._C that this interpreter imports, from the signatures that its bindings state."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "mypy.stubgen", "--quiet", "-m", "flexep._C", "-o", folder]
        subprocess.run(command, check=True)
        return HEADER + (Path(folder) / "flexep" / "_C.pyi").read_text()


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(stub_text())
