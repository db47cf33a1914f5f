"""FlexEP: dispatch and combine for Mixture-of-Experts expert parallelism.

Importing it touches no GPU driver. Names that need torch load it when they are first used, so that the
compiled module and `flexep --help` work, quickly, where torch does not.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from flexep.errors import (
    ArgumentError,
    CapacityExceeded,
    CollectiveMismatch,
    FlexEPError,
    HandleMismatch,
    NotBuilt,
    PeerLost,
    PeerRefused,
    Timeout,
    Unavailable,
    WindowBroken,
    WindowBusy,
)

if TYPE_CHECKING:
    from flexep.dispatchers import BACKENDS, Dispatcher
    from flexep.group import Group
    from flexep.types import DispatchResult, Handle, MemoryPlan

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "ArgumentError",
    "CapacityExceeded",
    "CollectiveMismatch",
    "DispatchResult",
    "Dispatcher",
    "FlexEPError",
    "Group",
    "Handle",
    "HandleMismatch",
    "MemoryPlan",
    "NotBuilt",
    "PeerLost",
    "PeerRefused",
    "Timeout",
    "Unavailable",
    "WindowBroken",
    "WindowBusy",
]

_LAZY = {
    "BACKENDS": "flexep.dispatchers",
    "Dispatcher": "flexep.dispatchers",
    "Group": "flexep.group",
    "DispatchResult": "flexep.types",
    "Handle": "flexep.types",
    "MemoryPlan": "flexep.types",
}


if not TYPE_CHECKING:  # a type checker sees the imports above, and that there is nothing else

    def __getattr__(name: str) -> object:
        if name not in _LAZY:
            raise AttributeError(f"module 'flexep' has no attribute {name!r}")
        value = globals()[name] = getattr(import_module(_LAZY[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
