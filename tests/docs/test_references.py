"""What the pages point to exists: linked pages, paths, make targets, pytest markers, names of the package."""

from __future__ import annotations

import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]

LINK = re.compile(r"\]\((?!https?:)([^)#]+)(#[\w-]+)?\)")
PATH = re.compile(r"(?<![\w/.-])(?:csrc|python|tests|tools|bench|docs|cmake)/[\w./*-]*\w")
MAKE = re.compile(r"`make ([\w-]+)|^make ([\w-]+)", re.MULTILINE)
MARKER = re.compile(r"pytest[^`\n]* -m (\w+)")
NAME = re.compile(r"`(flexep(?:\.\w+)+)")


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as code hosts make them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {"#" + re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles}


def dead_references(text: str, folder: Path) -> Iterator[str]:
    """Everything that a page in `folder` names and that is not there."""
    for target, anchor in LINK.findall(text):
        page = folder / target
        if not page.exists():
            yield f"link to {target}"
        elif anchor and anchor not in anchors(page):
            yield f"link to {target}{anchor}"
    for path in PATH.findall(text):
        if not any(ROOT.glob(path.removesuffix("/"))) and not (folder / path).exists():
            yield f"path {path}"
    targets = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert targets
    for groups in MAKE.findall(text):
        if (name := "".join(groups)) not in targets[1].split():
            yield f"make {name}"
    for marker in MARKER.findall(text):
        if f'"{marker}:' not in (ROOT / "pyproject.toml").read_text():
            yield f"marker {marker}"
    for name in NAME.findall(text):
        try:
            pkgutil.resolve_name(name)
        except (ImportError, AttributeError):
            yield f"name {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_exists(page: Path) -> None:
    dead = list(dead_references(page.read_text(), page.parent))
    assert not dead


def test_every_page_is_listed() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES[2:]:
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "README.md" or f"({name})" in index, f"{name} is not in docs/README.md"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[x](docs/nowhere.md)", "link to docs/nowhere.md"),
        ("[x](README.md#no-such-heading)", "link to README.md#no-such-heading"),
        ("see `csrc/plan/gone.h`", "path csrc/plan/gone.h"),
        ("`make coffee`", "make coffee"),
        ("`pytest -m slow tests`", "marker slow"),
        ("`flexep.Dispatcher.scatter`", "name flexep.Dispatcher.scatter"),
    ],
)
def test_a_planted_dead_reference_is_found(text: str, found: str) -> None:
    assert found in list(dead_references(text, ROOT))


def test_live_references_pass() -> None:
    text = (
        "[x](README.md#example) `csrc/plan/*.h` `tests/docs` `make test` `pytest -m gpu` `flexep.Group.local`"
    )
    assert list(dead_references(text, ROOT)) == []
