"""Times of one dispatcher at one case after the other, on one pool of ranks, each checked before it is timed."""

from __future__ import annotations

import os
import statistics
from types import TracebackType
from typing import Any

from flexep.benchmark import rank
from flexep.benchmark.case import BenchCase
from flexep.testing.pool import RankPool

OPS = ("dispatch", "combine")
START_TIMEOUT = 300.0  # seconds


def reach_peers(device: str) -> None:
    """Lets GPU processes that start after this open windows in each other's memory, unless FLEXEP_PEER says no."""
    if device == "cuda":
        os.environ.setdefault("FLEXEP_PEER", "1")


class WrongResult(Exception):
    """What was to be timed is wrong."""


class Measured:
    """Call it with a case of one dispatcher: {operation: microseconds}, the median of the slowest rank's."""

    def __init__(self, device: str, ranks: int, count: int = 20) -> None:
        self._pool, self._count = RankPool(ranks, device, START_TIMEOUT), count

    def __call__(self, case: BenchCase) -> dict[str, float]:
        """Raises WrongResult, and RankFailed where the dispatcher cannot be made."""
        (name,) = case.dispatchers
        column = ("flexep", name)
        self._pool.run(rank.start, case)
        try:
            self._ranks("open", column)
            wrong = [text for found in self._ranks("check", column) for text in found]
            if wrong:
                raise WrongResult(f"{case.command()}: {wrong[0]}")
            self._ranks("pace", column)
            return {op: self._median(column, op) for op in OPS}
        finally:
            if self._pool.alive:
                self._ranks("close")

    def _median(self, column: tuple[str, str], op: str) -> float:
        results = self._ranks("measure", column, op, self._count)
        return statistics.median(map(max, zip(*(times.device for times in results), strict=True)))

    def _ranks(self, method: str, *args: Any) -> list[Any]:
        return self._pool.run(rank.call, method, *args)

    def __enter__(self) -> Measured:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.close()
