"""The column that everybody can write: plain torch, one row per (token, slot), nothing de-duplicated.

    argsort by expert, index_select, exchange of counts, all_to_all_single, index_select by local expert
    and back: index_copy_, all_to_all_single, index_add_

Rows arrive grouped by local expert without padding, sizes are exact. It is written as a competent user writes it, not
tuned further, and not made slower either.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import PlansApart, Promising, Routed, Sent
from flexep.testing.worker import RankContext


@dataclass(frozen=True)
class _Sizes:
    """One routing's order: `token` [S] and `entry` [S] (token * K + slot) of every sent row, rows to and from each
    rank, `arrival` [N] (arrived row behind each row of x), rows per local expert [L]."""

    token: torch.Tensor
    entry: torch.Tensor
    send: list[int]
    recv: list[int]
    arrival: torch.Tensor
    counts: torch.Tensor


@dataclass(frozen=True)
class _Delivered:
    x: torch.Tensor
    sizes: _Sizes
    step: int

    @property
    def counts(self) -> torch.Tensor:
        return self.sizes.counts

    @property
    def weights(self) -> None:
        return None  # they stay at home and multiply the rows that come back


class TorchBaseline(Promising[_Delivered], PlansApart):
    """Plain torch over the ranks' default process group."""

    library = "torch"
    dispatcher = "all_to_all_single"
    layout, mode, alignment = "expert_major", "exact", 1

    def __init__(self, ctx: RankContext, case: BenchCase, steps: list[Routed]) -> None:
        self.wire = case.dtype
        self.world = replace(case.world, capacity=None, layout="expert_major", alignment=1, domain_size=None)
        by_rank = [self.world.experts_of(rank) for rank in range(ctx.size)]
        order = torch.tensor([e for experts in by_rank for e in experts], device=ctx.device)
        self._place_E = torch.empty_like(order)
        self._place_E[order] = torch.arange(len(order), device=ctx.device)
        self._local_R = [len(experts) for experts in by_rank]
        self._rank, self._ranks, self._steps = ctx.rank, ctx.size, steps
        self._bytes: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        self._cached = None if case.fresh else [self._plan(routed.topk_idx) for routed in steps]

    def _plan(self, topk_idx: torch.Tensor) -> _Sizes:
        place = self._place_E[topk_idx.flatten()]
        entry = place.argsort(stable=True)
        counts_E = torch.bincount(place, minlength=len(self._place_E))
        local = self._local_R[self._rank]
        theirs = counts_E.new_empty(self._ranks * local)
        dist.all_to_all_single(theirs, counts_E, [local] * self._ranks, self._local_R)
        self._count("dispatch.counts", self._local_R, 1, counts_E)
        theirs_RL = theirs.view(self._ranks, local)
        send = [int(part.sum()) for part in counts_E.split(self._local_R)]
        expert = torch.arange(local, device=theirs.device).repeat(self._ranks).repeat_interleave(theirs)
        return _Sizes(
            token=entry // topk_idx.shape[1],
            entry=entry,
            send=send,
            recv=theirs_RL.sum(1).tolist(),
            arrival=expert.argsort(stable=True),
            counts=theirs_RL.sum(0).int(),
        )

    def plan(self, step: int) -> None:
        self._plan(self._steps[step].topk_idx)

    def dispatch(self, step: int) -> _Delivered:
        routed = self._steps[step]
        sizes = self._plan(routed.topk_idx) if self._cached is None else self._cached[step]
        rows = routed.x.index_select(0, sizes.token)
        arrived = self._exchange("dispatch.rows", rows, sizes.recv, sizes.send)
        return _Delivered(arrived.index_select(0, sizes.arrival), sizes, step)

    def combine(self, y: torch.Tensor, delivered: _Delivered) -> torch.Tensor:
        sizes, routed = delivered.sizes, self._steps[delivered.step]
        back = torch.empty_like(y).index_copy_(0, sizes.arrival, y)
        home = self._exchange("combine.rows", back, sizes.send, sizes.recv)
        if routed.weights is not None:
            home *= routed.weights.flatten()[sizes.entry].to(home.dtype)[:, None]
        return torch.zeros_like(routed.x).index_add_(0, sizes.token, home)

    def _exchange(self, op: str, rows: torch.Tensor, recv: list[int], send: list[int]) -> torch.Tensor:
        out = rows.new_empty((sum(recv), rows.shape[1]))
        dist.all_to_all_single(out, rows, recv, send)
        self._count(op, send, rows.shape[1], rows)
        return out

    def _count(self, op: str, splits: list[int], columns: int, sent: torch.Tensor) -> None:
        row = columns * sent.element_size()
        self._bytes[op][0] += (sum(splits) - splits[self._rank]) * row
        self._bytes[op][1] += sum(splits) * row

    def sent(self) -> dict[str, Sent]:
        return {op: Sent(*both) for op, both in self._bytes.items()}

    def close(self) -> None:
        self._cached = None
