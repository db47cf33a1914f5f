"""`backend="auto"`: which back end it is. The choice never changes bits.

Between processes deepep, whose windows are opened to find out whether every rank can reach every other, and alltoall
where they cannot be opened; on GPUs deepep is tried only if `Environment.peer` is switched on. In one process deepep on
the CPU, alltoall on a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flexep._native.plan import PlanTable
from flexep.config import DispatcherConfig, Environment
from flexep.dispatchers.backend import Backend
from flexep.errors import PeerRefused, Unavailable
from flexep.group import Group

AUTO = "auto"
FALLBACK = "alltoall"


def first_choice(group: Group) -> str:
    """What "auto" tries first; the same on every rank."""
    between_gpus = not group.is_local and Environment.read().peer
    return "deepep" if group.device.type == "cpu" or between_gpus else FALLBACK


def make_backend(
    backends: Mapping[str, type[Backend]],
    asked: str,
    group: Group,
    config: DispatcherConfig,
    table: PlanTable,
) -> Backend:
    """The back end of `config`; where the caller asked for "auto", the fallback if that cannot run. Collective.

    Windows that cannot be opened are refused on every rank, by name on those that cannot and as PeerRefused on the
    others, so all ranks fall back or none does.
    """
    try:
        return backends[config.backend](group, config, table)
    except (Unavailable, PeerRefused):
        if asked != AUTO or config.backend == FALLBACK or config.zero_copy:  # zero copy needs a window
            raise
    return backends[FALLBACK](group, replace(config, backend=FALLBACK), table)
