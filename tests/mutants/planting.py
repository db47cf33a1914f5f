"""How a bug is planted: one function, or one method of a back end, is replaced wherever it is used."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

Undo = Callable[[], None]


def replace_function(original: Callable, changed: Callable) -> Undo:
    """Puts `changed` wherever a flexep module holds `original`."""
    places = [
        (module, name)
        for module_name, module in list(sys.modules.items())
        if module_name.startswith("flexep") and not module_name.startswith("flexep.testing")
        for name, value in list(vars(module).items())
        if value is original
    ]
    assert places, original
    for module, name in places:
        setattr(module, name, changed)

    def undo() -> None:
        for module, name in places:
            setattr(module, name, original)

    return undo


def replace_method(owner: type, name: str, change: Callable[[Any], Any]) -> Undo:
    """Changes what a method of a back end returns."""
    original = getattr(owner, name)

    def changed(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(original(self, *args, **kwargs))

    return own(owner, name, changed)


def own(owner: type, name: str, method: Callable) -> Undo:
    """Gives a back end a method of its own; undone, it has again what it had or inherited."""
    inherited, original = name not in vars(owner), getattr(owner, name)
    setattr(owner, name, method)
    return lambda: delattr(owner, name) if inherited else setattr(owner, name, original)


def swapped(tensor: torch.Tensor) -> torch.Tensor:
    """The first two different rows (or entries) change places."""
    out = tensor.clone()
    different = (out != out[:1]).flatten(1).any(1) if out.dim() > 1 else out != out[:1]
    if len(out) > 1 and different.any():
        other = int(different.nonzero()[0])
        out[0], out[other] = tensor[other], tensor[0]
    return out


def first_lost(tensor: torch.Tensor, fill: float) -> torch.Tensor:
    """The first entry that says something is gone."""
    out = tensor.clone()
    filled = (out.flatten() != fill).nonzero()
    if len(filled):
        out.view(-1)[filled[0]] = fill
    return out


def routes_changed(owner: type, change: Callable[[Any], Any]) -> Undo:
    """Changes every route that a back end plans."""

    def changed(planned: list[Any]) -> list[Any]:
        return [p._replace(route=change(p.route)) for p in planned]

    return replace_method(owner, "plan", changed)
