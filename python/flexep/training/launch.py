"""Start the ranks of a run on this host, or join those a launcher such as torchrun has started."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from flexep.errors import ArgumentError, FlexEPError

RankMain = Callable[..., None]
"""A module-level function; called in every rank as `main(process_group, *args)`."""


class RankFailed(FlexEPError):
    """A rank ended before its work was done. Attributes `rank`, `exit_code`, `details` (traceback or "")."""

    def __init__(self, rank: int, exit_code: int, details: str) -> None:
        super().__init__(
            f"rank {rank} failed with exit code {exit_code}" + (f"\n{details}" if details else "")
        )
        self.rank = rank
        self.exit_code = exit_code
        self.details = details

    def __reduce__(self) -> tuple[object, ...]:
        return (type(self), (self.rank, self.exit_code, self.details))


def launched_size() -> int | None:
    """The number of ranks of the launcher that started this process (it set RANK, WORLD_SIZE), or None."""
    return int(os.environ["WORLD_SIZE"]) if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else None


def run_launched(device: str, main: RankMain, *args: object) -> None:
    """Run `main` as a rank of the launcher that set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT."""
    _check_device(device)
    torch.set_num_threads(1)
    _init_process_group(device, int(os.environ.get("LOCAL_RANK", "0")))
    _call(main, args)


def run_ranks(device: str, num_ranks: int, main: RankMain, *args: object) -> None:
    """Start `num_ranks` processes, run `main` in each, and wait. When one fails the others are ended.

    This process hosts the store they meet at, on a free port. A FlexEPError in a rank is printed by that
    rank, which exits with 2 if an argument was refused, else with 1.

    Raises:
        ArgumentError: no GPU for device cuda, or more ranks than this host has GPUs.
        RankFailed: for the first rank that failed.
    """
    _check_device(device)
    if device == "cuda" and num_ranks > torch.cuda.device_count():
        raise ArgumentError("ranks", num_ranks, f"at most one a GPU: {torch.cuda.device_count()}")
    store = dist.TCPStore("127.0.0.1", 0, num_ranks, is_master=True, wait_for_workers=False)
    try:
        # The fork server imports torch once; ranks are forked from it, clean of this process's threads.
        multiprocessing.set_forkserver_preload(["flexep.training.loop"])
        mp.start_processes(
            _started, (store.port, num_ranks, device, main, args), num_ranks, start_method="forkserver"
        )
    except mp.ProcessRaisedException as error:
        raise RankFailed(error.error_index, 1, error.msg.strip()) from None
    except mp.ProcessExitedException as error:
        raise RankFailed(error.error_index, error.exit_code, "") from None


def _started(
    rank: int, port: int, num_ranks: int, device: str, main: RankMain, args: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, num_ranks, is_master=False)
    try:
        _init_process_group(device, rank, store=store, rank=rank, world_size=num_ranks)
        _call(main, args)
    except FlexEPError as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        sys.exit(2 if isinstance(error, ArgumentError) else 1)


def _check_device(device: str) -> None:
    if device == "cuda" and not torch.cuda.device_count():
        raise ArgumentError("device", device, "a CUDA GPU on this machine, or cpu")


def _init_process_group(device: str, local_rank: int, **rendezvous: Any) -> None:
    if device == "cuda":
        torch.cuda.set_device(local_rank)
        dist.init_process_group("nccl", device_id=torch.device("cuda", local_rank), **rendezvous)
    else:
        dist.init_process_group("gloo", **rendezvous)


def _call(main: RankMain, args: tuple[object, ...]) -> None:
    """Not destroyed when `main` raises: that can wait for peers, and the process is about to end anyway."""
    assert dist.group.WORLD is not None
    main(dist.group.WORLD, *args)
    # Whatever cycle still holds the group lets go of it now: its threads are joined before the interpreter ends.
    gc.collect()
    dist.destroy_process_group()
