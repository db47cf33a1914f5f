"""A rank that is late, killed, wrong or gone: the others know in time and by name, and go on without it."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from flexep.errors import ArgumentError, CollectiveMismatch, PeerLost, PeerRefused, Timeout
from tests.failure import scenarios
from tests.failure.ranks import DYING, Crew
from tests.failure.scenarios import SETUPS, TIMEOUT, VICTIM, ExpertsFailed, Setup, Survived
from tests.transport.held import Held

COLLECTIVES = ("allgather", "alltoall")  # they may know no more than that a peer is gone
LIMIT = 1.5 * TIMEOUT
REBUILDS = {"deepep": 1000}  # of the others fewer: hybridep has its windows, a process group is slow to make

every_setup = pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.backend)
Start = Callable[..., Crew]


def living(setup: Setup) -> list[int]:
    return [rank for rank in range(setup.ranks) if rank != VICTIM]


def assert_survived(values: dict[int, Survived], since: float | None = None) -> None:
    """Every rank knew in time, from `since` or from its call if that came later, and went on without a mistake."""
    for rank, (tried, wrong) in values.items():
        assert isinstance(tried.error, (Timeout, PeerLost)), f"rank {rank}: {tried.error!r}"
        seconds = tried.ended - max(since or 0.0, tried.began)
        assert seconds <= LIMIT, f"rank {rank} took {seconds:.2f} s: {tried.error!r}"
        assert wrong == []


def assert_names_victim(setup: Setup, values: dict[int, Survived]) -> None:
    """Ranks that wait over a window say in which operation, for which word and for whom.

    The first to give up waited for the victim, or over domains for a relay that did.
    """
    if setup.backend in COLLECTIVES:
        return
    errors = [tried.error for tried, _ in sorted(values.values(), key=lambda value: value[0].ended)]
    for error in errors:
        assert isinstance(error, Timeout), errors
        assert error.op, error
        assert error.word, error
        assert error.epoch is not None, error
        assert error.epoch > 0, error
        assert len(error.awaited_ranks) == 1, error
    if setup.domain_size is None:
        assert errors[0].awaited_ranks == (VICTIM,), errors


# -- a rank that is not there


def test_a_rank_that_never_constructs(start: Start) -> None:
    """Ranks agree through the group, whatever the dispatcher."""
    values = start(scenarios.misses_construction, SETUPS[0]).values(but=VICTIM)
    assert_survived(values)
    for tried, _ in values.values():
        assert isinstance(tried.error, Timeout)
        assert tried.error.awaited_ranks == (VICTIM,)


@every_setup
def test_a_rank_that_never_calls(start: Start, setup: Setup) -> None:
    crew = start(scenarios.misses_dispatch, setup)
    values = crew.values(but=VICTIM)
    assert_survived(values)
    assert_names_victim(setup, values)
    crew.value(VICTIM)


@every_setup
def test_a_rank_that_is_late_but_comes(start: Start, setup: Setup) -> None:
    assert start(scenarios.arrives_late, setup).values() == dict.fromkeys(range(setup.ranks), True)


# -- a rank that is killed


@every_setup
@pytest.mark.parametrize(
    ("scenario", "args"),
    [
        (scenarios.dies_while_it_waits, ()),
        (scenarios.dies_before_its_rows, ("deliver",)),
        (scenarios.dies_in_its_experts, ()),
        (scenarios.dies_before_its_rows, ("collect",)),
    ],
    ids=["waiting in dispatch", "before rows of dispatch", "in the experts", "before rows of combine"],
)
def test_a_rank_that_is_killed(start: Start, setup: Setup, scenario, args: tuple) -> None:
    crew = start(scenario, setup, *args)
    killed = crew.heard(VICTIM, DYING)
    values = crew.values(but=VICTIM)
    assert crew.exit_code(VICTIM) == -signal.SIGKILL
    assert_survived(values, killed)
    assert_names_victim(setup, values)


@every_setup
@pytest.mark.parametrize("seed", range(2))
def test_a_rank_that_is_killed_at_any_moment(start: Start, setup: Setup, seed: int) -> None:
    crew = start(scenarios.rounds_without_end, setup)
    for rank in range(setup.ranks):
        crew.heard(rank, "running")
    time.sleep(0.1 + 0.2 * random.Random(f"{setup.backend}/{seed}").random())
    killed = crew.kill(VICTIM)
    values = crew.values(but=VICTIM)
    assert_survived(values, killed)
    assert_names_victim(setup, values)


# -- a rank that makes a mistake


@every_setup
def test_a_rank_that_passes_other_shapes(start: Start, setup: Setup) -> None:
    for rank, (built, called, after) in start(scenarios.passes_other_shapes, setup).values().items():
        assert isinstance(built.error, CollectiveMismatch)
        assert built.error.differences["hidden"] == {"16": living(setup), "32": [VICTIM]}
        assert isinstance(called.error, ArgumentError if rank == VICTIM else PeerRefused)
        assert max(built.ended - built.began, called.ended - called.began) < TIMEOUT
        assert after


@every_setup
def test_a_rank_that_raises_in_its_experts(start: Start, setup: Setup) -> None:
    values = start(scenarios.raises_in_its_experts, setup).values()
    tried, wrong = values.pop(VICTIM)
    assert isinstance(tried.error, ExpertsFailed)
    assert wrong == []
    assert_survived(values)


@every_setup
def test_a_rank_that_skips_a_combine(start: Start, setup: Setup) -> None:
    for tried, wrong in start(scenarios.skips_a_combine, setup).values().values():
        assert isinstance(tried.error, CollectiveMismatch), tried.error
        assert tried.error.differences == {"call": {"combine": living(setup), "dispatch": [VICTIM]}}
        assert tried.ended - tried.began <= LIMIT
        assert wrong == []


# -- nothing is left


def assert_flat(before: Held, after: Held) -> None:
    assert after.descriptors <= before.descriptors
    assert after.mappings <= before.mappings + 4  # the C library may map a heap of its own
    assert after.resident <= before.resident + (8 << 20)


@every_setup
def test_rebuilding_leaks_nothing(start: Start, setup: Setup) -> None:
    crew = start(scenarios.rebuilds, setup, REBUILDS.get(setup.backend, 100))
    for before, after in crew.values(seconds=200).values():
        assert_flat(before, after)


@every_setup
def test_rebuilding_in_one_process_leaks_nothing(setup: Setup) -> None:
    assert_flat(*scenarios.rebuilds_locally(setup, REBUILDS.get(setup.backend, 100)))


def test_an_exit_with_live_objects_is_quiet(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.failure.exits", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=200,
    )
    assert (done.returncode, done.stdout) == (0, "")
