"""Run by .ci/run where the wheel and nothing else is installed: the compiled part imports without torch."""

from __future__ import annotations

import importlib.resources
import importlib.util
import sys
from collections.abc import Callable

assert importlib.util.find_spec("torch") is None, "this check needs an environment without torch"

import flexep  # noqa: E402 - after the check of the environment
from flexep import _C  # noqa: E402

files = {entry.name for entry in importlib.resources.files(flexep).iterdir()}
missing = {"py.typed", "_C.pyi"} - files
assert not missing, f"the wheel lacks {missing}"
assert _C.cuda_archs == "", f"built with FLEXEP_CUDA=OFF, yet it has kernels for {_C.cuda_archs}"


def refuses(call: Callable[[], object]) -> bool:
    """Whether a CUDA entry of a CPU build names the option to set."""
    try:
        call()
    except _C.NotBuilt as error:
        return "FLEXEP_CUDA=ON" in str(error)
    return False


rule = _C.RouteRule(0, 1, 1, 1, False, False, 1.0)
assert refuses(
    lambda: _C.route(rule, 0, 0, 0, 0, tokens=1, experts=2, ids=0, weights=0, probs=0, threads=1, stream=0)
)
assert refuses(lambda: _C.device_report_bytes(1))
assert not any(name == "torch" for name in sys.modules)
print(f"flexep {flexep.__version__} imports without torch")
