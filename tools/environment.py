"""Makes the virtual environment, or says whether it has a torch; run before anything is installed.

`python tools/environment.py make PATH`  a virtual environment at PATH, sharing this interpreter's torch if it
                                         has one that FlexEP supports
`python tools/environment.py has-torch`  exit code 0 if this interpreter imports torch 2.10 or newer, else 1
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 10)


def has_torch() -> bool:
    try:
        import torch
    except ImportError:
        return False
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= OLDEST_TORCH


def make(path: Path) -> None:
    share = ["--system-site-packages"] if has_torch() else []
    subprocess.run([sys.executable, "-m", "venv", "--clear", *share, path], check=True)
    if share and sys.prefix != sys.base_prefix:
        # This interpreter is a virtual environment itself, which "system" does not mean: name its packages.
        python = path / "bin" / "python"
        code = "import sysconfig; print(sysconfig.get_path('purelib'))"
        site = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        (Path(site) / "shared_environment.pth").write_text(sysconfig.get_path("purelib") + "\n")


def main() -> int:
    if sys.version_info < OLDEST_PYTHON:
        print(
            f"FlexEP needs Python 3.10 or newer, not {sys.version.split()[0]}: set PYTHON=", file=sys.stderr
        )
        return 1
    if sys.argv[1] == "make":
        make(Path(sys.argv[2]))
        return 0
    return 0 if has_torch() else 1


if __name__ == "__main__":
    sys.exit(main())
