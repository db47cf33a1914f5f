"""Loads the compiled module and says how to build it when it is missing."""

from __future__ import annotations

from flexep.errors import NotBuilt

try:
    from flexep import _C
except ImportError as error:
    raise NotBuilt(
        "flexep._C, the compiled module, is missing or does not load; run `make setup` in the repository or "
        f"`pip install .` ({error})"
    ) from error

__all__ = ["_C"]
