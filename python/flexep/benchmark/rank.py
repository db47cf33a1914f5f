"""The side of a run that lives in each rank. The steps are functions that a pool runs on all ranks at once."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from flexep.benchmark.case import BenchCase
from flexep.benchmark.check import Answers, answers, check_library
from flexep.benchmark.library import FlexEP, Library, Routed, Sent
from flexep.benchmark.timing import Times, chained, gated
from flexep.benchmark.torch_baseline import TorchBaseline
from flexep.testing.worker import RankContext

OPS = ("dispatch", "combine", "roundtrip")
PLAN = "plan"  # the part of a fresh dispatch that comes before its rows
Column = tuple[str, str]  # (library, dispatcher)


@dataclass(frozen=True)
class Facts:
    """What a column prints with its numbers."""

    library: str
    dispatcher: str
    wire: str
    layout: str
    mode: str
    alignment: int


@dataclass(frozen=True)
class Floor:
    """Rows that any library must move in one direction, over all ranks and averaged over steps; bytes of one."""

    remote_rows: float
    expert_rows: float
    row_bytes: int


class RankBench:
    """Inputs and open libraries of one rank."""

    def __init__(self, ctx: RankContext, case: BenchCase) -> None:
        self.ctx, self.case = ctx, case
        self.steps = [_on(ctx.device, self._answers(step).routed) for step in range(case.steps)]
        self.libraries: dict[Column, Library] = {}
        self._pairs = 0  # done so far: routings take turns

    def _answers(self, step: int) -> Answers:
        return answers(self.case, self.case.world, self.ctx.rank, step)

    def open(self, column: Column) -> Facts:
        make_flexep = column[0] == "flexep"
        made: Library = (
            FlexEP(self.ctx, self.case, column[1], self.steps)
            if make_flexep
            else TorchBaseline(self.ctx, self.case, self.steps)
        )
        self.libraries[column] = made
        return Facts(made.library, made.dispatcher, made.wire, made.layout, made.mode, made.alignment)

    def floor(self) -> Floor:
        """From the oracle's plan: kept (token, other rank) crossings and kept expert rows."""
        plans = [self._answers(step).plan for step in range(self.case.steps)]
        world, remote, rows = self.case.world, 0, 0
        for plan in plans:
            rows += sum(int(p.counts.sum()) for p in plan.ranks)
            for rank, token_row in enumerate(plan.token_row):
                crosses = token_row >= 0
                crosses[:, rank] = False
                remote += int(crosses.sum())
        return Floor(remote / len(plans), rows / len(plans), world.hidden * world.dtype.itemsize)

    def check(self, column: Column) -> list[str]:
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
        return chained(lambda: library.plan(self._step()), count, self.ctx.device)

    def chain(self, column: Column, count: int) -> tuple[list[float], list[str]]:
        """Roundtrips back to back; their periods, and what is wrong with the rows and sums of the last one."""
        library, last = self.libraries[column], None

        def pair() -> None:
            nonlocal last
            last = self._pair(library)

        times = chained(pair, count, self.ctx.device)
        assert last is not None
        step, delivered, z = last
        right = answers(self.case, library.world, self.ctx.rank, step)
        wrong = right.wrong_rows(delivered) + right.wrong_sums(z, right.z, library.library == "flexep")
        return times, wrong

    def _step(self) -> int:
        self._pairs += 1
        return self._pairs % self.case.steps

    def _pair(self, library: Library) -> tuple[int, Any, torch.Tensor]:
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
        answers.cache_clear()


_bench: RankBench | None = None


def start(ctx: RankContext, case: BenchCase) -> None:
    """Makes this rank's inputs and answers; a run before this one is forgotten."""
    global _bench
    with torch.no_grad():
        _bench = RankBench(ctx, case)


def call(ctx: RankContext, method: str, *args: Any) -> Any:
    """One method of this rank's RankBench; its result goes back to the process that drives the run."""
    if _bench is None:
        raise RuntimeError("start the run first")
    with torch.no_grad():
        return getattr(_bench, method)(*args)


def _on(device: torch.device, routed: Routed) -> Routed:
    weights = None if routed.weights is None else routed.weights.to(device)
    return replace(routed, x=routed.x.to(device), topk_idx=routed.topk_idx.to(device), weights=weights)
