"""Two GPUs follow one, with NCCL and either back end."""

from __future__ import annotations

import dataclasses

import pytest

import flexep
from flexep.testing.pool import RankPool
from flexep.training.config import TrainConfig
from tests.training.ranks import losses, repeatable_losses

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


@pytest.mark.timeout(300)
def test_dispatchers_train_alike() -> None:
    """To the bit, where all else that a GPU computes has one order."""
    config = TrainConfig(
        device="cuda", ranks=2, dispatcher="alltoall", dtype="bfloat16", steps=12, hidden=512, inner=512, experts=16,
        top_k=4, seq=256, batch=8,
    )  # fmt: skip
    with RankPool(2, "cuda", environment={"FLEXEP_PEER": "1", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}) as pool:
        found = {
            name: pool.run(repeatable_losses, dataclasses.replace(config, dispatcher=name), timeout=120.0)[0]
            for name in flexep.BACKENDS
        }
    assert len(set(map(tuple, found.values()))) == 1, found
