"""Run by .ci/run where the wheel and nothing else is installed: the compiled part imports without torch."""

from __future__ import annotations

import importlib.resources
import importlib.util
import sys

assert importlib.util.find_spec("torch") is None, "this check needs an environment without torch"

import flexep  # noqa: E402 - after the check of the environment
from flexep import _C  # noqa: E402

files = {entry.name for entry in importlib.resources.files(flexep).iterdir()}
missing = {"py.typed", "_C.pyi"} - files
assert not missing, f"the wheel lacks {missing}"
assert _C.cuda_archs == "", f"built with FLEXEP_CUDA=OFF, yet it has kernels for {_C.cuda_archs}"
assert not any(name == "torch" for name in sys.modules)
print(f"flexep {flexep.__version__} imports without torch")
