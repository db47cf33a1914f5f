"""Indices <-> multihot and routing-map padding: against loops and torch compositions, opcheck, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep.errors import ArgumentError
from flexep.ops import indices_to_multihot, maps, multihot_to_indices, pad_routing_map
from tests.ops import composed_maps
from tests.ops.reference import assert_bits

worlds = given(
    T=st.integers(0, 9), K=st.integers(1, 5), E=st.integers(1, 7), empty=st.sampled_from([0.0, 0.4, 1.0]),
    seed=st.integers(0, 99),
)  # fmt: skip


def make(T: int, K: int, E: int, empty: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, E, (T, K), generator=generator)
    idx = torch.where(torch.rand(T, K, generator=generator) < empty, -1, idx)
    weights = torch.randn(T, K, generator=generator)
    return idx, torch.where(weights > 1, -0.0, weights)


@worlds
def test_indices_to_multihot(T: int, K: int, E: int, empty: float, seed: int) -> None:
    idx, weights = make(T, K, E, empty, seed)
    want_mask, want_probs = torch.zeros(T, E, dtype=torch.bool), torch.zeros(T, E)
    for t in range(T):
        for k in range(K):
            e = int(idx[t, k])
            if e >= 0:
                want_probs[t, e] = want_probs[t, e] + weights[t, k] if want_mask[t, e] else weights[t, k]
                want_mask[t, e] = True
    for given_idx in (idx, idx.int()):
        mask, probs = indices_to_multihot(given_idx, weights, num_experts=E)
        assert torch.equal(mask, want_mask)
        assert probs is not None
        assert_bits(probs, want_probs)
    assert indices_to_multihot(idx, num_experts=E)[1] is None
    assert torch.equal(composed_maps.multihot_mask(idx, E), want_mask)
    assert_bits(composed_maps.multihot_probs(idx, weights, E), want_probs)


@worlds
def test_multihot_to_indices(T: int, K: int, E: int, empty: float, seed: int) -> None:
    mask = torch.rand(T, E, generator=torch.Generator().manual_seed(seed)) >= empty
    probs = torch.randn(T, E)
    rows = [[e for e in range(E) if row[e]] for row in mask.tolist()]
    widest = max(1, *map(len, rows)) if rows else 1
    for top_k in (None, widest, widest + 3):
        idx, weights = multihot_to_indices(mask, probs, top_k=top_k)
        width = top_k or widest
        assert idx.dtype == torch.int32
        assert idx.shape == (T, width)
        assert idx.tolist() == [row + [-1] * (width - len(row)) for row in rows]
        assert weights is not None
        want = [[probs[t, e].item() for e in row] + [0.0] * (width - len(row)) for t, row in enumerate(rows)]
        assert weights.tolist() == want
        assert_bits(composed_maps.mask_indices(mask, width), idx)
        back_mask, back_probs = indices_to_multihot(idx, weights, num_experts=E)
        assert torch.equal(back_mask, mask)
        assert torch.equal(back_probs, probs * mask)
    assert multihot_to_indices(mask)[1] is None


def test_gradients_of_weights() -> None:
    idx, weights = make(6, 4, 5, 0.3, 0)
    weights.requires_grad_()
    up = torch.randn(6, 5)
    (got,) = torch.autograd.grad(indices_to_multihot(idx, weights, num_experts=5)[1], weights, up)
    want = torch.where(idx >= 0, up.gather(1, idx.clamp(min=0)), 0.0)
    assert torch.equal(got, want)
    mask, probs = torch.rand(6, 5) < 0.5, torch.rand(6, 5, requires_grad=True)
    ids, taken = multihot_to_indices(mask, probs)
    up = torch.arange(1.0, ids.numel() + 1).view(ids.shape)
    (got,) = torch.autograd.grad(taken, probs, up)
    want = torch.zeros(6, 5)
    for t, row in enumerate(ids.tolist()):
        for k, e in enumerate(row):
            if e >= 0:
                want[t, e] = up[t, k]
    assert torch.equal(got, want)


@pytest.mark.parametrize("multiple", [1, 16, 32, 128, 256])
@pytest.mark.parametrize("T", [0, 1, 15, 16, 100, 128, 257])
def test_pad_routing_map(T: int, multiple: int) -> None:
    mask = torch.rand(T, 9) < torch.tensor([0, 0.01, 0.1, 0.3, 0.5, 0.9, 0.99, 1, 1])
    before = mask.clone()
    out = pad_routing_map(mask, multiple)
    assert torch.equal(mask, before)
    assert out.shape == (-(-T // multiple) * multiple, 9)
    counts = mask.sum(0)
    assert torch.equal(out.sum(0), (counts + multiple - 1) // multiple * multiple)
    assert (out[:T] | ~mask).all()
    added = out.clone()
    added[:T] &= ~mask
    for e in range(9):
        free = [t for t in range(len(out)) if t >= T or not mask[t, e]]
        assert added[:, e].nonzero().flatten().tolist() == free[: int(-counts[e] % multiple)]
    assert torch.equal(composed_maps.pad_mask(mask, multiple), out)


def test_a_column_view_and_a_transposed_mask() -> None:
    mask = (torch.rand(8, 6) < 0.5).t()
    assert torch.equal(pad_routing_map(mask, 4), pad_routing_map(mask.contiguous(), 4))
    assert torch.equal(multihot_to_indices(mask)[0], multihot_to_indices(mask.contiguous())[0])
    idx, weights = make(5, 6, 4, 0.2, 3)
    got = indices_to_multihot(idx[:, ::2], weights[:, ::2], num_experts=4)
    want = indices_to_multihot(idx[:, ::2].contiguous(), weights[:, ::2].contiguous(), num_experts=4)
    assert torch.equal(got[0], want[0])
    assert torch.equal(got[1], want[1])


def test_opcheck() -> None:
    idx, weights = make(5, 3, 4, 0.3, 0)
    mask, probs = torch.rand(5, 4) < 0.5, torch.rand(5, 4, requires_grad=True)
    torch.library.opcheck(maps.multihot_mask, (idx, 4))
    torch.library.opcheck(maps.multihot_probs, (idx, weights.requires_grad_(), 4))
    torch.library.opcheck(maps.mask_indices, (mask, None))
    torch.library.opcheck(maps.mask_indices, (mask, 4))
    torch.library.opcheck(maps.mask_weights, (probs, multihot_to_indices(mask)[0]))
    torch.library.opcheck(maps.pad_mask, (mask, 4))


def test_refusals() -> None:
    idx, weights = make(5, 3, 4, 0, 0)
    mask, probs = torch.ones(5, 4, dtype=torch.bool), torch.rand(5, 4)
    nan = torch.tensor(float("nan"))
    for argument, call in (
        ("topk_idx", lambda: indices_to_multihot(idx.float(), num_experts=4)),
        ("topk_idx", lambda: indices_to_multihot(idx[0], num_experts=4)),
        ("topk_idx", lambda: indices_to_multihot(torch.full((2, 2), 4), num_experts=4)),
        ("topk_idx", lambda: indices_to_multihot(torch.full((2, 2), -2, dtype=torch.int32), num_experts=4)),
        ("num_experts", lambda: indices_to_multihot(idx, num_experts=0)),
        ("weights", lambda: indices_to_multihot(idx, weights[:, :2], num_experts=4)),
        ("weights", lambda: indices_to_multihot(idx, weights.double(), num_experts=4)),
        ("weights", lambda: indices_to_multihot(idx, weights * nan, num_experts=4)),
        ("mask", lambda: multihot_to_indices(mask.int())),
        ("mask", lambda: multihot_to_indices(mask[0])),
        ("top_k", lambda: multihot_to_indices(mask, top_k=3)),
        ("top_k", lambda: multihot_to_indices(mask, top_k=0)),
        ("probs", lambda: multihot_to_indices(mask, probs.half())),
        ("probs", lambda: multihot_to_indices(mask, probs[:3])),
        ("probs", lambda: multihot_to_indices(mask, probs * nan)),
        ("routing_map", lambda: pad_routing_map(idx, 16)),
        ("routing_map", lambda: pad_routing_map(mask[0], 16)),
        ("multiple", lambda: pad_routing_map(mask, 0)),
        ("multiple", lambda: pad_routing_map(mask, 2**31)),
        ("multiple", lambda: pad_routing_map(torch.ones(5, 4, dtype=torch.bool), 2**63)),
        ("routing_map", lambda: pad_routing_map(mask.tolist(), 4)),
        ("routing_map", lambda: pad_routing_map(mask.to_sparse(), 4)),
        ("num_experts", lambda: indices_to_multihot(idx, num_experts=2**31)),
        ("num_experts", lambda: indices_to_multihot(idx, num_experts=2**63)),
        ("topk_idx", lambda: indices_to_multihot(idx.tolist(), num_experts=4)),
        ("weights", lambda: indices_to_multihot(idx, weights.tolist(), num_experts=4)),
        ("weights", lambda: indices_to_multihot(idx, weights.to("meta"), num_experts=4)),
        ("top_k", lambda: multihot_to_indices(mask, top_k=2**31)),
        ("top_k", lambda: multihot_to_indices(mask, top_k=2**31 - 1)),
        ("mask", lambda: multihot_to_indices(mask.tolist())),
        ("mask", lambda: multihot_to_indices(mask.to_sparse())),
        ("probs", lambda: multihot_to_indices(mask, torch.rand(5, 5))),
        ("probs", lambda: multihot_to_indices(mask, probs[:, :2])),
        ("probs", lambda: multihot_to_indices(mask, probs[0])),
        ("probs", lambda: multihot_to_indices(mask, probs.to("meta"))),
        ("probs", lambda: multihot_to_indices(mask, probs.to_sparse())),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
