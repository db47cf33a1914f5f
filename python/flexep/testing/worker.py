"""The side of a rank pool that lives in the rank's process."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import flexep


@dataclass(frozen=True)
class RankStart:
    """How a rank of a pool starts.

    Attributes: `store`: the file where ranks meet. `gpus`: None, or over how many GPUs the ranks are spread, neighbours
    on one. `environment`: variables of its process. `setup` runs before it joins.
    """

    rank: int
    size: int
    device: str
    store: str
    timeout: float
    gpus: int | None
    environment: Mapping[str, str]
    setup: Callable | None

    @property
    def place(self) -> torch.device:
        """The rank's device."""
        if self.device != "cuda":
            return torch.device(self.device)
        return torch.device("cuda", self.rank if self.gpus is None else self.rank * self.gpus // self.size)


@dataclass
class RankContext:
    """What a function that runs in a pool gets first. `group` is the pool's FlexEP group, made at first use
    by all ranks together."""

    rank: int
    size: int
    device: torch.device
    meets_at: dist.Store | None = None  # of ranks that may share GPUs, which NCCL refuses

    @cached_property
    def group(self) -> flexep.Group:
        if self.meets_at is None:
            return flexep.Group.from_process_group(dist.group.WORLD)
        return flexep.Group.from_store(self.meets_at, self.rank, self.size, device=self.device)


_context: RankContext | None = None


def start_rank(start: RankStart) -> int:
    """Joins the process group of the pool; returns the process id.

    One compute thread a rank: ranks share the cores already. Environment and `setup` come before anything else.
    """
    global _context
    os.environ.update(start.environment)
    if start.setup is not None:
        start.setup()
    torch.set_num_threads(1)
    here = start.place
    if here.type == "cuda":
        torch.cuda.set_device(here)
    nccl = here.type == "cuda" and start.gpus is None
    store = dist.FileStore(start.store, start.size)
    dist.init_process_group(
        "nccl" if nccl else "gloo",
        store=store,
        rank=start.rank,
        world_size=start.size,
        timeout=datetime.timedelta(seconds=start.timeout),
        device_id=here if nccl else None,
    )
    _context = RankContext(start.rank, start.size, here, None if start.gpus is None else store)
    return os.getpid()


def run_rank(fn: Callable[..., Any], args: tuple) -> Any:
    """Calls fn(context, *args) in this rank."""
    if _context is None:
        raise RuntimeError("this rank has not joined its pool")
    return fn(_context, *args)


def stop_rank() -> None:
    """Leaves the process group, so that exit is quiet."""
    global _context
    if _context is not None:
        if "group" in vars(_context):
            _context.group.close()
        _context = None
        dist.destroy_process_group()


def die_with_parent() -> int:
    """Ends this process when the one that started the pool is gone; returns the process id."""
    parent = multiprocessing.parent_process()

    def watch() -> None:
        if parent is not None:
            parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="pool-parent-watch").start()
    return os.getpid()
