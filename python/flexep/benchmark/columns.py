"""The columns of a run on their ranks: opened, checked, timed in turns, checked again, and added up."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import flexep
from flexep.benchmark import left_out, rank
from flexep.benchmark.baselines import REFERENCE, baseline_columns
from flexep.benchmark.beside import Beside, slowest
from flexep.benchmark.case import ALL, BenchCase
from flexep.benchmark.library import Column
from flexep.benchmark.rank import OPS, PLAN, Facts
from flexep.testing.pool import RankFailed, RankPool

TURNS = 4  # on the CPU columns take turns in every operation, so that a neighbour's work slows all alike
MIN_SAMPLES = 8  # of an operation, whatever the time limit
MAX_SAMPLES = {"cpu": 64, "cuda": 128}
START_TIMEOUT = 600.0  # seconds for making inputs and answers, and for anything else that is not timed


class Run:
    """One case on one pool. `problems` collects what checks found, by column; `left_out` why a column was not run."""

    def __init__(self, case: BenchCase, pool: RankPool, copy: dict[str, Any]) -> None:
        """`copy`: of `machine.copy_facts`."""
        self.case, self.pool, self.copy = case, pool, copy
        names = tuple(flexep.BACKENDS) if case.dispatchers == ALL else case.dispatchers
        self.asked: list[Column] = [("flexep", name) for name in names] + baseline_columns(case)
        compared = case.device == "cuda" and REFERENCE not in self.asked
        self.columns = [*self.asked, *([REFERENCE] if compared else [])]
        self.problems: dict[Column, list[str]] = {column: [] for column in self.columns}
        self.left_out: dict[Column, str] = {}
        self.facts: dict[Column, Facts] = {}
        self.pace: dict[Column, float] = {}
        self.samples: dict[tuple[Column, str], list[list[float]]] = {}  # [round of calls][rank]
        self.host: dict[tuple[Column, str], list[float]] = {}
        self.beside: dict[tuple[Column, str], Beside] = {}
        self.turns = TURNS if case.device == "cpu" else 1

    @property
    def opened(self) -> list[Column]:
        """Columns of the results."""
        return [column for column in self.asked if column not in self.left_out]

    def ranks(self, method: str, *args: Any) -> list[Any]:
        return self.pool.run(rank.call, method, *args, timeout=START_TIMEOUT + 20 * self.case.time_limit)

    def steps(self) -> Iterator[tuple[str, Callable[[], None]]]:
        """Everything there is to do, with a word for the progress bar."""
        yield "inputs", self._start
        for column in self.columns:
            yield f"{column[1]}: check", partial(self._open, column)
        for turn in range(self.turns):
            for op in (*((PLAN,) if self.case.fresh else ()), *OPS):
                for column in self.columns:
                    word = f"{column[1]}: {op} ({turn + 1} of {self.turns})"
                    yield word, partial(self._measure, column, op)
        for column in self.asked if self.case.beside != "none" else ():
            for op in OPS[:2]:
                yield f"{column[1]}: {op} beside {self.case.beside}", partial(self._beside, column, op)
        for column in self.columns:
            yield f"{column[1]}: check again", partial(self._check, column, "after")

    def _start(self) -> None:
        self.pool.run(rank.start, self.case, timeout=START_TIMEOUT)

    def _open(self, column: Column) -> None:
        refused = next((reason for reason in self.ranks("why_not", column) if reason), None)
        if refused is not None:
            self.left_out[column] = refused
            return
        try:
            self.facts[column] = self.ranks("open", column)[0]
            self._check(column, "before")
            self.pace[column] = max(self.ranks("pace", column))
        except RankFailed as failed:
            if not self.pool.alive:
                raise
            self.left_out[column] = left_out.reason(self.case, column, failed)

    def _check(self, column: Column, when: str) -> None:
        if column not in self.left_out:
            self._note(column, when, self.ranks("check", column))

    def _note(self, column: Column, when: str, wrong: list[list[str]]) -> None:
        self.problems[column] += [f"{when}, rank {r}: {w}" for r, found in enumerate(wrong) for w in found]

    def _beside(self, column: Column, op: str) -> None:
        if column not in self.left_out:
            self.beside[column, op] = slowest(self.ranks("beside", column, op))

    def _measure(self, column: Column, op: str) -> None:
        if column in self.left_out or (op == PLAN and not self.facts[column].plans):
            return
        most = self.case.pairs if op == "roundtrip" else min(MAX_SAMPLES[self.case.device], self.case.pairs)
        fitting = int(self.case.time_limit / self.pace[column])
        count = math.ceil(max(MIN_SAMPLES, min(most, fitting)) / self.turns)
        kept = self.samples.setdefault((column, op), [])
        if op == PLAN:
            kept += [list(each) for each in zip(*self.ranks("plan", column, count), strict=True)]
            return
        if op == "roundtrip":
            results = self.ranks("chain", column, count)
            self._note(column, "last of the chain", [wrong for _, wrong in results])
            drop = max(1, count // 8)  # 16 of 128
            kept += [list(each) for each in zip(*(times[drop:] for times, _ in results), strict=True)]
            return
        results = self.ranks("measure", column, op, count)
        kept += [list(each) for each in zip(*(times.device for times in results), strict=True)]
        if results[0].host is not None:
            host = self.host.setdefault((column, op), [])
            host += [max(each) for each in zip(*(times.host for times in results), strict=True)]

    def rows(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """`results` by the contract, and what does not fit its fields, in the same order."""
        floor_us = self.ranks("floor")[0].us(self.copy)
        results, details = [], []
        for column in self.opened:
            sent = self.ranks("sent", column)
            for op in OPS:
                row, detail = self._row(column, op, sent, floor_us * (2 if op == "roundtrip" else 1))
                results.append(row)
                details.append(detail)
        return results, details

    def plans(self) -> list[dict[str, Any]]:
        """What a fresh dispatch spends before its rows move, beside the roundtrip that it is a part of."""
        found = []
        for column in self.opened:
            if (column, PLAN) not in self.samples:
                continue
            median_us, p99_us = self._times(column, PLAN)
            found.append({
                "library": column[0], "dispatcher": column[1], "median_us": median_us, "p99_us": p99_us,
                "of_roundtrip": median_us / self._times(column, "roundtrip")[0],
            })  # fmt: skip
        return found

    def copy_engine(self) -> dict[str, dict[str, float]] | None:
        """What the copy engines took for the bytes that must cross, by operation; None where they were not measured."""
        if REFERENCE not in self.facts or REFERENCE in self.left_out:
            return None
        sent, found = self.ranks("sent", REFERENCE), {}
        for op in OPS:
            remote = max(
                sum(both[0] for name, both in each.items() if op in ("roundtrip", name.split(".")[0]))
                for each in sent
            )
            median_us, _ = self._times(REFERENCE, op)
            found[op] = {
                "median_us": median_us, "remote_bytes": round(remote), "bytes_per_second": 1e6 * remote / median_us,
            }  # fmt: skip
        return found

    def besides(self) -> list[dict[str, Any]]:
        """What the products beside an operation lost, on the rank that lost most."""
        return [
            {
                "library": column[0], "dispatcher": column[1], "op": op, "what": self.case.beside,
                "alone_us": one.alone_us, "beside_us": one.beside_us, "covered": one.covered, "ratio": one.ratio,
            }
            for (column, op), one in self.beside.items()
        ]  # fmt: skip

    def _ratio(self, op: str, median_us: float, floor_us: float) -> float | None:
        """The copy engine's time over this one; on the CPU, which has none, that of the floor."""
        if self.case.device == "cpu":
            return floor_us / median_us
        measured = REFERENCE in self.facts and REFERENCE not in self.left_out
        return self._times(REFERENCE, op)[0] / median_us if measured else None

    def _times(self, column: Column, op: str) -> tuple[float, float]:
        """Median and p99 in microseconds."""
        samples = self.samples[column, op]
        if op in (PLAN, "roundtrip"):  # a chain has no slowest rank: all run at one pace
            by_rank = [sorted(times) for times in zip(*samples, strict=True)]
            median, p99 = (statistics.median(quantile(t, q) for t in by_rank) for q in (0.5, 0.99))
            return median, p99
        slowest = sorted(max(each) for each in samples)
        return quantile(slowest, 0.5), quantile(slowest, 0.99)

    def _row(
        self, column: Column, op: str, sent: list[dict[str, tuple[float, float]]], floor_us: float
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        case, facts, samples = self.case, self.facts[column], self.samples[column, op]
        median_us, p99_us = self._times(column, op)
        mine = [
            {name: b for name, b in each.items() if op in ("roundtrip", name.split(".")[0])} for each in sent
        ]
        remote = [sum(b[0] for b in each.values()) for each in mine]
        logical = [sum(b[1] for b in each.values()) for each in mine]
        host = self.host.get((column, op))
        row = {
            "library": facts.library, "dispatcher": facts.dispatcher, "op": op, "layout": facts.layout,
            "wire": facts.wire, "routing": case.routing, "mode": facts.mode, "fresh": case.fresh,
            "alignment": facts.alignment, "tokens": case.tokens, "hidden": case.hidden,
            "experts": case.experts, "top_k": case.top_k, "ranks": case.ranks, "sms": facts.sms,
            "median_us": median_us, "p99_us": p99_us, "host_us": statistics.median(host) if host else None,
            "remote_bytes": round(max(remote)), "logical_bytes": round(max(logical)), "floor_us": floor_us,
            "ratio_to_copy_engine": self._ratio(op, median_us, floor_us), "checked": not self.problems[column],
        }  # fmt: skip
        detail = {
            "dispatcher": facts.dispatcher, "op": op, "samples": len(samples),
            "best_us": min(max(each) for each in samples),
            "skew_us": statistics.median(max(each) - min(each) for each in samples),
            "remote_bytes_by_rank": [round(b) for b in remote],
            "remote_bytes_by_message": {
                name: round(max(each[name][0] for each in mine)) for name in mine[0]
            },
        }  # fmt: skip
        return row, detail


def quantile(ordered: list[float], q: float) -> float:
    """The value that a share q of the sorted values does not exceed; the median of an even count is the upper one."""
    return ordered[min(len(ordered) - 1, int(q * len(ordered)))]
