"""One part in a process of its own: `python -m bench.suites.scaleup.part NAME DEVICE RANKS GPUS SECONDS FILE`.

Every part writes a JSON line as soon as it knows something, and starts nothing new when its time is nearly over.
"""

from __future__ import annotations

import itertools
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

import flexep
from bench.suites import side_by_side
from bench.suites.scaleup.boxes import EARLY
from flexep.benchmark.case import BenchCase
from flexep.config import WINDOWED
from flexep.errors import PeerRefused, Unavailable
from flexep.testing.axes import random_cases
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.testing.pool import RankFailed, RankPool, peer_pool
from flexep.testing.worker import RankContext
from flexep.training.config import TrainConfig
from flexep.training.loop import TrainReport, train

Emit = Callable[[dict[str, Any]], None]
CASES = 200  # random conformance cases of each shape of domains, if the time allows
CASE_LIMIT = 2**24  # R * T * K * H of one
NUM_SMS = (4, 8, 12, 16, 24, 32, 64, 96, 132)
LATENCY_TOKENS = (1, 8, 64, 128)


@dataclass(frozen=True)
class Place:
    """Where ranks run: on the CPU, or on so many GPUs, several on one if there are fewer."""

    device: str
    ranks: int
    gpus: int

    @property
    def shared(self) -> bool:
        return self.device == "cuda" and self.gpus < self.ranks

    @contextmanager
    def pool(self) -> Iterator[RankPool]:
        """Their processes; several on one GPU under MPS."""
        with peer_pool(self.ranks, self.gpus) if self.shared else RankPool(self.ranks, self.device) as pool:
            yield pool


class Clock:
    """What is left of the part's time."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    def left(self) -> bool:
        return time.monotonic() < self._end

    def share(self, parts: int) -> Clock:
        """The next of so many equal parts of what is left."""
        return Clock((self._end - time.monotonic()) / parts)

    def while_left(self, cases: Iterator[BenchCase]) -> Iterator[BenchCase]:
        return itertools.takewhile(lambda _: self.left(), cases)


def contract(place: Place, clock: Clock, emit: Emit) -> None:
    """Random cases on one-sided dispatchers, as one domain and as two."""
    ranks = place.ranks
    sizes = [None, ranks // 2] if ranks % 2 == 0 and ranks > 2 else [None]
    with place.pool() as pool:
        for number, size in enumerate(sizes):
            domains = f"1x{ranks}" if size is None else f"2x{size}"
            cases = [
                replace(case, domain_size=size, transport="process")
                for case in random_cases(ranks, CASES, seed=ranks, limit=CASE_LIMIT)
            ]
            emit({"domains": domains, **check_cases(pool, cases, clock.share(len(sizes) - number))})


def check_cases(pool: RankPool, cases: list[Case], clock: Clock) -> dict[str, Any]:
    """How many cases ran, what failed first, or why none can run here."""
    for done, case in enumerate(cases):
        if not clock.left():
            return {"cases": done, "failed": []}
        try:
            failed = [line for lines in pool.run(check_one, case) for line in lines]
        except RankFailed as error:
            unavailable = all(isinstance(e, (Unavailable, PeerRefused)) for e in error.errors.values())
            if unavailable and not error.stragglers:
                return {"cases": done, "left_out": str(error).splitlines()[0]}
            failed = str(error).splitlines()
        if failed:
            return {"cases": done + 1, "failed": [case.to_json(), *failed[:6]]}
    return {"cases": len(cases), "failed": []}


def check_one(ctx: RankContext, case: Case) -> list[str]:
    """In a rank."""
    return [str(mismatch) for mismatch in check_dispatchers(case, ctx.group, list(WINDOWED))]


def speed(place: Place, clock: Clock, emit: Emit) -> None:
    """Both layouts at both sizes: dispatchers, NCCL and the copy engine."""
    cases = (
        replace(case, baselines=("torch", "copy_engine") if place.device == "cuda" else ("torch",))
        for case in side_by_side.grid(place.device, place.ranks)
        if case.alignment == 16
    )
    side_by_side.measure(clock.while_left(cases), place.device, place.ranks, emit)


def curve(place: Place, clock: Clock, emit: Emit) -> None:
    """deepep at every number of multiprocessors; both layouts of a number before the next number."""
    tokens = 4096 if place.device == "cuda" else 32
    cases = (
        side_by_side.at(
            place.device,
            place.ranks,
            tokens,
            layout,
            num_sms=sms,
            dispatchers=("deepep",),
            baselines=(),
            pairs=32,
        )
        for sms in NUM_SMS
        for layout in ("flat", "expert_major")
    )
    side_by_side.measure(clock.while_left(cases), place.device, place.ranks, emit)


def latency(place: Place, clock: Clock, emit: Emit) -> None:
    """A few tokens a rank."""
    cases = (
        side_by_side.at(place.device, place.ranks, tokens, layout, baselines=("torch",))
        for tokens in LATENCY_TOKENS
        for layout in ("flat", "expert_major")
    )
    side_by_side.measure(clock.while_left(cases), place.device, place.ranks, emit)


def training(place: Place, clock: Clock, emit: Emit) -> None:
    """Steps of a model of two layers on every dispatcher."""
    with place.pool() as pool:
        for name in flexep.BACKENDS:
            if not clock.left():
                return
            emit({"dispatcher": name, **train_on(pool, training_config(place, name))})


def training_config(place: Place, dispatcher: str) -> TrainConfig:
    """Two layers; on the CPU a small model."""
    ranks = place.ranks
    if place.device == "cpu":
        return TrainConfig(
            ranks=ranks, dispatcher=dispatcher, steps=2, hidden=32, inner=32, seq=16, batch=ranks
        )
    return TrainConfig(
        device=place.device, ranks=ranks, dispatcher=dispatcher, steps=10, hidden=2048, inner=2048, experts=8 * ranks,
        top_k=4, seq=1024, batch=4 * ranks, dtype="bfloat16",
    )  # fmt: skip


def train_on(pool: RankPool, config: TrainConfig) -> dict[str, Any]:
    """Losses and tokens a second, or why not."""
    try:
        report = pool.run(train_rank, config)[0]
    except RankFailed as error:
        if not pool.alive:
            raise
        return {"left_out": str(error).splitlines()[0]}
    return {"losses": report.losses, "tokens_per_second": report.tokens_per_second, "seconds": report.seconds}


def train_rank(ctx: RankContext, config: TrainConfig) -> TrainReport:
    """In a rank."""
    group = dist.group.WORLD
    assert group is not None
    return train(config, group)


PARTS: dict[str, Callable[[Place, Clock, Emit], None]] = {
    "contract": contract, "speed": speed, "curve": curve, "latency": latency, "training": training,
}  # fmt: skip
SHARED = ("contract",)  # parts that ranks which share a GPU run


def run(part: str, place: Place, clock: Clock, emit: Emit) -> None:
    """A part, or why it does not run at this place."""
    if place.shared and part not in SHARED:
        why = f"{place.ranks} ranks share {place.gpus} GPUs: NCCL refuses that, and times would not be those of links"
        emit({"dispatcher": "everybody", "left_out": why})
        return
    try:
        PARTS[part](place, clock, emit)
    except Unavailable as error:
        emit({"dispatcher": "everybody", "left_out": str(error)})


def main(part: str, device: str, ranks: str, gpus: str, seconds: str, path: str) -> None:
    def emit(found: dict[str, Any]) -> None:
        with Path(path).open("a") as file:
            file.write(json.dumps(found, allow_nan=False) + "\n")

    signal.signal(signal.SIGTERM, lambda *_: sys.exit("cut"))  # an exception: pools and daemons are closed
    run(part, Place(device, int(ranks), int(gpus)), Clock(EARLY * float(seconds)), emit)


if __name__ == "__main__":
    main(*sys.argv[1:])
