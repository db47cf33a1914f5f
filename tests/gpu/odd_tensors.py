"""Tensors that hold good values in odd ways, and expert ids of which some are outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

DEVICE = "cuda"
T, H, K, E = 20, 64, 4, 6
Change = Callable[[torch.Tensor], torch.Tensor]


def strided(t: torch.Tensor) -> torch.Tensor:
    """The same values, every second element of a buffer."""
    return torch.stack([t, torch.zeros_like(t)], -1)[..., 0]


def shifted(t: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous, an element behind an aligned address."""
    buffer = t.new_zeros(t.numel() + 1)
    buffer[1:] = t.flatten()
    return buffer[1:].view(t.shape)


def bits(value: Any) -> list[torch.Tensor]:
    values = value if isinstance(value, (tuple, list)) else [value]
    return [t.contiguous().view(torch.uint8).cpu() for t in values if t is not None]


def same(got: Any, want: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(bits(got), bits(want), strict=True))


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.rand(*shape, device=DEVICE).to(dtype)


def ids(rows: int, high: int) -> torch.Tensor:
    return torch.randint(-1, high, (rows, K), device=DEVICE)


def wild_ids(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Expert ids of which some are outside, the same with -1 there, and how many."""
    strays = [
        -2,
        E,
        E + 1,
        2**31 - 1,
        -(2**31),
        *([2**40, -(2**40), 2**32, 2**32 + 1] * (dtype == torch.int64)),
    ]
    tame = ids(T, E).to(dtype)
    wild, at = tame.clone(), torch.randperm(T * K, device=DEVICE)[: 3 * len(strays)]
    wild.view(-1)[at] = torch.tensor(strays * 3, dtype=dtype, device=DEVICE)
    tame.view(-1)[at] = -1
    return wild, tame, 3 * len(strays)


def check_device() -> None:
    """An illegal access is reported by a later call at the latest: here."""
    assert float(torch.ones(1000, device=DEVICE).sum()) == 1000
    if DEVICE == "cuda":
        torch.cuda.synchronize()
