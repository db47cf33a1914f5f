"""Bugs that a bench must find, each the set-up of a rank process."""

from __future__ import annotations

from typing import Any

import torch

import flexep
from flexep.benchmark.torch_baseline import TorchBaseline
from flexep.config import WINDOWED
from flexep.dispatchers.alltoall import AllToAll
from flexep.errors import Unavailable


def wrong_row_in_alltoall() -> None:
    """Two delivered rows change places."""
    _after(AllToAll, "_bring", 0, lambda buffers: [_swapped(b) for b in buffers])


def wrong_row_late() -> None:
    """The same, only after the check that comes before timing has passed."""
    _after(AllToAll, "_bring", 3, lambda buffers: [_swapped(b) for b in buffers])


def wrong_sum_in_torch() -> None:
    """The baseline forgets one token."""

    def forget(z: torch.Tensor) -> torch.Tensor:
        z[0] = 0
        return z

    _after(TorchBaseline, "combine", 0, forget)


NO_WINDOWS = "windows cannot be opened on this machine"


def no_windows() -> None:
    """One-sided dispatchers find no way to each other's memory."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Unavailable(NO_WINDOWS)

    for name in WINDOWED:
        flexep.BACKENDS[name].__init__ = refuse


def _swapped(rows: torch.Tensor) -> torch.Tensor:
    out = rows.clone()
    out[0], out[1] = rows[1], rows[0]
    return out


def _after(owner: type, name: str, calls: int, change: Any) -> None:
    """Changes what a method returns, from the given call on."""
    original, seen = getattr(owner, name), 0

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen += 1
        result = original(self, *args, **kwargs)
        return change(result) if seen > calls else result

    setattr(owner, name, changed)
