"""Every Python snippet of the README and of docs/ runs and prints what its page shows; a broken one is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.snippets import WrongOutput, run_page, snippets_of

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [page for page in (README, *sorted((ROOT / "docs").rglob("*.md"))) if snippets_of(page.read_text())]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_snippets_run_and_print_what_the_page_shows(page: Path) -> None:
    printed = run_page(page)
    if page == README:
        assert "[(100, 64), (0, 64), (7, 64), (64, 64)]" in printed[0]
        return
    for snippet, text in zip(snippets_of(page.read_text()), printed, strict=True):
        assert bool(text) == (snippet.output is not None), f"{page}:{snippet.line}: show what it prints"


def test_there_are_snippets_to_test() -> None:
    tested = {page.name: len(snippets_of(page.read_text())) for page in PAGES}
    assert tested["README.md"] == 1
    assert min(tested[name] for name in ("design.md", "layouts.md", "numerics.md", "testing.md")) >= 1
    assert tested["layouts.md"] >= 8


BREAKS = {
    "the API changed": ("expert_major", "expert_mayor", Exception),
    "the code does something else": ("alignment=4", "alignment=2", WrongOutput),
    "the page shows something else": ("counts [4, 1]", "counts [4, 2]", WrongOutput),
}


@pytest.mark.parametrize("name", BREAKS)
def test_a_planted_break_is_noticed(name: str, tmp_path: Path) -> None:
    right, wrong, error = BREAKS[name]
    text = (ROOT / "docs/layouts.md").read_text()
    blocks = text.split("```")  # the break goes into the first block that has room for it, not into the prose
    at = next(i for i, block in enumerate(blocks) if i % 2 and right in block)
    blocks[at] = blocks[at].replace(right, wrong)
    page = tmp_path / "layouts.md"
    page.write_text("```".join(blocks))
    with pytest.raises(error):
        run_page(page)


def test_only_a_text_block_directly_behind_is_output() -> None:
    page = (
        "```python\nprint(1)\n```\n\n```text\n1\n```\n"
        "```python\nx = 2\n```\nprose\n```text\npicture\n```\n```sh\nmake\n```\n"
    )
    assert [(s.code, s.line, s.output) for s in snippets_of(page)] == [
        ("print(1)\n", 2, "1\n"),
        ("x = 2\n", 9, None),
    ]
