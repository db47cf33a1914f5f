"""Two GPUs follow one, with NCCL and either back end."""

from __future__ import annotations

import dataclasses

import pytest

from flexep.testing.pool import RankPool
from flexep.training.config import TrainConfig
from tests.training.ranks import losses

pytestmark = pytest.mark.multigpu


@pytest.mark.parametrize(("dtype", "follows"), [("float32", 1e-3), ("bfloat16", 5e-2)])
def test_two_gpus_follow_one(dtype: str, follows: float) -> None:
    """Attention's backward adds in no fixed order on a GPU, so curves are near each other, not equal."""
    config = TrainConfig(device="cuda", dispatcher="alltoall", dtype=dtype, steps=20, experts=7)
    with RankPool(1, "cuda") as pool:
        one = pool.run(losses, config)[0]
    with RankPool(2, "cuda") as pool:
        for name in ("alltoall", "allgather"):
            two = pool.run(losses, dataclasses.replace(config, ranks=2, dispatcher=name))
            assert two[0] == two[1]
            assert two[0] == pytest.approx(one, abs=follows)
