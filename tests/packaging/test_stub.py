"""python/flexep/_C.pyi is a golden file: it says what the compiled module binds."""

from __future__ import annotations

from pathlib import Path

from tools.make_stub import stub_text

STUB = Path(__file__).parents[2] / "python" / "flexep" / "_C.pyi"


def test_stub_matches_the_compiled_module() -> None:
    assert STUB.read_text() == stub_text(), (
        "the bindings changed: run `make stubs` and commit python/flexep/_C.pyi"
    )
