"""permute and unpermute: plan, rows, weights and both backwards against loops; opcheck; compile; refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep._native import rows as native
from flexep.errors import ArgumentError
from flexep.ops import Permuted, permute, permute_rows, unpermute
from tests.ops.reference import assert_bits, loop_gather, loop_permute, loop_reduce

FLOATS = [torch.float32, torch.float16, torch.bfloat16]


def make_routing(T: int, K: int, E: int, seed: int = 0, empty: float = 0.2) -> torch.Tensor:
    """int64 ids with empty slots and duplicates."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, E, (T, K), generator=generator)
    return torch.where(torch.rand(T, K, generator=generator) < empty, -1, idx)


def check_against_loops(
    x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor, E: int, alignment: int, num_rows: int | None
) -> Permuted:
    """Everything permute and unpermute return, bit for bit."""
    K = idx.shape[1]
    p = permute(x, idx, weights, num_experts=E, alignment=alignment, num_rows=num_rows)
    for name, want in loop_permute(idx, E, alignment, num_rows).items():
        got = getattr(p, name)
        assert got.dtype == torch.int32
        assert got.tolist() == want, name
    tokens = torch.tensor([s // K if s >= 0 else -1 for s in p.row_src.tolist()], dtype=torch.int32)
    assert_bits(p.x, loop_gather(x, tokens, None))
    assert p.weights is not None
    assert p.weights.tolist() == [weights.flatten()[s].item() if s >= 0 else 0.0 for s in p.row_src.tolist()]
    y = torch.randn(p.x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype)
    assert_bits(unpermute(y, p), loop_reduce(y, p.row_map, None, x.dtype, True))
    weighted = loop_reduce(y, p.row_map, weights, x.dtype, True)
    assert_bits(unpermute(y, p, p.weights), weighted)
    assert_bits(unpermute(y, p, weights), weighted)
    return p


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", [8, 24, 2880])
@pytest.mark.parametrize(("alignment", "num_rows"), [(1, None), (16, None), (4, 12), (4, 60), (1, 0)])
def test_against_loops(dtype: torch.dtype, hidden: int, alignment: int, num_rows: int | None) -> None:
    x = torch.randn(19, hidden).to(dtype)
    check_against_loops(x, make_routing(19, 3, 5), torch.rand(19, 3), 5, alignment, num_rows)


@given(
    T=st.integers(0, 12),
    K=st.integers(1, 4),
    E=st.integers(1, 6),
    alignment=st.sampled_from([1, 2, 8]),
    num_rows=st.none() | st.integers(0, 80),
    empty=st.sampled_from([0.0, 0.5, 1.0]),
    seed=st.integers(0, 9),
)
def test_any_world(
    T: int, K: int, E: int, alignment: int, num_rows: int | None, empty: float, seed: int
) -> None:
    x = torch.randn(T, 8).bfloat16()
    check_against_loops(x, make_routing(T, K, E, seed, empty), torch.rand(T, K), E, alignment, num_rows)


def gradients(
    route: Callable[..., torch.Tensor], x: torch.Tensor, weights: torch.Tensor, up: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    return torch.autograd.grad(route(x, weights), (x, weights), up)


@pytest.mark.parametrize("where", ["combine", "slots", "inside"])
@pytest.mark.parametrize("num_rows", [None, 24])
def test_gradients_against_fp64(where: str, num_rows: int | None) -> None:
    """Weights at the combine (by row, by slot) or inside the expert, through experts that cannot be confused."""
    T, K, E, H = 21, 3, 4, 16
    idx, x, weights, up = make_routing(T, K, E), torch.randn(T, H), torch.rand(T, K), torch.randn(T, H)
    experts = torch.randn(E, H, H) / 4
    kept = torch.tensor(loop_permute(idx, E, 4, num_rows)["row_map"]) >= 0

    def ours(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        p = permute(x, idx, weights, num_experts=E, alignment=4, num_rows=num_rows)
        expert_of_row = torch.repeat_interleave(torch.arange(E), p.padded_counts)
        rows = torch.bmm(p.x[: len(expert_of_row)].unsqueeze(1), experts[expert_of_row]).squeeze(1)
        rows = torch.nn.functional.pad(rows, (0, 0, 0, p.x.shape[0] - len(expert_of_row)))
        if where == "inside":
            assert p.weights is not None
            return unpermute(rows * p.weights.unsqueeze(1), p)
        return unpermute(rows, p, p.weights if where == "combine" else weights)

    def oracle(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        all_experts = torch.einsum("th,ehi->tei", x, experts.double())
        picked = all_experts.gather(1, idx.clamp(min=0).unsqueeze(-1).expand(T, K, H))
        return (picked * (weights * kept).unsqueeze(-1)).sum(1)

    got = gradients(ours, x, weights, up)
    want = gradients(oracle, x.double(), weights.double(), up.double())
    assert got[1].dtype == torch.float32
    for g, w in zip(got, want, strict=True):
        torch.testing.assert_close(g.double(), w, rtol=1e-5, atol=1e-5)
    assert (got[1][~kept] == 0).all()


@pytest.mark.parametrize("dtype", FLOATS)
def test_backward_recipe_is_the_other_op(dtype: torch.dtype) -> None:
    idx, x, weights = make_routing(17, 4, 6), torch.randn(17, 24).to(dtype), torch.rand(17, 4)
    p = permute(x.requires_grad_(), idx, num_experts=6, alignment=8)
    up = torch.randn(p.x.shape).to(dtype)
    (dx,) = torch.autograd.grad(p.x, x, up)
    assert_bits(dx, loop_reduce(up, p.row_map, None, dtype, True))
    y, dz = torch.randn(p.x.shape).to(dtype).requires_grad_(), torch.randn(17, 24).to(dtype)
    (dy,) = torch.autograd.grad(unpermute(y, p, weights), y, dz)
    rows = torch.tensor([s // 4 if s >= 0 else -1 for s in p.row_src.tolist()], dtype=torch.int32)
    by_row = torch.tensor([weights.flatten()[s] if s >= 0 else 0.0 for s in p.row_src.tolist()])
    assert_bits(dy, loop_gather(dz, rows, by_row))


def test_second_derivatives() -> None:
    idx, x = make_routing(5, 2, 3), torch.randn(5, 8, requires_grad=True)
    p = permute(x, idx, num_experts=3)
    (dx,) = torch.autograd.grad(unpermute(p.x**2, p).sum(), x, create_graph=True)
    (ddx,) = torch.autograd.grad(dx.sum(), x)
    slots = (idx >= 0).sum(1, keepdim=True)
    torch.testing.assert_close(dx, 2 * slots * x)
    assert torch.equal(ddx, (2.0 * slots).expand(5, 8))


@pytest.mark.parametrize("top_k", [None, 4])
def test_a_mask_is_the_same_as_its_ids(top_k: int | None) -> None:
    mask = torch.rand(13, 7) < 0.3
    mask[3], mask[:, 2] = False, False
    mask &= mask.cumsum(1) <= 4
    probs = torch.rand(13, 7).requires_grad_()
    x = torch.randn(13, 16)
    p = permute(x, mask, probs, top_k=top_k, alignment=4)
    width = p.topk_idx.shape[1]
    assert width == (top_k or int(mask.sum(1).max()))
    ids = [[e for e in range(7) if row[e]] for row in mask.tolist()]
    assert p.topk_idx.tolist() == [row + [-1] * (width - len(row)) for row in ids]
    q = permute(x, p.topk_idx, num_experts=7, alignment=4)
    assert torch.equal(p.row_map, q.row_map)
    assert_bits(p.x, q.x)
    up = torch.randn(13, 16)
    (dprobs,) = torch.autograd.grad(unpermute(p.x, p, p.weights), probs, up)
    want = torch.where(mask, (x.double() * up.double()).sum(1, keepdim=True), 0.0)
    torch.testing.assert_close(dprobs.double(), want, rtol=1e-5, atol=1e-5)


def test_strided_rows_and_gradients() -> None:
    x = torch.randn(9, 48)[:, 8:24]
    idx = make_routing(9, 2, 3)
    p = check_against_loops(x, idx, torch.rand(9, 2), 3, 8, None)
    y = torch.randn(p.x.shape[0], 16, requires_grad=True)
    unpermute(y, p).sum().backward()  # the gradient that arrives is one number, expanded
    assert y.grad is not None
    assert torch.equal(y.grad, (p.row_src >= 0).float().unsqueeze(1).expand(-1, 16))


def test_a_weight_of_zero_and_nan_rows() -> None:
    x = torch.zeros(2, 8)
    x[1] = float("nan")
    p = permute(x, torch.tensor([[0, 1], [1, -1]]), torch.tensor([[0.0, 1.0], [0.5, 9.0]]), num_experts=2)
    z = unpermute(p.x, p, p.weights)
    assert z[0].eq(0).all()
    assert z[1].isnan().all()
    assert not p.x[~p.x.isnan().any(1)].isnan().any()


@pytest.mark.parametrize("num_rows", [None, 40])
def test_opcheck(num_rows: int | None) -> None:
    idx, weights = make_routing(6, 3, 4), torch.rand(6, 3, requires_grad=True)
    torch.library.opcheck(permute_rows.plan_permutation, (idx, 4, 4, num_rows))
    torch.library.opcheck(permute_rows.plan_permutation, (idx.int(), 4, 4, num_rows))
    p = permute(torch.randn(6, 8), idx, num_experts=4, alignment=4, num_rows=num_rows)
    x, y = torch.randn(6, 8, requires_grad=True), torch.randn(p.x.shape, requires_grad=True)
    for w in (None, weights):
        torch.library.opcheck(permute_rows.permute_rows, (x, p.row_map, p.row_src, w))
        torch.library.opcheck(permute_rows.unpermute_rows, (y, p.row_map, p.row_src, w))
    torch.library.opcheck(permute_rows.permute_weights, (weights, p.row_map, p.row_src))
    torch.library.opcheck(permute_rows.permute_with_weights, (x, weights, p.row_map, p.row_src))


def test_gradients_of_rows_and_of_weights_alone() -> None:
    """permute moves rows and weights in one operation: either may be all that a loss looks at."""
    idx = make_routing(9, 3, 4)
    x, weights = torch.randn(9, 8, requires_grad=True), torch.rand(9, 3, requires_grad=True)
    p = permute(x, idx, weights, num_experts=4, alignment=4)
    assert p.weights is not None
    (dx,) = torch.autograd.grad(p.x.sum(), x, retain_graph=True)
    assert torch.equal(dx, (idx >= 0).sum(1, keepdim=True).float().expand(9, 8))
    dx, dw = torch.autograd.grad((p.weights * 3).sum(), (x, weights), allow_unused=True, retain_graph=True)
    assert dx is None
    assert torch.equal(dw, 3.0 * (idx >= 0))
    nan = torch.full_like(p.weights, float("nan"))  # a gradient may be NaN, a weight not
    (dw,) = torch.autograd.grad(p.weights, weights, nan)
    assert torch.equal(dw.isnan(), idx >= 0)


@pytest.mark.parametrize("num_rows", [None, 64])
def test_compiles_in_one_graph(num_rows: int | None) -> None:
    def through(x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        p = permute(x, idx, weights, num_experts=4, alignment=4, num_rows=num_rows)
        return unpermute(p.x * 2, p, p.weights)

    compiled = torch.compile(through, backend="aot_eager", fullgraph=True)
    for T in (7, 9):
        args = (torch.randn(T, 8), make_routing(T, 3, 4), torch.rand(T, 3))
        assert_bits(compiled(*args), through(*args))


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("hidden", {"x": torch.randn(4, 3)}),
        ("x", {"x": torch.randn(8, 4).t()}),
        ("x", {"x": torch.randn(4)}),
        ("x", {"x": [[0.0] * 8] * 4}),
        ("x", {"x": torch.randn(4, 8).to_sparse()}),
        ("routing", {"routing": [[0, 0]] * 4}),
        ("routing", {"routing": torch.zeros(4, 2, dtype=torch.int64, device="meta")}),
        ("weights", {"weights": [[0.5, 0.5]] * 4}),
        ("weights", {"weights": torch.rand(4, 2, device="meta")}),
        (
            "weights",
            {
                "routing": torch.ones(4, 2, dtype=torch.bool),
                "num_experts": 2,
                "weights": torch.full((4, 2), float("nan")),
            },
        ),
        ("num_experts", {"num_experts": 2**31}),
        ("num_experts", {"num_experts": 2**63}),
        ("alignment", {"alignment": 2**31}),
        ("alignment", {"alignment": 2**63}),
        ("alignment", {"alignment": 2**30}),
        ("num_rows", {"num_rows": 2**31}),
        ("top_k", {"routing": torch.ones(4, 2, dtype=torch.bool), "num_experts": 2, "top_k": 2**31}),
        ("routing", {"routing": torch.zeros(3, 2, dtype=torch.int64)}),
        ("routing", {"routing": torch.zeros(4, dtype=torch.int64)}),
        ("routing", {"routing": torch.zeros(4, 2)}),
        ("routing", {"routing": torch.full((4, 2), 3)}),
        ("routing", {"routing": torch.full((4, 2), -2)}),
        ("routing", {"routing": torch.full((4, 2), 2**32)}),
        ("routing", {"routing": torch.full((4, 2), 3, dtype=torch.int32)}),
        ("weights", {"weights": torch.rand(4, 3)}),
        ("weights", {"weights": torch.rand(4, 2).half()}),
        ("weights", {"weights": torch.full((4, 2), float("nan"))}),
        ("num_experts", {"num_experts": None}),
        ("num_experts", {"num_experts": 0}),
        ("num_experts", {"routing": torch.ones(4, 2, dtype=torch.bool)}),
        ("top_k", {"top_k": 3}),
        ("top_k", {"routing": torch.ones(4, 2, dtype=torch.bool), "num_experts": 2, "top_k": 1}),
        ("alignment", {"alignment": 0}),
        ("num_rows", {"num_rows": -1}),
    ],
)
def test_refusals(argument: str, change: dict[str, object]) -> None:
    args: dict[str, object] = {
        "x": torch.randn(4, 8),
        "routing": torch.zeros(4, 2, dtype=torch.int64),
        "weights": torch.rand(4, 2),
        "num_experts": 3,
    }
    permute(**args)
    with pytest.raises(ArgumentError) as caught:
        permute(**{**args, **change})
    assert caught.value.argument == argument


def test_unpermute_refusals() -> None:
    p = permute(torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64), num_experts=3)
    for argument, y, weights in (
        ("y", torch.randn(7, 8), None),
        ("y", torch.randn(8), None),
        ("y", torch.randn(8, 8).double(), None),
        ("y", torch.ones(8, 8, dtype=torch.int32), None),
        ("y", torch.randn(8, 8).to_sparse(), None),
        ("y", torch.randn(8, 8, device="meta"), None),
        ("y", [[0.0] * 8] * 8, None),
        ("weights", torch.randn(8, 8), [0.5] * 8),
        ("weights", torch.randn(8, 8), torch.rand(8, device="meta")),
        ("weights", torch.randn(8, 8), torch.rand(7)),
        ("weights", torch.randn(8, 8), torch.rand(4, 3)),
        ("weights", torch.randn(8, 8), torch.full((8,), float("nan"))),
        ("weights", torch.randn(8, 8), torch.rand(8).double()),
    ):
        with pytest.raises(ArgumentError) as caught:
            unpermute(y, p, weights)
        assert caught.value.argument == argument


def test_the_result_is_frozen() -> None:
    p = permute(torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64), num_experts=3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        p.x = torch.zeros(1)


def _wrong_row(out: torch.Tensor, row_src: torch.Tensor) -> torch.Tensor:
    return out.roll(1, 0)


def _dropped_row(out: torch.Tensor, row_src: torch.Tensor) -> torch.Tensor:
    out[(row_src >= 0).nonzero()[0]] = 0
    return out


def _dirty_padding(out: torch.Tensor, row_src: torch.Tensor) -> torch.Tensor:
    out[row_src < 0] = -0.0
    return out


def _one_bit(out: torch.Tensor, row_src: torch.Tensor) -> torch.Tensor:
    out.view(torch.int16)[0, 0] ^= 1
    return out


@pytest.mark.parametrize("plant", [_wrong_row, _dropped_row, _dirty_padding, _one_bit])
def test_planted_bugs_are_seen(plant: Callable[..., torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    x, idx, weights = torch.randn(9, 8).bfloat16(), make_routing(9, 2, 3), torch.rand(9, 2)
    check_against_loops(x, idx, weights, 3, 8, None)
    right = native.expand_rows
    monkeypatch.setattr(native, "expand_rows", lambda *a: plant(right(*a), a[2]))
    with pytest.raises(AssertionError):
        check_against_loops(x, idx, weights, 3, 8, None)
