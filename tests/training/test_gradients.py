"""Gradients over three ranks: copies summed, experts untouched, every parameter in the norm once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from flexep.testing.pool import RankPool
from tests.training.ranks import reduce_and_clip

COPIED = [[1.0, 0.0], [2.0, 0.0], [0.0, 4.0]]  # adds up to [3, 4]
OWNED = [[[6.0]], [], [[0.0, 8.0], [0.0]]]  # a rank may own no expert
NORM = (3**2 + 4**2 + 6**2 + 8**2) ** 0.5


@pytest.mark.parametrize("max_norm", [1.0, 1e6])
def test_sum_and_norm(pool_of: Callable[[int], RankPool], max_norm: float) -> None:
    each = pool_of(3).run_each(
        reduce_and_clip, [(c, o, max_norm) for c, o in zip(COPIED, OWNED, strict=True)]
    )
    scale = min(1.0, max_norm / NORM)
    for rank, got in enumerate(each):
        assert got["loss"] == 6.0
        assert got["summed"] == [3.0, 4.0]
        assert got["norm"] == pytest.approx(NORM, rel=1e-6)
        assert got["copied"] == pytest.approx([3 * scale, 4 * scale], rel=1e-5)
        assert got["owned"] == [pytest.approx([v * scale for v in grad], rel=1e-5) for grad in OWNED[rank]]
