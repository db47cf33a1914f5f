"""Initial weights that depend on a name and a seed, never on construction order or the number of ranks."""

from __future__ import annotations

import hashlib

import torch


def keyed_generator(seed: int, *key: object) -> torch.Generator:
    """A CPU generator for one purpose: the same (seed, key) gives the same numbers in every process.

    >>> draw = lambda: torch.randn(2, generator=keyed_generator(0, "experts", 3))
    >>> bool((draw() == draw()).all())
    True
    """
    text = "/".join(str(part) for part in (seed, *key))
    digest = hashlib.sha256(text.encode()).digest()
    return torch.Generator("cpu").manual_seed(int.from_bytes(digest[:8], "little") & (2**63 - 1))


def keyed_normal(shape: tuple[int, ...], std: float, seed: int, *key: object) -> torch.Tensor:
    """fp32 normal values of standard deviation `std` on the CPU, drawn from `keyed_generator(seed, *key)`."""
    return torch.randn(shape, generator=keyed_generator(seed, *key)) * std
