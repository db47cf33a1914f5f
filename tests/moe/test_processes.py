"""Router and layer with one process a rank: counts over gloo, padding in both back ends, errors instead of hangs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import flexep
from flexep.testing.pool import RankPool
from tests.moe.layers import BACKENDS, grad_of_z, padding, tokens
from tests.moe.ranks import bad_call, make, two_steps

COUNTS = (20, 0, 15)


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3) as made:
        yield made


@pytest.mark.parametrize("backend", BACKENDS)
def test_processes_do_what_a_local_group_does(pool: RankPool, backend: str) -> None:
    """Bit for bit, but for sums over ranks that only one side takes."""
    each = pool.run(two_steps, backend, COUNTS)
    layer = make(flexep.Group.local(3), backend)
    for _ in range(2):
        layer.zero_grad()
        z = layer(tokens(COUNTS), padding(COUNTS), seq_len=5)
        sum((part * grad_of_z(len(part))).sum() for part in z).backward()
        counts_E = layer.router.step_counts
        layer.router.end_step()
    for rank, got in enumerate(each):
        assert torch.equal(got["z"], z[rank])
        assert torch.equal(got["w13"], layer.experts[rank].w13.grad)
        assert torch.equal(got["counts"], counts_E)
        assert torch.equal(got["bias"], layer.router.bias)
    assert layer.router.bias.abs().sum() > 0
    torch.testing.assert_close(
        sum(got["router"] for got in each), layer.router.weight.grad, rtol=1e-5, atol=1e-6
    )
    assert len(layer.router.losses) == 4
    for name, value in layer.router.losses.items():
        torch.testing.assert_close(sum(got["losses"][name] for got in each), value)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("wrong", ["x", "padding_mask", "seq_len"])
def test_one_rank_that_errs_is_named_to_all(pool: RankPool, backend: str, wrong: str) -> None:
    told = pool.run(bad_call, backend, wrong)
    assert told[1].startswith(f"ArgumentError: {wrong}")
    for rank in (0, 2):
        assert told[rank].startswith("PeerRefused")
        assert "rank 1" in told[rank]
