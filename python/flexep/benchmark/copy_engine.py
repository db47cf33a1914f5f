"""What the copy engines need for the bytes of a run: the rows that must cross, as one block a pair of ranks.

Every rank copies its block for each peer into memory of that peer, all ranks at once, without knowledge of rows. The
driver chooses what makes such copies; the name says what it is expected to choose. `ratio_to_copy_engine` compares
every library on CUDA with this.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import Routed, SelfChecked, Sent
from flexep.ref import Plan, make_plan
from flexep.testing.worker import RankContext

COMBINE = 128  # added to a rank's number, so that bytes of the two directions cannot be taken for each other


def open_inboxes(ctx: RankContext, nbytes: int) -> list[torch.Tensor]:
    """uint8 [nbytes] of every rank, by rank: a device's memory, mapped by all peers. Collective."""
    import torch.distributed._symmetric_memory as symm_mem

    inbox = symm_mem.empty(nbytes, dtype=torch.uint8, device=ctx.device)
    assert dist.group.WORLD is not None
    handle = symm_mem.rendezvous(inbox, dist.group.WORLD)
    # get_remote_tensor, as get_buffer forgets where in its allocation a tensor begins.
    return [
        inbox if rank == ctx.rank else handle.get_remote_tensor(rank, (nbytes,), torch.uint8)
        for rank in range(ctx.size)
    ]


def hops(rank: int, size: int) -> list[int]:
    """The peers of a rank, the next one first, so that no inbox is everybody's first."""
    return [(rank + hop) % size for hop in range(1, size)]


@dataclass(frozen=True)
class _Copied:
    """The inbox."""

    x: torch.Tensor
    step: int

    @property
    def counts(self) -> torch.Tensor:
        return self.x[:0]

    @property
    def weights(self) -> None:
        return None


class CopyEngine(SelfChecked[_Copied]):
    """Copies between the ranks' symmetric memory."""

    library = "copy_engine"
    dispatcher = "memcpy"
    layout, mode, alignment = "flat", "exact", 1
    sms = 0

    def __init__(self, ctx: RankContext, case: BenchCase, steps: list[Routed]) -> None:
        self.wire = case.dtype
        self._rank, self._device = ctx.rank, ctx.device
        there = [crossing_bytes(case, step) for step in range(len(steps))]
        back = [[list(column) for column in zip(*bytes_RR, strict=True)] for bytes_RR in there]
        self._bytes = {"dispatch": there, "combine": back}
        self._sent: dict[str, int] = defaultdict(int)
        # An inbox has a place for every source, so that ranks at different steps never write over each other.
        self._place = max(max(map(max, bytes_RR)) for bytes_RR in there) or 1
        self._outbox, self._inboxes = {}, {}
        for op, marked in (("dispatch", 0), ("combine", COMBINE)):
            mark = marked + ctx.rank
            self._outbox[op] = torch.full((self._place,), mark, dtype=torch.uint8, device=ctx.device)
            self._inboxes[op] = open_inboxes(ctx, self._place * ctx.size)

    @classmethod
    def why_not(cls, case: BenchCase) -> str | None:
        if case.ranks == 1:
            return "one rank has no peer"
        return None if case.ranks <= COMBINE else f"{case.ranks} ranks: a byte marks {COMBINE}"

    def dispatch(self, step: int) -> _Copied:
        return _Copied(self._copy("dispatch", step), step)

    def combine(self, y: torch.Tensor, delivered: _Copied) -> torch.Tensor:
        self._last = delivered.step
        return self._copy("combine", delivered.step)

    def _copy(self, op: str, step: int) -> torch.Tensor:
        outbox, inboxes, place = self._outbox[op], self._inboxes[op], self._rank * self._place
        to_ranks = self._bytes[op][step][self._rank]
        for peer in hops(self._rank, len(inboxes)):
            nbytes = to_ranks[peer]
            inboxes[peer][place : place + nbytes].copy_(outbox[:nbytes], non_blocking=True)
            self._sent[f"{op}.bytes"] += nbytes
        return inboxes[self._rank]

    def wrong(self, z: torch.Tensor) -> list[str]:
        """Bytes of the last combine that are not those of the rank that should have sent them. Collective."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()  # a peer's copy into this inbox ends when that peer's stream says so
        places = z.cpu().split(self._place)
        from_ranks = [row[self._rank] for row in self._bytes["combine"][self._last]]
        pairs = zip(places, from_ranks, strict=True)
        differ = sum(int((place[:n] != COMBINE + s).sum()) for s, (place, n) in enumerate(pairs))
        dist.barrier()  # nobody starts over before everybody has looked
        return [f"{differ} of {sum(from_ranks)} bytes are not the sender's"] if differ else []

    def sent(self) -> dict[str, Sent]:
        return {name: Sent(nbytes, nbytes) for name, nbytes in self._sent.items()}

    def close(self) -> None:
        self._outbox.clear()
        self._inboxes.clear()


def crossing_bytes(case: BenchCase, step: int) -> list[list[int]]:
    """[s][d]: bytes of the rows that any library must bring from rank s to rank d, by the oracle's plan."""
    world = case.world
    row = world.hidden * world.dtype.itemsize
    rows_RR = rows_between(make_plan(world, case.topk_idx(world, step)))
    return [[row * rows for rows in to_ranks] for to_ranks in rows_RR]


def rows_between(plan: Plan) -> list[list[int]]:
    """[s][d]: tokens of rank s that another rank d needs."""
    rows = [(token_row >= 0).sum(0).tolist() for token_row in plan.token_row]
    return [[0 if s == d else n for d, n in enumerate(each)] for s, each in enumerate(rows)]
