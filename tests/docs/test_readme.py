"""What the README shows beside its example, which tests/docs/test_snippets.py runs."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_picture_is_there_and_small() -> None:
    (picture,) = re.findall(r"!\[.*?\]\((.*?)\)", (ROOT / "README.md").read_text())
    assert 1_000 < (ROOT / picture).stat().st_size < 150_000
