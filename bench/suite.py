"""What the pytest entry shares: a case from text, its columns on a pool, and a clock that ranks set."""

from __future__ import annotations

from types import TracebackType
from typing import Any, get_type_hints

from flexep.benchmark import rank
from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import Column
from flexep.testing.pool import RankPool

CHAIN = 5  # roundtrips back to back in one round; the first is dropped


def case_of(text: str) -> BenchCase:
    """`ranks=2,tokens=64` -> the case with these fields; the others keep their defaults."""
    kinds = get_type_hints(BenchCase)
    fields = dict(part.split("=", 1) for part in text.split(","))
    return BenchCase(**{name: kinds[name](value) for name, value in fields.items()})


class Clock:
    """A timer for pytest-benchmark that shows what the ranks measured, not what asking them costs."""

    def __init__(self) -> None:
        self._now = 0.0

    def read(self) -> float:
        self._now += 1e-9  # it must move, or the resolution of the timer could not be found
        return self._now

    def advance(self, us: float) -> None:
        self._now += us * 1e-6


class Suite:
    """The columns of a case on a pool of ranks; `wrong` collects what checks found."""

    def __init__(self, case: BenchCase) -> None:
        self.case = case
        self._open: set[Column] = set()
        self.pool = RankPool(case.ranks, case.device)
        self.pool.run(rank.start, case)

    def ranks(self, method: str, *args: Any) -> list[Any]:
        return self.pool.run(rank.call, method, *args)

    def open(self, column: Column) -> list[str]:
        """Opens a column once; what its check found."""
        if column not in self._open:
            self.ranks("open", column)
            self._open.add(column)
            self.ranks("pace", column)  # warms up
        return self.check(column)

    def check(self, column: Column) -> list[str]:
        return [text for found in self.ranks("check", column) for text in found]

    def time(self, column: Column, op: str) -> float:
        """Microseconds of one operation, the slowest rank's."""
        if op == "roundtrip":
            results = self.ranks("chain", column, CHAIN)
            wrong = [text for _, found in results for text in found]
            assert not wrong, wrong
            return max(sum(times[1:]) / (CHAIN - 1) for times, _ in results)
        return max(times.device[0] for times in self.ranks("measure", column, op, 1))

    def sent(self, column: Column, op: str) -> int:
        """Bytes that the busiest rank sends to others in one operation."""
        each = [
            sum(both[0] for name, both in sent.items() if op in ("roundtrip", name.split(".")[0]))
            for sent in self.ranks("sent", column)
        ]
        return round(max(each))

    def __enter__(self) -> Suite:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.pool.close()
