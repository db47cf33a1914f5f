"""The files that describe the build agree with each other."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import flexep

ROOT = Path(__file__).parents[2]


def test_presets_are_the_build_manual() -> None:
    presets = json.loads((ROOT / "CMakePresets.json").read_text())
    named = {preset["name"] for preset in presets["configurePresets"] if not preset.get("hidden")}
    assert named == {"cpu", "cuda-sm90a", "asan", "tsan"}
    assert {preset["configurePreset"] for preset in presets["buildPresets"]} == named


def test_constraints_pin_every_direct_dependency_but_torch() -> None:
    stated = importlib.metadata.requires("flexep")
    assert stated
    wanted = {re.split(r"[\[>=; ]", requirement)[0] for requirement in stated}
    pinned = {
        line.split("==")[0] for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line
    }
    normal = {name.lower().replace("_", "-") for name in pinned}
    assert wanted - normal == {"torch", "flexep"}


def test_installed_script_reports_the_version() -> None:
    script = Path(sys.executable).with_name("flexep")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == f"flexep {flexep.__version__}"


def test_every_public_name_resolves() -> None:
    assert set(flexep.__all__) <= set(dir(flexep))
    for name in flexep.__all__:
        getattr(flexep, name)
    with pytest.raises(AttributeError, match="no attribute 'teleport'"):
        _ = flexep.teleport
