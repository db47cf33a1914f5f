"""Small gathers in which an index of -1 means "nothing". No host wait; any device."""

from __future__ import annotations

import torch


def take(values: torch.Tensor, index: torch.Tensor, fill: float) -> torch.Tensor:
    """values[index] for a 1-D `values` and an index of any shape; `fill` where the index is -1."""
    if values.numel() == 0:
        return torch.full(index.shape, fill, dtype=values.dtype, device=values.device)
    picked = values[index.clamp(min=0).long()]
    return torch.where(index >= 0, picked, fill)


def take_rows(values_NK: torch.Tensor, index_M: torch.Tensor, fill: float) -> torch.Tensor:
    """values[index] along rows, [M, K]; rows of `fill` where the index is -1."""
    return take(values_NK.flatten(), entry_index(index_M[:, None], values_NK.shape[1]), fill)


def take_slots(values_MK: torch.Tensor, record_NK: torch.Tensor) -> torch.Tensor:
    """values[record[n, k], k], [N, K]; 0 where the record is -1."""
    return take(values_MK.flatten(), entry_index(record_NK, values_MK.shape[1]), 0.0)


def entry_index(row: torch.Tensor, width: int) -> torch.Tensor:
    """row * width + column for every column, -1 where the row is -1. `row` is [M, 1] or [M, width]."""
    column = torch.arange(width, dtype=torch.int32, device=row.device)
    return torch.where(row >= 0, row * width + column, -1)
