"""Rules between Python rooms that the layers contract in pyproject.toml cannot say, read from syntax trees.

The contract itself (`lint-imports`) runs here too, on the tree and on a copy with a planted violation.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "python" / "flexep"


# The rooms that use FlexEP as a user does.
TOP_ROOMS = ("__init__", "__main__", "cli", "benchmark", "testing", "training")


def is_module(name: str) -> bool:
    return bool(name) and ((PACKAGE / name).is_dir() or (PACKAGE / f"{name}.py").is_file())


def imported(text: str) -> Iterator[str]:
    """Every dotted name that the text imports; `from a import b` yields "a.b"."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


def breaches(room: str, text: str) -> list[str]:
    """What a file of the room (a name directly below flexep/) imports against the rules."""
    found = []
    for name in imported(text):
        parts = name.split(".")
        if name.startswith("."):
            found.append(f"{name}: relative import")
        if parts[:2] == ["flexep", "_C"] and room != "_native":
            found.append(f"{name}: only flexep._native imports the compiled module")
        if (
            room == "ref"
            and parts[0] not in {*sys.stdlib_module_names, "torch"}
            and parts[:2] != ["flexep", "ref"]
        ):
            found.append(f"{name}: the oracle imports torch alone")
        collected = len(parts) < 3 and parts[0] == "flexep" and not is_module(".".join(parts[1:]))
        if collected and room not in TOP_ROOMS and parts[1:] != ["_C"]:
            found.append(f"{name}: only {', '.join(TOP_ROOMS)} take public names from the package itself")
        private = [part for part in parts[1:] if part.startswith("_") and not part.endswith("__")]
        if (
            room in ("cli", "benchmark", "testing")
            and parts[0] == "flexep"
            and parts[1:2] != [room]
            and private
        ):
            found.append(f"{name}: {room} uses public names only")
    return found


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_tree_keeps_the_rules() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    assert len(paths) > 10
    assert {str(path): breaches(room_of(path), path.read_text()) for path in paths} == {
        str(p): [] for p in paths
    }


@pytest.mark.parametrize(
    ("room", "line"),
    [
        ("ops", "from flexep import _C"),
        ("dispatchers", "import flexep._C"),
        ("cli", "from flexep._native import plan"),
        ("testing", "import flexep._native.plan"),
        ("ref", "import numpy"),
        ("ref", "from flexep.errors import ArgumentError"),
        ("moe", "from .layer import Layer"),
        ("ops", "import flexep"),
        ("moe", "from flexep import Dispatcher"),
    ],
)
def test_planted_import_is_found(room: str, line: str) -> None:
    assert len(breaches(room, line)) == 1


def test_allowed_imports_pass() -> None:
    assert breaches("_native", "from flexep import _C") == []
    assert breaches("ref", "import math\nimport torch.nn\nfrom flexep.ref.plan import order") == []
    assert breaches("testing", "import flexep\nfrom flexep import Dispatcher") == []
    assert breaches("moe", "from flexep import ops\nfrom flexep.dispatchers import Dispatcher") == []
    assert breaches("cli", "from flexep.cli._output import console\nfrom flexep.errors import NotBuilt") == []


def lint_imports(tree: Path) -> subprocess.CompletedProcess[str]:
    code = "import sys; sys.path.insert(0, 'python'); from importlinter.cli import lint_imports_command; "
    code += "lint_imports_command()"
    command = [sys.executable, "-c", code, "--no-cache"]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=120)


def test_layers_contract(tmp_path: Path) -> None:
    kept = lint_imports(ROOT)
    assert kept.returncode == 0, kept.stdout + kept.stderr

    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copytree(
        PACKAGE, tmp_path / "python" / "flexep", ignore=shutil.ignore_patterns("*.so", "__pycache__")
    )
    errors = tmp_path / "python" / "flexep" / "errors.py"
    errors.write_text(errors.read_text() + "\nimport flexep.ops\n")
    broken = lint_imports(tmp_path)
    assert broken.returncode == 1
    assert "flexep.errors -> flexep.ops" in broken.stdout.replace("\n", " ")
