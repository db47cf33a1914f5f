"""The compiled module stands alone: no torch, no driver, nothing but the C++ and C runtimes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from flexep.build_info import build_info

# Loaded from its file, so that flexep/__init__.py takes no part; sys.modules says that there is no torch.
IMPORT_ALONE = """
import importlib.machinery, importlib.util, sys
sys.modules["torch"] = None
loader = importlib.machinery.ExtensionFileLoader("flexep._C", {path!r})
module = importlib.util.module_from_spec(importlib.util.spec_from_loader("flexep._C", loader))
loader.exec_module(module)
print(module.cuda_archs)
libraries = {{line.split("/")[-1].strip() for line in open("/proc/self/maps") if ".so" in line}}
unwanted = [name for name in libraries if name.startswith(("libcuda.so", "libcudart", "libtorch", "libc10"))]
assert not unwanted, unwanted
"""

# The C++ and C runtimes, of x86-64 and aarch64, and of a glibc that still has libpthread apart.
RUNTIMES = (
    "libstdc++.so",
    "libgcc_s.so",
    "libm.so",
    "libc.so",
    "libpthread.so",
    "libdl.so",
    "librt.so",
    "ld-linux",
)


@pytest.fixture(scope="module")
def module_path() -> str:
    from flexep import _C

    return str(_C.__file__)


def run(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_imports_without_torch_and_loads_no_driver(module_path: str) -> None:
    assert run(IMPORT_ALONE.format(path=module_path)).strip() == ";".join(build_info().cuda_archs)


def test_package_imports_without_torch() -> None:
    run("import sys; sys.modules['torch'] = None; import flexep; from flexep import _C; flexep.ArgumentError")


def test_links_only_the_language_runtimes(module_path: str) -> None:
    done = subprocess.run(
        ["readelf", "-d", module_path], capture_output=True, text=True, check=True, timeout=60
    )
    needed = [line.split("[")[1].rstrip("]") for line in done.stdout.splitlines() if "(NEEDED)" in line]
    assert needed
    assert [name for name in needed if not name.startswith(RUNTIMES)] == []


def test_importing_the_package_starts_no_driver() -> None:
    run("import flexep, torch; assert flexep.__version__; assert not torch.cuda.is_initialized()")


def test_importing_everything_starts_no_driver() -> None:
    names = "dispatchers, moe, ops, ref, testing"
    run(f"from flexep import {names}; import torch; assert not torch.cuda.is_initialized()")


def test_a_missing_module_says_how_to_build_it() -> None:
    code = """
import sys
sys.modules["flexep._C"] = None
from flexep.errors import NotBuilt
try:
    import flexep._native._load
except NotBuilt as error:
    print(error)
"""
    assert "make setup" in run(code)
