"""Ranks that may die: real processes that meet at a store, tell the test what they do, and regroup without the dead.

A rank pool (flexep.testing.pool) ends all its ranks when one fails; here the others must live on.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from types import TracebackType
from typing import Any, NoReturn

import torch
import torch.distributed as dist

import flexep
from flexep.testing.worker import die_with_parent

HOST = "127.0.0.1"
START_SECONDS = 60.0
DYING = "dying"  # what a rank says before it kills itself


@dataclass(frozen=True)
class Tried:
    """What one call came to. Times are of time.monotonic, which all processes of a host share."""

    error: Exception | None
    began: float
    ended: float


@dataclass
class Rank:
    """One rank, in its own process: what a scenario gets first. `generation` counts the regroupings."""

    rank: int
    size: int
    store: dist.Store
    pipe: connection.Connection
    generation: int = 0
    group: flexep.Group = field(init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        self.group = flexep.Group.from_store(self.store, self.rank, self.size, self.generation)

    def say(self, what: str) -> None:
        """Tells the test that this rank has come as far as `what`, and when."""
        with self._lock:
            self.pipe.send((what, time.monotonic(), None))

    def die(self, *_: object, **__: object) -> NoReturn:
        """Ends this process as the kernel would: nothing is closed, flushed or said to peers."""
        self.say(DYING)
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("survived SIGKILL")

    def die_in(self, seconds: float) -> None:
        """Dies from another thread, wherever this one is by then."""
        threading.Timer(seconds, self.die).start()

    def attempt(self, call: Callable[[], Any]) -> Tried:
        """Calls; any exception is part of the outcome."""
        began = time.monotonic()
        try:
            call()
        except Exception as error:
            return Tried(error, began, time.monotonic())
        return Tried(None, began, time.monotonic())

    def regroup(self, lost: Sequence[int] = ()) -> Rank:
        """This process among the survivors, in the next generation of the group."""
        living = [rank for rank in range(self.size) if rank not in lost]
        return Rank(living.index(self.rank), len(living), self.store, self.pipe, self.generation + 1)


Scenario = Callable[..., Any]


class Crew:
    """`size` processes that each run scenario(Rank, *args); a context manager that leaves none of them behind.

    They meet at a store of the test's process, which lives on whoever dies.
    """

    def __init__(self, size: int, scenario: Scenario, *args: object) -> None:
        self.size = size
        self._store = dist.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["flexep.testing.worker", "torch._dynamo"])  # as RankPool does
        self._said: list[dict[str, tuple[float, Any]]] = [{} for _ in range(size)]
        self._pipes: list[connection.Connection] = []
        self._processes = []
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(
                target=_live, args=(rank, size, self._store.port, theirs, scenario, args), daemon=True
            )
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def heard(self, rank: int, what: str, seconds: float = 60.0) -> float:
        """When the rank said `what`; waits for it."""
        return self._wait_for(rank, what, seconds)[0]

    def kill(self, rank: int) -> float:
        """Kills a rank with SIGKILL; returns when."""
        pid = self._processes[rank].pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        return time.monotonic()

    def value(self, rank: int, seconds: float = 60.0) -> Any:
        """What the scenario returned on a rank; waits for it."""
        return self._wait_for(rank, "value", seconds)[1]

    def values(self, but: int | None = None, seconds: float = 60.0) -> dict[int, Any]:
        """The same of all ranks `but` one."""
        return {rank: self.value(rank, seconds) for rank in range(self.size) if rank != but}

    def exit_code(self, rank: int, seconds: float = 30.0) -> int | None:
        """Of the rank's process, once it has ended: negative the signal that ended it. None: it lives."""
        self._processes[rank].join(seconds)
        return self._processes[rank].exitcode

    def _wait_for(self, rank: int, what: str, seconds: float) -> tuple[float, Any]:
        deadline = time.monotonic() + seconds
        said = self._said[rank]
        while what not in said:
            if not self._pipes[rank].poll(max(0.0, deadline - time.monotonic())):
                raise AssertionError(f"rank {rank} did not say {what!r} in {seconds} s; it said {list(said)}")
            try:
                name, when, value = self._pipes[rank].recv()
            except EOFError:
                code = self.exit_code(rank, 5)
                raise AssertionError(
                    f"rank {rank} ended ({code}) before {what!r}; it said {list(said)}"
                ) from None
            said[name] = (when, value)
            if name == "raised":
                raise AssertionError(f"rank {rank}:\n{value}")
        return said[what]

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.join(0 if error is not None else 10)
            process.kill()
            process.join()
        for pipe in self._pipes:
            pipe.close()


def _live(
    rank: int, size: int, port: int, pipe: connection.Connection, scenario: Scenario, args: tuple
) -> None:
    """The life of a rank's process."""
    die_with_parent()
    torch.set_num_threads(1)
    me = Rank(rank, size, dist.TCPStore(HOST, port), pipe)
    try:
        me.group.barrier(START_SECONDS)  # processes start unequally; the scenario's timeouts are not for that
        said = ("value", time.monotonic(), scenario(me, *args))
    except BaseException:
        said = ("raised", time.monotonic(), traceback.format_exc())
    with me._lock:
        pipe.send(said)
