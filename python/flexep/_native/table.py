"""Where experts live: the table that every step of the plan reads."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flexep._native._load import _C
from flexep.errors import ArgumentError


class PlanTable:
    """Where experts live: expert id -> place -> (rank, local expert).

    Places are numbered rank-major; inside a rank, experts ascend. Without `rank_of_expert` the experts are
    contiguous and the first `E mod R` ranks hold one more.

    Args:
        num_experts: E >= 1. num_ranks: R >= 1.
        rank_of_expert: rank of each expert id, length E, or None.
    Raises:
        ArgumentError: a count below 1, a table of another length, or a rank outside [0, R).
    """

    def __init__(self, num_experts: int, num_ranks: int, rank_of_expert: Sequence[int] | None = None) -> None:
        if num_experts < 1:
            raise ArgumentError("num_experts", num_experts, "at least 1")
        if num_ranks < 1:
            raise ArgumentError("num_ranks", num_ranks, "at least 1")
        if rank_of_expert is None:
            share, more = divmod(num_experts, num_ranks)
            sizes = [share + (r < more) for r in range(num_ranks)]
            rank_of_expert = [r for r, size in enumerate(sizes) for _ in range(size)]
        elif len(rank_of_expert) != num_experts:
            raise ArgumentError(
                "placement", list(rank_of_expert), f"one rank for each of {num_experts} experts"
            )
        for rank in rank_of_expert:
            if not 0 <= rank < num_ranks:
                raise ArgumentError("placement", rank, f"ranks in [0, {num_ranks})")
        self.num_experts = num_experts
        self.num_ranks = num_ranks
        by_place = sorted(range(num_experts), key=lambda e: (rank_of_expert[e], e))
        self.expert_of_place = torch.tensor(by_place, dtype=torch.int32)
        self.place_of_expert = torch.empty(num_experts, dtype=torch.int32)
        self.place_of_expert[self.expert_of_place.long()] = torch.arange(num_experts, dtype=torch.int32)
        self.rank_of_place = torch.tensor([rank_of_expert[e] for e in by_place], dtype=torch.int32)
        held = torch.bincount(self.rank_of_place.long(), minlength=num_ranks)
        self.rank_begin = torch.cat([held.new_zeros(1), held.cumsum(0)]).to(torch.int32)
        self._begin: list[int] = self.rank_begin.tolist()
        self._views: dict[torch.device, tuple[_C.TableView, tuple[torch.Tensor, ...]]] = {}

    def num_local(self, rank: int) -> int:
        """L: experts that `rank` holds."""
        return self._begin[rank + 1] - self._begin[rank]

    def places(self, rank: int) -> slice:
        """The places of `rank`, in local order."""
        return slice(self._begin[rank], self._begin[rank + 1])

    def view(self, device: torch.device) -> _C.TableView:
        """The compiled module's view of this table on `device`, made once a device."""
        if device not in self._views:
            tensors = tuple(t.to(device) for t in (self.place_of_expert, self.rank_of_place, self.rank_begin))
            pointers = [t.data_ptr() for t in tensors]
            self._views[device] = (_C.TableView(self.num_experts, self.num_ranks, *pointers), tensors)
        return self._views[device][0]
