"""The side of a run that lives in each rank. The steps are functions that a pool runs on all ranks at once."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexep.benchmark.baselines import BY_COLUMN
from flexep.benchmark.beside import Beside, run_beside
from flexep.benchmark.case import ON_CPU, BenchCase
from flexep.benchmark.check import Answers, Checked, answers, check_last, check_library, forget
from flexep.benchmark.copy_engine import rows_between
from flexep.benchmark.library import Column, FlexEP, PlansApart, Routed, Sent
from flexep.benchmark.machine import cores
from flexep.benchmark.timing import Times, chained, gated
from flexep.ref import Plan
from flexep.testing.worker import RankContext

OPS = ("dispatch", "combine", "roundtrip")
PLAN = "plan"  # the part of a fresh dispatch that comes before its rows


@dataclass(frozen=True)
class Facts:
    """What a column prints with its numbers."""

    library: str
    dispatcher: str
    wire: str
    layout: str
    mode: str
    alignment: int
    sms: int | None
    plans: bool


@dataclass(frozen=True)
class Floor:
    """What any library must move in one direction, averaged over steps.

    Attributes: `remote_rows`: of tokens that another rank needs, `expert_rows`: without padding, of all ranks.
    `crossing_rows`: what the busiest rank sends or receives. `touched_rows`: what the busiest one reads and writes:
    each token that it receives once, and each row that it delivers. `row_bytes`: of one.
    """

    remote_rows: float
    expert_rows: float
    crossing_rows: float
    touched_rows: float
    row_bytes: int

    def us(self, copy: dict[str, Any]) -> float:
        """Microseconds, at the rates of `machine.copy_facts`. On the CPU all rows pass one memory, one after the other.
        GPUs work side by side, and each one's link beside its memory, where a byte that is copied is read and
        written."""
        inside = copy["inside_bytes_per_second"]
        if inside is None:
            return 1e6 * (self.remote_rows + self.expert_rows) * self.row_bytes / copy["bytes_per_second"]
        link, memory = self.crossing_rows / copy["bytes_per_second"], self.touched_rows / (2 * inside)
        return 1e6 * self.row_bytes * max(link, memory)


def floor_of(plans: Sequence[Plan], flat: bool, row_bytes: int) -> Floor:
    """The mean of steps with these plans, rows delivered flat or expert-major."""
    found = []
    for plan in plans:
        there = rows_between(plan)
        expert = [int(p.counts.sum()) for p in plan.ranks]
        delivered = [p.num_recv for p in plan.ranks] if flat else expert
        touched = [p.num_recv + rows for p, rows in zip(plan.ranks, delivered, strict=True)]
        crossing = max(*map(sum, there), *map(sum, zip(*there, strict=True)))
        found.append((sum(map(sum, there)), sum(expert), crossing, max(touched)))
    remote, experts, crossing, most = (statistics.mean(each) for each in zip(*found, strict=True))
    return Floor(remote, experts, crossing, most, row_bytes)


class RankBench:
    """Inputs and open libraries of one rank."""

    def __init__(self, ctx: RankContext, case: BenchCase) -> None:
        self.ctx, self.case = ctx, case
        with all_cores(ctx.size):
            self.steps = [_on(ctx.device, self._answers(step).routed) for step in range(case.steps)]
        self.libraries: dict[Column, Checked] = {}
        self._pairs = 0  # done so far: routings take turns

    def _answers(self, step: int) -> Answers:
        return answers(self.case, self.case.world, self.ctx.rank, step)

    def why_not(self, column: Column) -> str | None:
        """Why a column cannot run, known before anything collective; None if it can."""
        if column[0] == "flexep":
            return None
        if self.case.device == "cpu" and column[0] not in ON_CPU:
            return "it moves memory of GPUs"
        refused: str | None = BY_COLUMN[column].why_not(self.case)
        return refused

    def open(self, column: Column) -> Facts:
        made: Checked = (
            FlexEP(self.ctx, self.case, column[1], self.steps)
            if column[0] == "flexep"
            else BY_COLUMN[column](self.ctx, self.case, self.steps)
        )
        self.libraries[column] = made
        return Facts(
            made.library,
            made.dispatcher,
            made.wire,
            made.layout,
            made.mode,
            made.alignment,
            made.sms,
            isinstance(made, PlansApart),
        )

    def floor(self) -> Floor:
        """From the oracle's plans."""
        plans = [self._answers(step).plan for step in range(self.case.steps)]
        world = self.case.world
        return floor_of(plans, self.case.layout == "flat", world.hidden * world.dtype.itemsize)

    def check(self, column: Column) -> list[str]:
        with all_cores(self.ctx.size):
            return check_library(self.case, self.libraries[column], self.ctx.rank)

    def pace(self, column: Column) -> float:
        """Seconds of one roundtrip, the best of three after one that warms up."""
        library, best = self.libraries[column], math.inf
        for _ in range(4):
            start = time.perf_counter()
            self._pair(library)
            if self.ctx.device.type == "cuda":
                torch.cuda.synchronize(self.ctx.device)
            best = min(best, time.perf_counter() - start)
        return best

    def measure(self, column: Column, op: str, count: int) -> Times:
        """Dispatch or combine alone, each call behind a gate."""
        library, step = self.libraries[column], self._step()
        if op == "dispatch":
            return gated(lambda: library.dispatch(step), count, self.ctx.device)
        delivered = library.dispatch(step)
        return gated(lambda: library.combine(delivered.x, delivered), count, self.ctx.device)

    def plan(self, column: Column, count: int) -> list[float]:
        """The periods of plans back to back, as roundtrips are timed."""
        library = self.libraries[column]
        assert isinstance(library, PlansApart)
        return chained(lambda: library.plan(self._step()), count, self.ctx.device)

    def beside(self, column: Column, op: str) -> Beside:
        """A chain of matrix products alone, and next to one operation after the other."""
        library, step = self.libraries[column], self._step()
        delivered = library.dispatch(step)
        if op == "dispatch":
            return run_beside(lambda: library.dispatch(step), self.ctx.device)
        return run_beside(lambda: library.combine(delivered.x, delivered), self.ctx.device)

    def chain(self, column: Column, count: int) -> tuple[list[float], list[str]]:
        """Roundtrips back to back; their periods, and what is wrong with the rows and sums of the last one."""
        library, last = self.libraries[column], None

        def pair() -> None:
            nonlocal last
            last = self._pair(library)

        times = chained(pair, count, self.ctx.device)
        assert last is not None
        with all_cores(self.ctx.size):
            return times, check_last(self.case, library, self.ctx.rank, *last)

    def _step(self) -> int:
        self._pairs += 1
        return self._pairs % self.case.steps

    def _pair(self, library: Checked) -> tuple[int, Any, torch.Tensor]:
        step = self._step()
        delivered = library.dispatch(step)
        return step, delivered, library.combine(delivered.x, delivered)

    def sent(self, column: Column) -> dict[str, tuple[float, float]]:
        """(remote, logical) bytes of every message that this rank moved in one roundtrip, averaged over the steps;
        counted, not computed."""
        library = self.libraries[column]
        before = library.sent()
        for step in range(self.case.steps):
            delivered = library.dispatch(step)
            library.combine(delivered.x, delivered)
        out = {}
        for op, now in library.sent().items():
            then = before.get(op, Sent())
            remote, logical = now.remote_bytes - then.remote_bytes, now.logical_bytes - then.logical_bytes
            out[op] = (remote / self.case.steps, logical / self.case.steps)
        return out

    def close(self) -> None:
        for library in self.libraries.values():
            library.close()
        self.libraries.clear()


_bench: RankBench | None = None


def start(ctx: RankContext, case: BenchCase) -> None:
    """Makes this rank's inputs and answers; of a run before this one, only answers to the same inputs are kept."""
    global _bench
    if _bench is not None and _bench.case.inputs != case.inputs:
        forget()
    with torch.no_grad():
        _bench = RankBench(ctx, case)


def call(ctx: RankContext, method: str, *args: Any) -> Any:
    """One method of this rank's RankBench; its result goes back to the process that drives the run."""
    if _bench is None:
        raise RuntimeError("start the run first")
    with torch.no_grad():
        return getattr(_bench, method)(*args)


@contextmanager
def all_cores(ranks: int) -> Iterator[None]:
    """This rank's share of the machine for inputs and answers; what is timed has one thread a rank."""
    torch.set_num_threads(max(1, cores() // ranks))
    try:
        yield
    finally:
        torch.set_num_threads(1)


def _on(device: torch.device, routed: Routed) -> Routed:
    weights = None if routed.weights is None else routed.weights.to(device)
    return replace(routed, x=routed.x.to(device), topk_idx=routed.topk_idx.to(device), weights=weights)
