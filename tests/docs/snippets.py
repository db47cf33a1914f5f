"""The Python snippets of a Markdown page: taken out, run in order, compared with the output that the page shows.

Blocks marked `python` share one namespace a page. A block marked `text` directly behind one is what it prints.
"""

from __future__ import annotations

import contextlib
import io
import re
from dataclasses import dataclass
from pathlib import Path

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


class WrongOutput(AssertionError):
    """A snippet printed something else than its page shows."""


@dataclass(frozen=True)
class Snippet:
    """`code`, the line of the page that it begins on, and what it must print (None: the page shows nothing)."""

    code: str
    line: int
    output: str | None


def snippets_of(page: str) -> list[Snippet]:
    """Every Python block of a page, in order."""
    found, blocks = [], list(FENCE.finditer(page))
    for number, block in enumerate(blocks):
        if block[1] != "python":
            continue
        output = None
        for following in blocks[number + 1 : number + 2]:
            if following[1] == "text" and not page[block.end() : following.start()].strip():
                output = following[2]
        found.append(Snippet(block[2], page.count("\n", 0, block.start(2)) + 1, output))
    return found


def run_page(path: Path) -> list[str]:
    """Runs a page's snippets and returns what each printed.

    Raises whatever a snippet raises, and WrongOutput; tracebacks name the page and its line.
    """
    namespace: dict[str, object] = {"__name__": "__main__"}
    printed = []
    for snippet in snippets_of(path.read_text()):
        code = compile("\n" * (snippet.line - 1) + snippet.code, str(path), "exec")
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(code, namespace)
        printed.append(out.getvalue())
        if snippet.output is not None and printed[-1] != snippet.output:
            raise WrongOutput(
                f"{path}:{snippet.line} prints\n{printed[-1]}but the page shows\n{snippet.output}"
            )
    return printed
