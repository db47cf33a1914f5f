"""A rank pool for the error tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flexep.testing.pool import RankPool
from tests.contract.rounds import R


class Pools:
    """The pool of a test file, made anew after a test that broke it."""

    pool: RankPool | None = None


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    pools = Pools()
    yield pools
    if pools.pool is not None:
        pools.pool.close()


@pytest.fixture
def pool(pools: Pools) -> RankPool:
    if pools.pool is None or not pools.pool.alive:
        pools.pool = RankPool(R, timeout=60)
    return pools.pool
