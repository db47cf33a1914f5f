"""Counts what autograd keeps between forward and backward."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def saved_storages(run: Callable[[], object], *, beside: list[Tensor]) -> dict[int, int]:
    """{address: bytes} of every storage that `run` saves for backward, less those of the tensors `beside`.

    A storage saved several times, or through several views, counts once.
    """
    known = {t.untyped_storage().data_ptr() for t in beside}
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())  # type: ignore[arg-type]
    return sizes
