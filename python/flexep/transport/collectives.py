"""Collectives over the ranks that this process plays: one of a process group, or all of a local group.

Every method takes one tensor per hosted rank and returns one per hosted rank, so a dispatcher is written
once. Bytes and rows that leave a rank are counted here, where they leave.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from flexep._native.operands import output
from flexep.errors import Timeout
from flexep.group import Group, named_errors, wait

# In which every rank says what it calls, and in a dispatch what of its slots: by call.
HEADERS = {call: f"{call}.header" for call in ("dispatch", "combine")}
GATHER_TAG = 0x6570  # of messages between two ranks, apart from those that the caller may have under way


@dataclass
class Traffic:
    """What one kind of message cost the ranks of this process: calls, rows and bytes sent to other ranks, and
    `logical_bytes`, which also count what a rank sent itself. `rail_rows` and `rail_bytes` are the part of the
    remote ones that crossed between domains.

    Collectives count at the sender; one-sided transports count at the rank that moves a row, which for rows that
    are pulled is the receiver."""

    calls: int = 0
    remote_rows: int = 0
    remote_bytes: int = 0
    logical_bytes: int = 0
    rail_rows: int = 0
    rail_bytes: int = 0


class Collectives(ABC):
    """`op` names the message in counters and errors, for example "dispatch.rows"."""

    def __init__(self, group: Group, timeout: float) -> None:
        self.group = group
        self.timeout = timeout
        self.traffic: dict[str, Traffic] = defaultdict(Traffic)

    def counted(self) -> dict[str, Traffic]:
        """What was moved so far, by message."""
        return dict(self.traffic)

    @abstractmethod
    def all_gather(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """[n, ...] of every rank, the same shape everywhere -> [R * n, ...]."""

    def gather_ints(self, ints: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """Contiguous int32 [n] of every rank, the same n everywhere -> [R, n]."""
        return self.all_gather([one[None] for one in ints], op)

    @abstractmethod
    def all_to_all(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
        op: str,
    ) -> list[torch.Tensor]:
        """Rows [sum(send_splits), ...] in destination order -> rows [sum(recv_splits), ...] in source
        order."""

    def to_host(self, received: torch.Tensor) -> torch.Tensor:
        """A copy of what a message brought, which the host may believe. Waits for the current stream."""
        return received.cpu()

    def _count(self, op: str, rows: int, own_rows: int, tensor: torch.Tensor) -> None:
        """Counts a message that sent `rows` rows of `tensor` to other ranks and `own_rows` to its own."""
        row_bytes = (tensor.numel() // max(tensor.shape[0], 1)) * tensor.element_size()
        counter = self.traffic[op]
        counter.calls += 1
        counter.remote_rows += rows
        counter.remote_bytes += rows * row_bytes
        counter.logical_bytes += (rows + own_rows) * row_bytes


class ReducingCollectives(Collectives):
    """Collectives that can also add."""

    @abstractmethod
    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        """[R * n, ...] of every rank -> the sum of everybody's own slice [n, ...], in an order nobody
        promises."""


class ProcessCollectives(ReducingCollectives):
    """One rank, over its group's torch process group."""

    def __init__(self, group: Group, timeout: float) -> None:
        super().__init__(group, timeout)
        self._pg = group.process_group(timeout)

    def all_gather(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        (tensor,) = tensors
        out = _empty(self.group.size * tensor.shape[0], tensor)
        self._count(op, tensor.shape[0] * (self.group.size - 1), tensor.shape[0], tensor)
        if tensor.numel():
            if tensor.device.type == "cpu":
                self._gather_directly(_bytes(out), _bytes(tensor), op)
            else:
                self._wait(self._pg._allgather_base(_bytes(out), _bytes(tensor)), op)
        return [out]

    def _gather_directly(self, out: torch.Tensor, mine: torch.Tensor, op: str) -> None:
        """Every rank's bytes [n, b] straight into their place in [R * n, b].

        gloo's own all-gather hands them on around a ring and through a buffer of its own, which takes three times
        as long, and it cannot say who is late.
        """
        rank, size = self.group.rank, self.group.size
        place = out.view(size, *mine.shape)
        peers = [(rank + step) % size for step in range(1, size)]
        with named_errors(op, rank, self.timeout):  # a connection may be known to be broken by now
            arriving = [(peer, self._pg.recv([place[peer]], peer, GATHER_TAG)) for peer in reversed(peers)]
            leaving = [(peer, self._pg.send([mine], peer, GATHER_TAG)) for peer in peers]
        place[rank].copy_(mine)
        deadline = time.monotonic() + self.timeout
        for peer, work in (*arriving, *leaving):
            try:
                wait(work, op, rank, max(0.001, deadline - time.monotonic()), self.group.device)
            except Timeout as error:
                raise Timeout(op, rank, (peer,), self.timeout) from error

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
        op: str,
    ) -> list[torch.Tensor]:
        (send,), (to,), (come,) = sends, send_splits, recv_splits
        out = _empty(sum(come), send)
        self._count(op, sum(to) - to[self.group.rank], to[self.group.rank], send)
        self._wait(self._pg.alltoall_base(_bytes(out), _bytes(send), list(come), list(to)), op)
        return [out]

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        (tensor,) = tensors
        rows = tensor.shape[0] // self.group.size
        out = tensor.new_empty((rows, *tensor.shape[1:]))
        self._count(op, tensor.shape[0] - rows, rows, tensor)
        if tensor.numel():
            self._wait(
                self._pg._reduce_scatter_base(out, tensor.contiguous(), dist.ReduceScatterOptions()), op
            )
        return [out]

    def _wait(self, work: dist.Work, op: str) -> None:
        wait(work, op, self.group.rank, self.timeout, self.group.device)


class LocalCollectives(ReducingCollectives):
    """All ranks of a local group: plain copies, counted as if they had crossed."""

    def all_gather(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        gathered = torch.cat(list(tensors))
        for tensor in tensors:
            self._count(op, tensor.shape[0] * (len(tensors) - 1), tensor.shape[0], tensor)
        return [gathered] * len(tensors)

    def all_to_all(
        self,
        sends: Sequence[torch.Tensor],
        send_splits: Sequence[Sequence[int]],
        recv_splits: Sequence[Sequence[int]],
        op: str,
    ) -> list[torch.Tensor]:
        for rank, (send, to) in enumerate(zip(sends, send_splits, strict=True)):
            self._count(op, sum(to) - to[rank], to[rank], send)
        parts = [send.split(list(to)) for send, to in zip(sends, send_splits, strict=True)]
        return [torch.cat([part[rank] for part in parts]) for rank in range(len(sends))]

    def reduce_scatter(self, tensors: Sequence[torch.Tensor], op: str) -> list[torch.Tensor]:
        for tensor in tensors:
            own = tensor.shape[0] // len(tensors)
            self._count(op, tensor.shape[0] - own, own, tensor)
        total = torch.stack(list(tensors)).float().sum(0).to(tensors[0].dtype)
        return list(total.chunk(len(tensors))) if total.numel() else [total] * len(tensors)


def make_collectives(group: Group, timeout: float) -> ReducingCollectives:
    """The collectives of a group; every wait ends within `timeout` seconds on the CPU."""
    return LocalCollectives(group, timeout) if group.is_local else ProcessCollectives(group, timeout)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same rows as bytes, so that every back end moves every dtype."""
    return (
        tensor.contiguous().view(tensor.shape[0], -1).view(torch.uint8)
        if tensor.numel()
        else (tensor.new_empty((tensor.shape[0], 1), dtype=torch.uint8))
    )


def _empty(rows: int, like: torch.Tensor) -> torch.Tensor:
    """Rows like those of `like` that are about to be received."""
    flat = output(rows, math.prod(like.shape[1:]), like.dtype, like.device)
    return flat.view(rows, *like.shape[1:])
