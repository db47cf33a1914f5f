"""Torch symmetric memory: `all_to_all_vdev_2d`, whose splits stay on the device, in place of all_to_all_single.

One row per (token, slot), sorted by expert into a symmetric buffer; the exchange groups them by local expert; back by
`all_to_all_vdev_2d_offset` and index_add_. Sizes are exact, with one host wait for the rows that came, and experts hand
back rows where the exchange put them, so that combine copies nothing beforehand.

Peers pull from this rank's buffers. What they may still read is written again only behind the barrier that opens the
next exchange; so dispatch and combine alternate, or a gate of all ranks lies between them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import PlansApart, Promising, Routed, Sent, SentRows, rows_to_ranks
from flexep.testing.worker import RankContext

MAX_LOCAL_EXPERTS = 16  # tiles of its kernel
MAX_RANKS = 32
HEAP_SLACK = 1 << 28  # bytes for what NVSHMEM keeps for itself
NVSHMEM = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_DISABLE_NVLS": "1"}  # one host, no multicast


@dataclass(frozen=True)
class _Order:
    """How one routing's rows are sent: `entry` [S] (token * K + slot) of each, and rows for each expert [E]."""

    entry: torch.Tensor
    splits: torch.Tensor


@dataclass(frozen=True)
class _Sizes:
    """What came: rows of the buffer in use; `keep` [N], those that are somebody's where an expert without rows left a
    gap (the exchange gives it one row), else None; counts [L]."""

    end: int
    keep: torch.Tensor | None
    counts: torch.Tensor


@dataclass(frozen=True)
class _Arrived:
    x: torch.Tensor
    sizes: _Sizes
    order: _Order
    step: int

    @property
    def counts(self) -> torch.Tensor:
        return self.sizes.counts

    @property
    def weights(self) -> None:
        return None


def kept_rows(splits_LR: list[list[int]]) -> tuple[int, list[int] | None]:
    """Rows of the buffer in use, and which of them are rows of somebody if not all are."""
    keep: list[int] = []
    end = 0
    for splits in splits_LR:
        keep += range(end, end + sum(splits))
        end += max(1, sum(splits))
    return end, (None if len(keep) == end else keep)


class SymmMem(Promising[_Arrived], PlansApart):
    """The exchange of torch's NVSHMEM back end."""

    library = "symm_mem"
    dispatcher = "all_to_all_vdev_2d"
    layout, mode, alignment = "expert_major", "exact", 1

    def __init__(self, ctx: RankContext, case: BenchCase, steps: list[Routed]) -> None:
        self.wire = case.dtype
        self.world = world = replace(
            case.world, capacity=None, alignment=1, layout=self.layout, domain_size=None
        )
        self._steps, self._ranks = steps, ctx.size
        self._moved = SentRows(world, ctx.rank, steps, once=False)
        self._row_bytes = world.hidden * world.dtype.itemsize
        local, most = world.num_experts // ctx.size, self._most_rows(case)
        self._open(ctx, world.max_tokens * world.top_k, most + local)
        self._fresh = case.fresh
        self._known: dict[int, tuple[_Order, _Sizes]] = {}  # filled by the first dispatch of each step

    @classmethod
    def why_not(cls, case: BenchCase) -> str | None:
        import torch.distributed._symmetric_memory as symm_mem

        local, world = -(-case.experts // case.ranks), case.world
        if case.experts % case.ranks or world.placement is not None:
            return "it needs as many experts on every rank"
        if local > MAX_LOCAL_EXPERTS:
            return f"{local} experts a rank: all_to_all_vdev_2d takes at most {MAX_LOCAL_EXPERTS}"
        if case.ranks > MAX_RANKS:
            return f"{case.ranks} ranks: all_to_all_vdev_2d takes at most {MAX_RANKS}"
        return None if symm_mem.is_nvshmem_available() else "this torch finds no NVSHMEM"

    def _most_rows(self, case: BenchCase) -> int:
        """Rows that the busiest rank receives in any step: symmetric memory is as large on every rank."""
        return max(
            max(map(sum, zip(*(rows_to_ranks(idx, self.world, once=False) for idx in every), strict=True)))
            for every in (case.topk_idx(case.world, step) for step in range(case.steps))
        )

    def _open(self, ctx: RankContext, send_rows: int, recv_rows: int) -> None:
        """Symmetric buffers. Collective. Raises RuntimeError where torch uses another back end already."""
        import torch.distributed._symmetric_memory as symm_mem

        world, nbytes = self.world, (2 * send_rows + recv_rows) * self._row_bytes
        for name, value in NVSHMEM.items():
            os.environ.setdefault(name, value)
        os.environ.setdefault(
            "NVSHMEM_SYMMETRIC_SIZE", str(2 * nbytes + HEAP_SLACK)
        )  # the copy engine's are there too
        if symm_mem.get_backend(ctx.device) != "NVSHMEM":
            symm_mem.set_backend("NVSHMEM")
        group = dist.group.WORLD
        assert group is not None
        self._group = group.group_name

        def make(*shape: int, dtype: torch.dtype = world.dtype) -> torch.Tensor:
            buffer = symm_mem.empty(*shape, dtype=dtype, device=ctx.device).zero_()
            symm_mem.rendezvous(buffer, group)
            return buffer

        self._outgoing, self._home = (make(send_rows, world.hidden) for _ in range(2))
        self._incoming = make(recv_rows, world.hidden)
        self._splits = make(world.num_experts, dtype=torch.int64)
        self._arrivals, self._returns = (make(2, world.num_experts, dtype=torch.int64) for _ in range(2))

    def _plan(self, step: int) -> _Order:
        expert = self._steps[step].topk_idx.flatten()
        return _Order(expert.argsort(stable=True), torch.bincount(expert, minlength=self.world.num_experts))

    def plan(self, step: int) -> None:
        self._splits.copy_(self._plan(step).splits)

    def dispatch(self, step: int) -> _Arrived:
        x, known = self._steps[step].x, self._known.get(step)
        order = known[0] if known else self._plan(step)
        self._splits.copy_(order.splits)
        rows = self._outgoing[: len(order.entry)]
        torch.index_select(x, 0, order.entry // self.world.top_k, out=rows)
        torch.ops.symm_mem.all_to_all_vdev_2d(
            self._outgoing, self._incoming, self._splits, self._arrivals, self._group
        )
        self._moved.count("dispatch.rows", step)
        sizes = known[1] if known else self._wait_for_sizes()
        if not self._fresh:
            self._known[step] = (order, sizes)
        arrived = self._incoming[: sizes.end] if sizes.keep is None else self._incoming[sizes.keep]
        return _Arrived(arrived, sizes, order, step)

    def _wait_for_sizes(self) -> _Sizes:
        splits_LR = self._arrivals[0].view(-1, self._ranks)
        end, keep = kept_rows(splits_LR.tolist())
        index = None if keep is None else torch.tensor(keep, device=splits_LR.device)
        return _Sizes(end, index, splits_LR.sum(1).int())

    def combine(self, y: torch.Tensor, delivered: _Arrived) -> torch.Tensor:
        routed, order, keep = self._steps[delivered.step], delivered.order, delivered.sizes.keep
        if keep is not None:
            self._incoming[keep] = y
        elif y.data_ptr() != self._incoming.data_ptr():
            self._incoming[: len(y)].copy_(y)
        torch.ops.symm_mem.all_to_all_vdev_2d_offset(
            self._incoming, self._home, self._arrivals, self._returns, self._group
        )
        self._moved.count("combine.rows", delivered.step)
        home = self._home[: len(order.entry)]
        if routed.weights is not None:
            home = home * routed.weights.flatten()[order.entry].to(home.dtype)[:, None]
        return torch.zeros_like(routed.x).index_add_(0, order.entry // self.world.top_k, home)

    def sent(self) -> dict[str, Sent]:
        return self._moved.sent()

    def close(self) -> None:
        for name in ("_outgoing", "_incoming", "_home"):
            delattr(self, name)
