"""What ranks do while one of them fails. Every scenario runs on all ranks; VICTIM is the one that fails.

Those that live return what their call came to, and what differs from the oracle once they have regrouped.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

import flexep
from flexep.testing.case import Case
from flexep.testing.check import check_case
from tests.contract.rounds import GOOD, inputs, works
from tests.failure.ranks import Rank, Tried
from tests.transport.held import Held, held

VICTIM = 1
TIMEOUT = 2.0  # seconds; every living rank must know within 1.5 times that
Survived = tuple[Tried, list[str]]


@dataclass(frozen=True)
class Setup:
    """A dispatcher and the ranks it is tried on."""

    backend: str
    ranks: int = 3
    domain_size: int | None = None


# Over two domains, so that VICTIM may be a relay that others wait for too.
SETUPS = [Setup(name, 4, 2) if name == "hybridep" else Setup(name) for name in flexep.BACKENDS]


def make(group: flexep.Group, setup: Setup, **changes: Any) -> flexep.Dispatcher:
    args = GOOD | {"timeout": TIMEOUT, "domain_size": setup.domain_size} | changes
    return flexep.Dispatcher(group, backend=setup.backend, **args)


def one_round(ep: flexep.Dispatcher, experts: Callable[[], None] = lambda: None) -> None:
    r = ep.dispatch(**inputs())
    experts()
    ep.combine(r.x, r.handle)


def after(me: Rank, setup: Setup, *lost: int) -> list[str]:
    """What the ranks that are left get wrong with a new dispatcher on a new group, against the oracle."""
    us = me.regroup(lost)
    case = Case(us.size, 5, 16, 2, 7, spread="ragged", dispatcher=setup.backend, cached=1)
    if setup.domain_size is not None and us.size % setup.domain_size == 0:
        case = replace(case, domain_size=setup.domain_size)
    found = [f"{m.what}: {m.detail}" for m in check_case(case, us.group)]
    us.group.barrier()
    us.group.close()
    return found


def survive(me: Rank, setup: Setup, ep: flexep.Dispatcher, call: Callable[[], Any], *lost: int) -> Survived:
    tried = me.attempt(call)
    ep.destroy()
    ep.destroy()
    me.group.close()
    return tried, after(me, setup, *lost)


# -- a rank that is not there


def misses_construction(me: Rank, setup: Setup) -> Survived | None:
    if me.rank == VICTIM:
        return None
    tried = me.attempt(lambda: make(me.group, setup))
    me.group.close()
    return tried, after(me, setup, VICTIM)


def misses_dispatch(me: Rank, setup: Setup) -> Survived | None:
    ep = make(me.group, setup)
    one_round(ep)
    if me.rank != VICTIM:
        return survive(me, setup, ep, lambda: one_round(ep))
    assert after(me, setup) == []  # it lives, holds its dispatcher, and comes when all regroup
    ep.destroy()
    return None


def arrives_late(me: Rank, setup: Setup) -> bool:
    def sleep() -> None:
        if me.rank == VICTIM:
            time.sleep(TIMEOUT / 4)

    with make(me.group, setup) as ep:
        sleep()
        one_round(ep, sleep)
        return works(ep)


# -- a rank that is killed


def dies_while_it_waits(me: Rank, setup: Setup) -> Survived:
    """In dispatch, which cannot have ended: the last rank has not come yet."""
    ep = make(me.group, setup)
    one_round(ep)
    if me.rank == VICTIM:
        me.die_in(0.3)
    if me.rank == me.size - 1:
        time.sleep(0.8)
    return survive(me, setup, ep, lambda: one_round(ep), VICTIM)


def dies_before_its_rows(me: Rank, setup: Setup, verb: str) -> Survived:
    """In dispatch ("deliver") or combine ("collect"), when the ranks have agreed and its rows are awaited."""
    ep = make(me.group, setup)
    one_round(ep)
    if me.rank == VICTIM:
        setattr(flexep.BACKENDS[setup.backend], verb, me.die)
    return survive(me, setup, ep, lambda: one_round(ep), VICTIM)


def dies_in_its_experts(me: Rank, setup: Setup) -> Survived:
    """Between dispatch and combine."""
    ep = make(me.group, setup)
    one_round(ep)
    die = me.die if me.rank == VICTIM else lambda: None
    return survive(me, setup, ep, lambda: one_round(ep, die), VICTIM)


def rounds_without_end(me: Rank, setup: Setup) -> Survived:
    """Of many rows, so that most of the time some are under way; the test kills VICTIM."""
    size = {"hidden": 512, "max_tokens": 512, "top_k": 4}
    ep = make(me.group, setup, **size)
    x = torch.ones(512, 512, dtype=torch.bfloat16)
    topk_idx = torch.arange(512 * 4).view(512, 4) % GOOD["num_experts"]

    def rounds() -> None:
        while True:
            r = ep.dispatch(x, topk_idx)
            ep.combine(r.x, r.handle)

    me.say("running")
    return survive(me, setup, ep, rounds, VICTIM)


# -- a rank that makes a mistake


def passes_other_shapes(me: Rank, setup: Setup) -> tuple[Tried, Tried, bool]:
    odd = me.rank == VICTIM
    built = me.attempt(lambda: make(me.group, setup, hidden=32 if odd else 16))
    with make(me.group, setup) as ep:
        args = inputs()
        if odd:
            args["x"] = args["x"][:, :8].contiguous()
        return built, me.attempt(lambda: ep.dispatch(**args)), works(ep)


class ExpertsFailed(Exception):
    """What an expert raises here."""


def fail() -> None:
    raise ExpertsFailed


def raises_in_its_experts(me: Rank, setup: Setup) -> Survived:
    """And leaves its dispatcher by the exception."""
    ep = make(me.group, setup)
    one_round(ep)

    def call() -> None:
        with ep:
            one_round(ep, fail if me.rank == VICTIM else lambda: None)

    return survive(me, setup, ep, call)


def skips_a_combine(me: Rank, setup: Setup) -> Survived:
    """An exception between dispatch and combine, caught; the rank goes on with its next step."""
    ep = make(me.group, setup)

    def step() -> None:
        try:
            one_round(ep, fail if me.rank == VICTIM else lambda: None)
        except ExpertsFailed:
            one_round(ep)

    return survive(me, setup, ep, step)


# -- nothing is left


def rebuilds(me: Rank, setup: Setup, times: int) -> tuple[Held, Held]:
    """What the process holds once things have warmed up, and after `times` more dispatchers."""
    return _build(lambda: make(me.group, setup), inputs(), times)


def rebuilds_locally(setup: Setup, times: int) -> tuple[Held, Held]:
    """The same where one process plays all ranks."""
    group = flexep.Group.local(setup.ranks)
    lists = {name: [value] * setup.ranks for name, value in inputs().items()}
    return _build(lambda: make(group, setup), lists, times)


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
