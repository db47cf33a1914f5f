"""Rank processes that stay alive between cases, because starting eight torch processes takes seconds."""

from __future__ import annotations

import concurrent.futures as futures
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from flexep.errors import FlexEPError
from flexep.testing.mps import Mps
from flexep.testing.worker import RankStart, die_with_parent, run_rank, start_rank, stop_rank

GRACE_SECONDS = 10.0  # how long the other ranks may take to end once one has failed

PEER = {"FLEXEP_PEER": "1"}  # in the environment of ranks whose GPUs shall reach each other's memory


class RankFailed(FlexEPError):
    """A function failed on some rank of a pool.

    Attributes: `errors` ({rank: exception}), `stragglers` (ranks that had to be killed). `__cause__` is the
    error of the rank that failed first.
    """

    def __init__(self, errors: dict[int, BaseException], stragglers: list[int]) -> None:
        lines = [f"rank {rank}: {type(error).__name__}: {error}" for rank, error in errors.items()]
        if stragglers:
            lines.append(f"killed because they did not end in time: ranks {stragglers}")
        super().__init__("\n".join(lines) or "ranks failed")
        self.errors = errors
        self.stragglers = stragglers


class RankPool:
    """`size` rank processes with one process group (gloo on "cpu", nccl with one GPU a rank on "cuda").

    With `gpus`, ranks on "cuda" are spread over so many GPUs, several on one if need be; gloo then joins them, and
    their FlexEP group meets at a store. `environment` is set and `setup` (picklable) runs in every rank before it
    joins. Pools do not collide: they meet at a file in a directory of their own, not at a port. Use as a context
    manager, or call `close`. Any failure that leaves a rank stuck kills the pool's processes; `alive` then says False
    and a new pool is needed.
    """

    def __init__(
        self,
        size: int,
        device: str = "cpu",
        timeout: float = 120.0,
        setup: Callable | None = None,
        *,
        gpus: int | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.size = size
        self.device = device
        self.timeout = timeout
        self.alive = True
        self._pids: dict[int, int] = {}
        self._folder = tempfile.TemporaryDirectory(prefix="flexep-pool-")
        # The fork server imports torch once; the ranks are forked from it, clean of this process's threads
        # and state.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["flexep.testing.worker", "torch._dynamo"])  # custom ops load dynamo
        self._ranks = [futures.ProcessPoolExecutor(1, mp_context=context) for _ in range(size)]
        store = str(Path(self._folder.name) / "store")
        self._pids = dict(enumerate(self._gather([e.submit(die_with_parent) for e in self._ranks], timeout)))
        self._gather(
            [
                executor.submit(
                    start_rank,
                    RankStart(rank, size, device, store, timeout, gpus, environment or {}, setup),
                )
                for rank, executor in enumerate(self._ranks)
            ],
            timeout,
        )

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float | None = None) -> list[Any]:
        """fn(context, *args) on every rank; the results by rank. Raises RankFailed naming every rank that
        failed.

        Ranks that all end by themselves, errors or not, leave the pool usable.
        """
        if not self.alive:
            raise FlexEPError("this rank pool was closed, or killed after a failure; make a new one")
        return self._gather([e.submit(run_rank, fn, args) for e in self._ranks], timeout or self.timeout)

    def run_each(self, fn: Callable[..., Any], per_rank: list[tuple]) -> list[Any]:
        """fn(context, *per_rank[rank]) on every rank."""
        tasks = zip(self._ranks, per_rank, strict=True)
        return self._gather([executor.submit(run_rank, fn, args) for executor, args in tasks], self.timeout)

    def _gather(self, pending: list[futures.Future], timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        done, waiting = futures.wait(pending, timeout, futures.FIRST_EXCEPTION)
        failed = [f for f in done if f.exception() is not None]
        if failed and waiting:
            grace = min(GRACE_SECONDS, max(0.0, deadline - time.monotonic()))
            _, waiting = futures.wait(pending, grace)
        stragglers = [rank for rank, future in enumerate(pending) if future in waiting]
        errors: dict[int, BaseException] = {}
        for rank, future in enumerate(pending):
            if rank not in stragglers and (error := future.exception()) is not None:
                errors[rank] = error
        broken = any(isinstance(error, futures.BrokenExecutor) for error in errors.values())
        if stragglers or broken:
            self._kill()
        if errors or stragglers:
            raise RankFailed(errors, stragglers) from (failed[0].exception() if failed else None)
        return [future.result() for future in pending]

    def _kill(self) -> None:
        """Ends every rank at once and cleans up."""
        self.alive = False
        for pid in self._pids.values():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue  # that rank is what broke
        for executor in self._ranks:
            executor.shutdown(wait=bool(self._pids), cancel_futures=True)
        self._folder.cleanup()

    def close(self) -> None:
        """Stops the ranks; kills those that do not stop. Idempotent."""
        if not self.alive:
            return
        try:
            self._gather([executor.submit(stop_rank) for executor in self._ranks], GRACE_SECONDS)
        except RankFailed:
            self._kill()
            return
        self.alive = False
        for executor in self._ranks:
            executor.shutdown()
        self._folder.cleanup()

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def peer_pool(ranks: int, gpus: int, timeout: float = 580.0) -> Iterator[RankPool]:
    """`ranks` processes on `gpus` GPUs whose windows reach each other, under MPS where several share one.

    Raises Unavailable where they do and MPS does not start.
    """
    with ExitStack() as stack:
        environment = dict(PEER)
        if ranks > gpus:
            environment |= stack.enter_context(Mps(-(-ranks // gpus))).environment
        pool = RankPool(ranks, "cuda", timeout, gpus=gpus, environment=environment)
        yield stack.enter_context(pool)
