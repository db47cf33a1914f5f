"""Runs many cases on few rank pools, surviving cases that break one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import flexep
from flexep.config import WINDOWED, Environment
from flexep.errors import Unavailable
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.testing.pool import RankFailed, RankPool
from flexep.testing.worker import RankContext

CASE_TIMEOUT = 300.0  # seconds for one case with all its dispatchers


@dataclass(frozen=True)
class Failure:
    """A case that failed: `case` reproduces it (with the dispatcher that showed it), `messages` say what
    differed."""

    case: Case
    messages: list[str]


def run_case(ctx: RankContext, case: Case, dispatchers: list[str]) -> list[tuple[Case, str]]:
    """In a rank: what differs, as (reproducer, message)."""
    group = flexep.Group.local(case.ranks, ctx.device) if case.transport == "local" else ctx.group
    found = check_dispatchers(case, group, dispatchers)
    return [(m.case, f"rank {m.rank}: {m.what}: {m.detail}") for m in found]


def run_local(ctx: RankContext, case: Case | None, dispatchers: list[str]) -> list[tuple[Case, str]]:
    """In a rank, for itself alone: a case in a local group; an exception is a result, nobody waits for this
    rank."""
    if case is None:
        return []
    try:
        return run_case(ctx, case, dispatchers)
    except Exception as error:
        return [(case, f"raised {type(error).__name__}: {error}")]


class Sweep:
    """One pool at a time, made anew when the number of ranks changes or a case broke it."""

    def __init__(self, dispatchers: Sequence[str], device: str = "cpu") -> None:
        self.dispatchers = list(dispatchers)
        self.device = device
        # Windows reach from process to process on the CPU; between GPUs only where that is switched on.
        reach = device == "cpu" or Environment.read().peer
        self.between_processes = [d for d in self.dispatchers if reach or d not in WINDOWED]
        self._pool: RankPool | None = None

    def run(self, cases: Sequence[Case], local_ranks: int = 2) -> Iterator[tuple[list[Case], list[Failure]]]:
        """Yields (cases finished, their failures) as it goes.

        Process cases run on pools of their ranks. Local cases need one process each: they run side by side on
        the pool that is there, or on one of `local_ranks`.
        """
        local = [case for case in cases if case.transport == "local"]
        process = sorted((case for case in cases if case.transport == "process"), key=lambda case: case.ranks)
        if process and not self.between_processes:
            names = " and ".join(self.dispatchers)
            raise Unavailable(
                f"{names} reach other processes' GPUs only with FLEXEP_PEER=1: set it, or choose cases of a local "
                "group"
            )
        for ranks, some in groupby(process, key=lambda case: case.ranks):
            for case in some:
                yield [case], self._process(case, ranks)
        ranks = self._pool.size if self._pool is not None else local_ranks
        for start in range(0, len(local), ranks):
            batch = local[start : start + ranks]
            yield batch, self._local(batch, ranks)

    def _ranks(self, ranks: int) -> RankPool:
        if self._pool is not None and (self._pool.size != ranks or not self._pool.alive):
            self.close()
        if self._pool is None:
            self._pool = RankPool(ranks, self.device, CASE_TIMEOUT)
        return self._pool

    def _process(self, case: Case, ranks: int) -> list[Failure]:
        try:
            results = self._ranks(ranks).run(run_case, case, self.between_processes)
        except RankFailed as failed:
            self.close()  # some rank may be inside a collective still
            return [Failure(case, str(failed).splitlines())]
        return _failures([line for lines in results for line in lines])

    def _local(self, batch: list[Case], ranks: int) -> list[Failure]:
        work: list[Case | None] = [*batch, *[None] * (ranks - len(batch))]
        try:
            results = self._ranks(ranks).run_each(run_local, [(case, self.dispatchers) for case in work])
        except RankFailed as failed:
            self.close()
            return [Failure(case, str(failed).splitlines()) for case in batch]
        return [failure for lines in results for failure in _failures(lines)]

    def close(self) -> None:
        """Stops the pool, if there is one."""
        if self._pool is not None:
            self._pool.close()
        self._pool = None

    def __enter__(self) -> Sweep:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _failures(lines: list[tuple[Case, str]]) -> list[Failure]:
    """One failure a case and transport, with the dispatcher that showed it first."""
    by_data: dict[Case, Failure] = {}
    for case, message in lines:
        key = replace(case, dispatcher="alltoall")
        by_data.setdefault(key, Failure(case, [])).messages.append(f"{case.dispatcher}: {message}")
    return list(by_data.values())
