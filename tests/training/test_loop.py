"""Training: any number of ranks follows one rank, back ends agree bit for bit, the loss falls."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from flexep.dispatchers import BACKENDS
from flexep.testing.pool import RankFailed, RankPool
from flexep.training.config import TrainConfig
from flexep.training.loop import LossNotFinite
from tests.training.ranks import first_gradients, losses

FOLLOWS = 2e-5  # nats a byte; measured gaps are below 1e-6, planted bugs (test_mutants.py) above 1e-4
PoolOf = Callable[[int], RankPool]

# Five sequences and six experts: neither divides by three or four ranks.
SMALL = TrainConfig(
    dispatcher="alltoall", steps=8, hidden=64, inner=64, layers=2, experts=6, top_k=2, seq=32, batch=5, seed=3
)


def run(pool_of: PoolOf, ranks: int, **changes: object) -> list[float]:
    """The loss curve, after a check that all ranks saw the same one."""
    config = dataclasses.replace(SMALL, ranks=ranks, **changes)
    curves = pool_of(ranks).run(losses, config)
    assert all(curve == curves[0] for curve in curves)
    return curves[0]


@pytest.fixture(scope="module")
def one_rank(pool_of: PoolOf) -> list[float]:
    return run(pool_of, 1)


@pytest.mark.parametrize("ranks", [3, 4])
def test_ranks_follow_one_rank_and_back_ends_agree(
    pool_of: PoolOf, one_rank: list[float], ranks: int
) -> None:
    alltoall = run(pool_of, ranks)
    for name in BACKENDS:
        assert run(pool_of, ranks, dispatcher=name) == alltoall, name
    assert len(alltoall) == SMALL.steps
    assert alltoall == pytest.approx(one_rank, abs=FOLLOWS)


def test_back_ends_agree_over_domains(pool_of: PoolOf) -> None:
    """Four ranks as 2x2, in bf16, where the nested sum is other bits than the flat one."""
    more = {"steps": 3, "dtype": "bfloat16", "top_k": 4}  # terms enough for the order to matter
    found = {name: run(pool_of, 4, domain_size=2, dispatcher=name, **more) for name in BACKENDS}
    assert len(set(map(tuple, found.values()))) == 1, found
    assert found["alltoall"] != run(pool_of, 4, **more)


def test_the_loss_falls(one_rank: list[float]) -> None:
    assert 5.0 < one_rank[0] < 6.5
    assert one_rank[-1] < one_rank[0] - 0.5


def test_same_seed_same_run_other_seed_other_run(pool_of: PoolOf, one_rank: list[float]) -> None:
    assert run(pool_of, 1) == one_rank
    assert run(pool_of, 1, seed=4, steps=1) != one_rank[:1]


def test_ranks_without_tokens_or_experts(pool_of: PoolOf) -> None:
    """Two sequences and two experts on four ranks: two ranks have no token, two no expert."""
    few = {"batch": 2, "experts": 2, "top_k": 1, "steps": 4}
    assert run(pool_of, 4, **few) == pytest.approx(run(pool_of, 1, **few), abs=FOLLOWS)


def test_flat_layout_follows(pool_of: PoolOf, one_rank: list[float]) -> None:
    flat = run(pool_of, 3, layout="flat", steps=4)
    assert flat == pytest.approx(one_rank[:4], abs=FOLLOWS)


def test_gradients_are_those_of_one_rank(pool_of: PoolOf) -> None:
    """Each parameter's gradient after reduction and clipping, experts where they live."""
    (one,) = pool_of(1).run(first_gradients, dataclasses.replace(SMALL, ranks=1))
    each = pool_of(4).run(first_gradients, dataclasses.replace(SMALL, ranks=4))
    seen = set()
    for grads in each:
        for name, grad in grads.items():
            seen.add(name)
            scale = one[name].abs().max().item()
            torch.testing.assert_close(
                grad, one[name], rtol=0, atol=2e-5 * scale + 1e-9, msg=lambda m, n=name: f"{n}: {m}"
            )
    assert seen == one.keys()


def test_a_loss_that_is_not_finite_stops_every_rank(pool_of: PoolOf) -> None:
    with pytest.raises(RankFailed) as failed:
        pool_of(3).run(losses, dataclasses.replace(SMALL, ranks=3, lr=1e30))
    assert set(failed.value.errors) == {0, 1, 2}
    assert all(isinstance(error, LossNotFinite) for error in failed.value.errors.values())
    assert pool_of(3).alive
