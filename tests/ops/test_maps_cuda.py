"""Routing maps on CUDA: the CPU's bits, whatever ids lie outside, strides and alignments; no host wait."""

from __future__ import annotations

import pytest
import torch

from flexep.ops import indices_to_multihot, multihot_to_indices, pad_routing_map
from flexep.ops.maps import add_columns, take_columns
from tests.ops import composed_maps
from tests.ops.reference import assert_bits

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


SHAPES = [(0, 3, 5), (1, 1, 1), (130, 5, 9), (300, 8, 64), (257, 6, 257), (4096, 8, 256), (99, 40, 1000)]


@pytest.mark.parametrize(("T", "K", "E"), SHAPES)
def test_indices_to_multihot(T: int, K: int, E: int) -> None:
    idx = torch.randint(-1, E, (T, K))
    idx[:, K // 2] = idx[:, 0]  # an expert named twice
    weights = torch.randn(T, K)
    weights = torch.where(weights > 1, -0.0, weights)
    mask, probs = indices_to_multihot(idx, weights, num_experts=E)
    assert probs is not None
    for given in (idx, idx.int()):
        outside = torch.where(given == -1, E + 1 + given, given)  # E: outside, so empty
        for ids in (given, outside):
            got_mask, got_probs = indices_to_multihot(ids.cuda(), weights.cuda(), num_experts=E)
            assert got_probs is not None
            assert torch.equal(got_mask.cpu(), mask)
            assert_bits(got_probs.cpu(), probs)
        assert torch.equal(indices_to_multihot(given.cuda(), num_experts=E)[0].cpu(), mask)
    assert torch.equal(composed_maps.multihot_mask(idx.cuda(), E).cpu(), mask)
    assert_bits(composed_maps.multihot_probs(idx.cuda(), weights.cuda(), E).cpu(), probs)


@pytest.mark.parametrize("full", [0.0, 0.1, 1.0])
@pytest.mark.parametrize(("T", "K", "E"), SHAPES)
def test_multihot_to_indices(T: int, K: int, E: int, full: float) -> None:
    mask, probs = torch.rand(T, E) < full, torch.randn(T, E)
    widest = max(1, int(mask.sum(1).max())) if T else 1
    for top_k in (None, widest, widest + 40):
        idx, weights = multihot_to_indices(mask, probs, top_k=top_k)
        got_idx, got_weights = multihot_to_indices(mask.cuda(), probs.cuda(), top_k=top_k)
        assert weights is not None
        assert got_weights is not None
        assert torch.equal(got_idx.cpu(), idx)
        assert_bits(got_weights.cpu(), weights)
    first = multihot_to_indices(mask.cuda(), top_k=max(1, widest // 2))[
        0
    ]  # a row that is too wide loses its end
    assert torch.equal(first.cpu(), composed_maps.mask_indices(mask, max(1, widest // 2)))


@pytest.mark.parametrize("multiple", [1, 16, 128, 1000])
@pytest.mark.parametrize(("T", "E"), [(0, 4), (1, 1), (15, 9), (257, 300), (4096, 256), (8192, 64)])
def test_pad_routing_map(T: int, E: int, multiple: int) -> None:
    mask = torch.rand(T, E) < torch.rand(E)
    assert torch.equal(pad_routing_map(mask.cuda(), multiple).cpu(), pad_routing_map(mask, multiple))


def test_views_that_no_vector_fits() -> None:
    mask, probs, idx = torch.rand(65, 33) < 0.3, torch.randn(65, 33), torch.randint(-1, 32, (64, 6))
    weights = torch.randn(65, 9)
    for columns in (slice(1, None), slice(0, 32)):
        want = multihot_to_indices(mask[1:, columns], probs[1:, columns])
        got = multihot_to_indices(mask.cuda()[1:, columns], probs.cuda()[1:, columns])
        assert torch.equal(got[0].cpu(), want[0])
        assert torch.equal(got[1].cpu(), want[1])
    transposed = mask.t()
    assert torch.equal(pad_routing_map(transposed.cuda(), 16).cpu(), pad_routing_map(transposed, 16))
    want = indices_to_multihot(idx[:, ::2], weights[1:, 1::3], num_experts=32)[1]
    got = indices_to_multihot(idx.cuda()[:, ::2], weights.cuda()[1:, 1::3], num_experts=32)[1]
    assert_bits(got.cpu(), want)


def test_gradients_and_nan() -> None:
    idx, up = torch.randint(-1, 50, (70, 8)), torch.randn(70, 50)
    up[3, :] = float("nan")
    assert_bits(take_columns(up.cuda(), idx.cuda()).cpu(), take_columns(up, idx))
    grad = torch.randn(70, 8)
    grad[5, 2] = float("nan")
    assert_bits(add_columns(grad.cuda(), idx.cuda(), 50).cpu(), add_columns(grad, idx, 50))
    weights = torch.randn(70, 8)
    grads = []
    for device in ("cpu", "cuda"):
        leaf = weights.to(device).requires_grad_()
        probs = indices_to_multihot(idx.to(device), leaf, num_experts=50)[1]
        grads.append(torch.autograd.grad(probs, leaf, up.to(device))[0].cpu())
    assert_bits(*grads)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_nothing_waits_for_the_device() -> None:
    torch.use_deterministic_algorithms(False)
    idx, weights, mask = (
        torch.randint(-1, 64, (500, 8)).cuda(),
        torch.randn(500, 8).cuda(),
        torch.rand(500, 64).cuda() < 0.1,
    )
    torch.cuda.set_sync_debug_mode("error")
    try:
        indices_to_multihot(idx, weights, num_experts=64)
        multihot_to_indices(mask, top_k=64)
        pad_routing_map(mask, 128)
    finally:
        torch.cuda.set_sync_debug_mode("default")
