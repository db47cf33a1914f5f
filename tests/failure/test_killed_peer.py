"""A GPU process that is killed: the other one hears of it in time and by name, and goes on."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch

import flexep
from flexep.errors import Timeout
from tests.failure.ranks import DYING, Crew, Rank, Tried
from tests.failure.scenarios import TIMEOUT, VICTIM

SHAPE = {"num_experts": 5, "hidden": 1024, "top_k": 3, "max_tokens": 512, "backend": "deepep"}


def on_gpu(me: Rank, gpus: int, generation: int, size: int) -> flexep.Group:
    os.environ["FLEXEP_PEER"] = "1"
    device = torch.device("cuda", me.rank * gpus // me.size)
    torch.cuda.set_device(device)
    return flexep.Group.from_store(me.store, me.rank, size, generation, device)


def rounds(ep: flexep.Dispatcher, device: torch.device, count: int) -> None:
    x = torch.ones(512, 1024, dtype=torch.bfloat16, device=device)
    idx = torch.arange(512 * 3, device=device).view(512, 3) % 5
    for _ in range(count):
        r = ep.dispatch(x, idx)
        z = ep.combine(r.x, r.handle)
    ep.check()
    assert bool((z == 3).all())


def outlives(me: Rank, gpus: int, asleep: bool, ahead: bool) -> tuple[Tried, Tried]:
    """Rank VICTIM is killed in the middle of rounds, or while the other waits for it. The other goes on alone."""
    group = on_gpu(me, gpus, 100, me.size)
    ep = flexep.Dispatcher(group, timeout=TIMEOUT, send_ahead=ahead, **SHAPE)
    rounds(ep, group.device, 3)
    group.barrier()
    if me.rank == VICTIM:
        me.die_in(0.3)
        if asleep:
            time.sleep(60)
    tried = me.attempt(lambda: rounds(ep, group.device, 1_000_000))
    ep.destroy()
    alone = on_gpu(me, gpus, 101, 1)

    def again() -> None:
        with flexep.Dispatcher(alone, timeout=TIMEOUT, **SHAPE) as one:
            rounds(one, alone.device, 3)

    return tried, me.attempt(again)


@pytest.mark.parametrize("ahead", [False, True], ids=["pulled", "ahead"])
@pytest.mark.parametrize("asleep", [False, True], ids=["in its rounds", "not coming"])
@pytest.mark.parametrize(
    "gpus", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=pytest.mark.multigpu)]
)
def test_a_killed_process_is_named_by_the_other(gpus: int, asleep: bool, ahead: bool) -> None:
    """On one GPU without MPS, which does not outlive the end of a client in the middle of its work."""
    with Crew(2, outlives, gpus, asleep, ahead) as crew:
        died = crew.heard(VICTIM, DYING)
        tried, again = crew.value(1 - VICTIM)
        assert crew.exit_code(VICTIM) == -signal.SIGKILL
    assert isinstance(tried.error, Timeout), tried.error
    assert (tried.error.waiting_rank, tried.error.awaited_ranks) == (1 - VICTIM, (VICTIM,))
    assert tried.error.word
    assert tried.ended - died <= 1.5 * TIMEOUT + 1.0  # on one GPU each waits for its slice of time too
    assert again.error is None
