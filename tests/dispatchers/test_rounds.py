"""The long GPU tests (tests/gpu/rounds.py) on CPU processes: few rounds, but a planted bug must be seen."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from tests.gpu import rounds
from tests.mutants.plants import planted

R = 4


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(R, timeout=120) as ranks:
        yield ranks


@pytest.mark.parametrize(("backend", "domain_size"), [("deepep", None), ("hybridep", 2)])
def test_many_rounds_with_changing_routing(pool: RankPool, backend: str, domain_size: int | None) -> None:
    assert pool.run(rounds.soak, backend, domain_size, 60, 5) == [0] * R


@pytest.mark.parametrize("ahead", [False, True])
def test_rounds_of_two_sizes_in_any_order(pool: RankPool, ahead: bool) -> None:
    assert pool.run(rounds.interleaved_graphs, "deepep", 40, 6, ahead) == [0] * R


def soak_with_plant(ctx: RankContext, plant: str) -> int:
    with planted(plant):
        return rounds.soak(ctx, "deepep", None, 10, 7)


def test_a_wrong_row_is_counted(pool: RankPool) -> None:
    assert any(pool.run(soak_with_plant, "deepep: row of the next token"))
