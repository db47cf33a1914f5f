"""The README's example runs as it stands, and the files it points to that are not pages exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_example_runs() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", example], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "[(100, 64), (0, 64), (7, 64), (64, 64)]" in done.stdout


def test_picture_is_there_and_small() -> None:
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", README)
    assert 1_000 < (ROOT / picture).stat().st_size < 150_000
