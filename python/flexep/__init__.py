"""FlexEP: dispatch and combine for Mixture-of-Experts expert parallelism.

Importing it touches no GPU driver.
"""

from flexep.dispatchers import BACKENDS, Dispatcher
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
)
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
]
