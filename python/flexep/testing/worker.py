"""The side of a rank pool that lives in the rank's process."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

import flexep


@dataclass
class RankContext:
    """What a function that runs in a pool gets first. `group` is the pool's FlexEP group, made at first use
    by all ranks together; it is rebuilt after `renew_group`."""

    rank: int
    size: int
    device: torch.device

    @cached_property
    def group(self) -> flexep.Group:
        return flexep.Group.from_process_group(dist.group.WORLD)

    def renew_group(self) -> None:
        """Closes the group; the next use makes a new one (a collective)."""
        if "group" in self.__dict__:
            self.group.close()
            del self.group


_context: RankContext | None = None


def start_rank(
    rank: int, size: int, device: str, store_path: str, timeout: float, setup: Callable | None
) -> int:
    """Joins the process group of the pool; returns the process id.

    One compute thread a rank: ranks share the cores already. `setup` runs before anything else.
    """
    global _context
    if setup is not None:
        setup()
    torch.set_num_threads(1)
    here = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if here.type == "cuda":
        torch.cuda.set_device(here)
    store = dist.FileStore(store_path, size)
    dist.init_process_group(
        "nccl" if here.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=timeout),
        device_id=here if here.type == "cuda" else None,
    )
    _context = RankContext(rank, size, here)
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
        _context.renew_group()
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
