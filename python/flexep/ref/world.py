"""What the oracle must know of a job before any token arrives."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class World:
    """The arguments of a dispatcher, for all ranks at once. Shape letters: T tokens, H hidden, K top_k, E
    experts, R ranks.

    `placement[e]` is the rank of expert e (None: contiguous, the first E mod R ranks hold one more).
    `capacity` is None (exact sizes), an int (expert-major rows a rank) or a float (a factor of max_tokens *
    top_k).
    """

    num_ranks: int
    num_experts: int
    hidden: int
    top_k: int
    max_tokens: int
    dtype: torch.dtype = torch.bfloat16
    combine_wire: torch.dtype | None = None
    domain_size: int | None = None
    layout: str = "expert_major"
    alignment: int = 16
    capacity: float | int | None = None
    placement: tuple[int, ...] | None = None

    @property
    def wire(self) -> torch.dtype:
        """Format in which a rank's partial sum travels."""
        return self.combine_wire or self.dtype

    @property
    def rank_of_expert(self) -> tuple[int, ...]:
        if self.placement is not None:
            return self.placement
        small, larger = divmod(self.num_experts, self.num_ranks)
        return tuple(r for r in range(self.num_ranks) for _ in range(small + (r < larger)))

    def experts_of(self, rank: int) -> list[int]:
        """Experts that live on a rank, in local order: ascending expert id."""
        return [e for e, r in enumerate(self.rank_of_expert) if r == rank]

    @property
    def capacity_rows(self) -> int | None:
        """Static expert-major rows of every rank; None when sizes are exact."""
        if isinstance(self.capacity, float):
            return math.ceil(self.capacity * self.max_tokens * self.top_k)
        return self.capacity

    @property
    def flat_rows(self) -> int | None:
        """Static flat rows of every rank; None when sizes are exact."""
        rows = self.capacity_rows
        return None if rows is None else min(self.num_ranks * self.max_tokens, rows)

    def align(self, rows: int) -> int:
        """Rows with padding; an expert without rows has no padding either."""
        return -(-rows // self.alignment) * self.alignment
