"""What ranks do while one of them fails. Every scenario runs on all ranks; VICTIM is the one that fails.

Those that live return what their call came to, and what differs from the oracle once they have regrouped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch

import flexep
from flexep.testing.case import Case
from flexep.testing.check import check_case
from tests.contract.rounds import GOOD, inputs, works
from tests.failure.ranks import Rank, Tried
from tests.transport.held import Held, held

R, VICTIM = 3, 1
TIMEOUT = 2.0  # seconds; every living rank must know within 1.5 times that
Survived = tuple[Tried, list[str]]


def make(me: Rank, backend: str, **changes: Any) -> flexep.Dispatcher:
    return flexep.Dispatcher(me.group, backend=backend, **GOOD | {"timeout": TIMEOUT} | changes)


def one_round(ep: flexep.Dispatcher, experts: Callable[[], None] = lambda: None) -> None:
    r = ep.dispatch(**inputs())
    experts()
    ep.combine(r.x, r.handle)


def after(me: Rank, backend: str, *lost: int) -> list[str]:
    """What the ranks that are left get wrong with a new dispatcher on a new group, against the oracle."""
    us = me.regroup(lost)
    case = Case(us.size, 5, 16, 2, 7, spread="ragged", dispatcher=backend, cached=1)
    found = [f"{m.what}: {m.detail}" for m in check_case(case, us.group)]
    us.group.barrier()
    us.group.close()
    return found


def survive(me: Rank, backend: str, ep: flexep.Dispatcher, call: Callable[[], Any], *lost: int) -> Survived:
    tried = me.attempt(call)
    ep.destroy()
    ep.destroy()
    me.group.close()
    return tried, after(me, backend, *lost)


# -- a rank that is not there


def misses_construction(me: Rank, backend: str) -> Survived | None:
    if me.rank == VICTIM:
        return None
    tried = me.attempt(lambda: make(me, backend))
    me.group.close()
    return tried, after(me, backend, VICTIM)


def misses_dispatch(me: Rank, backend: str) -> Survived | None:
    ep = make(me, backend)
    one_round(ep)
    if me.rank != VICTIM:
        return survive(me, backend, ep, lambda: one_round(ep))
    assert after(me, backend) == []  # it lives, holds its dispatcher, and comes when all regroup
    ep.destroy()
    return None


def arrives_late(me: Rank, backend: str) -> bool:
    def sleep() -> None:
        if me.rank == VICTIM:
            time.sleep(TIMEOUT / 2)

    with make(me, backend) as ep:
        sleep()
        one_round(ep, sleep)
        return works(ep)


# -- a rank that is killed


def dies_while_it_waits(me: Rank, backend: str) -> Survived:
    """In dispatch, which cannot have ended: the last rank has not come yet."""
    ep = make(me, backend)
    one_round(ep)
    if me.rank == VICTIM:
        me.die_in(0.3)
    if me.rank == R - 1:
        time.sleep(0.8)
    return survive(me, backend, ep, lambda: one_round(ep), VICTIM)


def dies_before_its_rows(me: Rank, backend: str, verb: str) -> Survived:
    """In dispatch ("deliver") or combine ("collect"), when the ranks have agreed and its rows are awaited."""
    ep = make(me, backend)
    one_round(ep)
    if me.rank == VICTIM:
        setattr(flexep.BACKENDS[backend], verb, me.die)
    return survive(me, backend, ep, lambda: one_round(ep), VICTIM)


def dies_in_its_experts(me: Rank, backend: str) -> Survived:
    """Between dispatch and combine."""
    ep = make(me, backend)
    one_round(ep)
    die = me.die if me.rank == VICTIM else lambda: None
    return survive(me, backend, ep, lambda: one_round(ep, die), VICTIM)


def rounds_without_end(me: Rank, backend: str) -> Survived:
    """Of many rows, so that most of the time some are under way; the test kills VICTIM."""
    size = {"hidden": 512, "max_tokens": 512, "top_k": 4}
    ep = make(me, backend, **size)
    x = torch.ones(512, 512, dtype=torch.bfloat16)
    topk_idx = torch.arange(512 * 4).view(512, 4) % GOOD["num_experts"]

    def rounds() -> None:
        while True:
            r = ep.dispatch(x, topk_idx)
            ep.combine(r.x, r.handle)

    me.say("running")
    return survive(me, backend, ep, rounds, VICTIM)


# -- a rank that makes a mistake


def passes_other_shapes(me: Rank, backend: str) -> tuple[Tried, Tried, bool]:
    odd = me.rank == VICTIM
    built = me.attempt(lambda: make(me, backend, hidden=32 if odd else 16))
    with make(me, backend) as ep:
        args = inputs()
        if odd:
            args["x"] = args["x"][:, :8].contiguous()
        return built, me.attempt(lambda: ep.dispatch(**args)), works(ep)


class ExpertsFailed(Exception):
    """What an expert raises here."""


def fail() -> None:
    raise ExpertsFailed


def raises_in_its_experts(me: Rank, backend: str) -> Survived:
    """And leaves its dispatcher by the exception."""
    ep = make(me, backend)
    one_round(ep)

    def call() -> None:
        with ep:
            one_round(ep, fail if me.rank == VICTIM else lambda: None)

    return survive(me, backend, ep, call)


def skips_a_combine(me: Rank, backend: str) -> Survived:
    """An exception between dispatch and combine, caught; the rank goes on with its next step."""
    ep = make(me, backend)

    def step() -> None:
        try:
            one_round(ep, fail if me.rank == VICTIM else lambda: None)
        except ExpertsFailed:
            one_round(ep)

    return survive(me, backend, ep, step)


# -- nothing is left


def rebuilds(me: Rank, backend: str, times: int) -> tuple[Held, Held]:
    """What the process holds once things have warmed up, and after `times` more dispatchers."""
    return _build(lambda: make(me, backend), inputs(), times)


def rebuilds_locally(backend: str, times: int) -> tuple[Held, Held]:
    """The same where one process plays all ranks."""
    group = flexep.Group.local(R)
    lists = {name: [value] * R for name, value in inputs().items()}
    return _build(lambda: flexep.Dispatcher(group, backend=backend, **GOOD), lists, times)


def _build(new: Callable[[], flexep.Dispatcher], args: dict[str, Any], times: int) -> tuple[Held, Held]:
    def build(count: int) -> Held:
        for _ in range(count):
            ep = new()
            r = ep.dispatch(**args)
            one = not isinstance(r, list)
            ep.combine(
                r.x if one else [each.x for each in r], r.handle if one else [each.handle for each in r]
            )
            ep.destroy()
            ep.destroy()
            del ep, r
        return held()

    return build(max(20, times // 10)), build(times)
