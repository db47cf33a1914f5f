"""Bugs planted in the gradients over ranks move the loss curve further than the tests of the loop allow."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from flexep.cli.demo import largest_gap
from flexep.testing.pool import RankPool
from tests.training.ranks import MUTANTS, losses, mutant_losses
from tests.training.test_loop import FOLLOWS, SMALL


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_seen(pool_of: Callable[[int], RankPool], mutant: str) -> None:
    one = pool_of(1).run(losses, dataclasses.replace(SMALL, ranks=1))[0]
    three = pool_of(3).run(mutant_losses, dataclasses.replace(SMALL, ranks=3), mutant)[0]
    assert largest_gap(three, one) > 4 * FOLLOWS
