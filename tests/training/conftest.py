"""Rank pools by size, started at first use and kept for the session."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from flexep.testing.pool import RankPool


@pytest.fixture(scope="session")
def pool_of() -> Iterator[Callable[[int], RankPool]]:
    pools: dict[int, RankPool] = {}

    def get(size: int) -> RankPool:
        if size not in pools:
            pools[size] = RankPool(size)
        return pools[size]

    yield get
    for pool in pools.values():
        pool.close()
