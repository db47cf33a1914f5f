"""What autograd keeps between forward and backward, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def saved_storages(run: Callable[[], object], *, beside: Iterable[Tensor] = ()) -> dict[int, int]:
    """{address: bytes} of every storage that `run` saves for backward, less those of the tensors `beside`.

    A storage saved several times, or through several views, counts once. Pass parameters and inputs as `beside`:
    they are there anyway.
    """
    known = {t.untyped_storage().data_ptr() for t in beside}
    sizes: dict[int, int] = {}
    alive: list[object] = []  # so that no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in known:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        alive.append(run())
    return sizes


def saved_bytes(run: Callable[[], object], *, beside: Iterable[Tensor] = ()) -> int:
    """Bytes that `run` saves for backward beside the tensors `beside`."""
    return sum(saved_storages(run, beside=beside).values())
