"""The router's operation on the CPU: the bits of the composition, gradients in fp64, padding, opcheck, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flexep.build_info import BuildInfo
from flexep.errors import ArgumentError
from flexep.moe import fixed_math
from flexep.moe.choose import choose, choose_and_weigh, probabilities, weigh
from flexep.moe.router import Router
from flexep.moe.router_config import RouterConfig
from flexep.ops.route import can_route, choose_experts, choose_experts_grad, route
from flexep.ref import router as ref
from tests.moe.draws import KINDS, configs, generator, rule_of, scaled_close
from tests.ops.reference import assert_bits

WIDE: tuple[dict[str, Any], ...] = (
    {"num_experts": 256, "top_k": 8},
    {"num_experts": 256, "top_k": 8, "score": "sigmoid", "num_groups": 8, "topk_groups": 4, "scaling": 2.5},
    {"num_experts": 100, "top_k": 32, "num_groups": 50, "topk_groups": 20, "group_score": "max"},
    {"num_experts": 257, "top_k": 3, "pre_softmax": False},
    {"num_experts": 1000, "top_k": 16, "score": "sqrt_softplus", "renormalize": False},
    {"num_experts": 64, "top_k": 1, "score": "sigmoid"},
    {"num_experts": 64, "top_k": 64 // 2, "num_groups": 2, "pre_softmax": False},
)


def make_logits(shape: tuple[int, int], seed: int) -> torch.Tensor:
    """Tame and huge values, ties, both zeros, subnormals, infinities, NaN; the first rows are tame."""
    random = generator(seed)
    tame = 2 * torch.randn(shape, generator=random)
    strange = torch.tensor(
        [0.0, -0.0, 1.0, 1.0, -1e-41, 95.0, -95.0, 300.0, torch.inf, -torch.inf, torch.nan]
    )
    picked = strange[torch.randint(len(strange), shape, generator=random)]
    share_T1 = torch.tensor([0.0, 0.0, 0.01, 0.3]).repeat(shape[0] // 4 + 1)[: shape[0], None]
    share_T1[: shape[0] // 2] = 0.0
    return torch.where(torch.rand(shape, generator=random) < share_T1, picked, tame)


def make_bias(config: RouterConfig, biased: bool, seed: int) -> torch.Tensor | None:
    return 0.3 * torch.randn(config.num_experts, generator=generator(seed)) if biased else None


def assert_is_the_composition(config: RouterConfig, logits_TE: torch.Tensor, bias_E: Any) -> None:
    idx_TK = choose(logits_TE, config, bias_E)
    fused = choose_and_weigh(logits_TE, config, bias_E, None, True)
    assert_bits(fused.idx, idx_TK.int())
    assert_bits(fused.weights, weigh(logits_TE, idx_TK, config))
    assert_bits(fused.probs, probabilities(logits_TE, config))
    alone = choose_and_weigh(logits_TE, config, bias_E, None, False)
    assert alone.probs is None
    assert_bits(alone.idx, fused.idx)
    assert_bits(alone.weights, fused.weights)


@settings(max_examples=60)
@given(configs(), st.integers(0, 20), st.booleans(), st.integers(0, 2**16))
def test_has_the_bits_of_the_composition(config: RouterConfig, T: int, biased: bool, seed: int) -> None:
    logits_TE = make_logits((T, config.num_experts), seed)
    assert_is_the_composition(config, logits_TE, make_bias(config, biased, seed + 1))
    levels_TE = torch.randint(3, (T, config.num_experts), generator=generator(seed)).float()
    assert_is_the_composition(config, levels_TE, None)


@pytest.mark.parametrize("options", WIDE)
@pytest.mark.parametrize("biased", [False, True])
def test_has_the_bits_of_the_composition_at_real_widths(options: dict[str, Any], biased: bool) -> None:
    config = RouterConfig(**options)
    bias_E = make_bias(config, biased, 8)
    assert_is_the_composition(config, make_logits((600, config.num_experts), 7), bias_E)
    close_TE = 1.0 + 1e-6 * torch.randn(
        600, config.num_experts, generator=generator(9)
    )  # near ties everywhere
    assert_is_the_composition(config, close_TE, bias_E)


@pytest.mark.parametrize("name", ["exp", "log1p", "sigmoid", "softmax", "sqrt_softplus"])
def test_fixed_functions_against_fp64(name: str) -> None:
    """Errors in units of the last place of the exact value."""
    x = torch.cat([torch.linspace(-87, 88, 200_001), torch.linspace(-1, 1, 200_001)])
    x = x[(x >= 0) & (x <= 1)] if name == "log1p" else x[:400_000].view(-1, 250) if name == "softmax" else x
    wide = x.double()
    exact = {
        "exp": wide.exp,
        "log1p": wide.log1p,
        "sigmoid": wide.sigmoid,
        "softmax": lambda: wide.softmax(-1),
        "sqrt_softplus": lambda: wide.exp().log1p().sqrt(),
    }[name]()
    got = getattr(fixed_math, name)(x)
    place = (exact.float().nextafter(torch.tensor(torch.inf)) - exact.float()).double()
    most = {"exp": 1.0, "log1p": 2.0, "sigmoid": 3.0, "softmax": 4.0, "sqrt_softplus": 3.0}[name]
    normal = exact >= 2.0**-126
    assert normal.sum() > 100_000
    assert ((got.double() - exact).abs() / place)[normal].max() <= most


def test_fixed_exp_at_the_ends_of_its_range() -> None:
    x = torch.tensor([torch.inf, 89.0, 88.72, 0.0, -0.0, -88.0, -103.0, -105.0, -torch.inf, torch.nan])
    torch.testing.assert_close(fixed_math.exp(x), x.double().exp().float(), rtol=1e-6, atol=0, equal_nan=True)


@settings(max_examples=60)
@given(configs(), st.integers(1, 9), st.booleans(), st.integers(0, 2**16))
def test_gradients_against_fp64(config: RouterConfig, T: int, biased: bool, seed: int) -> None:
    logits_TE = 2 * torch.randn(T, config.num_experts, generator=generator(seed))
    ours_TE, theirs_TE = logits_TE.clone().requires_grad_(), logits_TE.double().requires_grad_()
    routed = choose_and_weigh(ours_TE, config, make_bias(config, biased, seed), None, True)
    assert routed.probs is not None
    weights_TK = ref.weights(theirs_TE, routed.idx.tolist(), rule_of(config))
    probs_TE = ref.shares(theirs_TE, rule_of(config))
    up_TK = torch.randn(weights_TK.shape, generator=generator(seed + 1))
    up_TE = torch.randn(probs_TE.shape, generator=generator(seed + 2))
    each = (
        lambda w, p: (w * up_TK).sum(),
        lambda w, p: (p * up_TE).sum(),
        lambda w, p: (w * up_TK).sum() + (p * up_TE).sum(),
        lambda w, p: (p.sum(0) * up_TE[0]).sum(),  # the gradient is one row for all tokens
    )
    for loss in each:
        (ours,) = torch.autograd.grad(loss(routed.weights, routed.probs), ours_TE, retain_graph=True)
        (theirs,) = torch.autograd.grad(loss(weights_TK, probs_TE), theirs_TE, retain_graph=True)
        scaled_close(ours, theirs, 3e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_logits_are_widened_and_their_gradients_rounded(kind: dict[str, Any]) -> None:
    for E in (24, 25):  # rows that begin on 16 bytes, and rows that do not
        config = RouterConfig(num_experts=E, top_k=4, **kind)
        narrow_TE = make_logits((40, E), 3).bfloat16().requires_grad_()
        wide_TE = narrow_TE.detach().float().requires_grad_()
        got, want = (choose_and_weigh(x, config, None, None, True) for x in (narrow_TE, wide_TE))
        for mine, other in zip(got, want, strict=True):
            assert_bits(mine, other)
        for routed in (got, want):
            torch.autograd.backward([routed.weights, routed.probs], [routed.weights, routed.probs.cos()])
        assert_bits(narrow_TE.grad, wide_TE.grad.bfloat16())


@pytest.mark.parametrize("kind", KINDS)
def test_padding_chooses_nothing_and_has_no_gradient(kind: dict[str, Any]) -> None:
    config = RouterConfig(num_experts=12, top_k=3, **kind)
    padding_T = torch.arange(30) % 3 == 1
    logits_TE = make_logits((30, 12), 1).nan_to_num(0, 5, -5).masked_fill_(padding_T[:, None], torch.nan)
    logits_TE.requires_grad_()
    routed = choose_and_weigh(logits_TE, config, None, padding_T, True)
    assert (routed.idx[padding_T] == -1).all()
    assert not routed.weights[padding_T].any()
    assert not routed.probs[padding_T].any()
    alone = choose_and_weigh(logits_TE[~padding_T], config, None, None, True)
    for got, want in zip(routed, alone, strict=True):
        assert_bits(got[~padding_T], want)
    torch.autograd.backward([routed.weights, routed.probs], [routed.weights + 1, routed.probs + 1])
    assert not logits_TE.grad[padding_T].any()
    assert logits_TE.grad[~padding_T].isfinite().all()


def test_bits_do_not_depend_on_threads_or_the_mode_of_the_caller() -> None:
    config = RouterConfig(num_experts=256, top_k=8, score="sigmoid", renormalize=False)
    logits_TE = make_logits((400, 256), 2) - 91.0  # scores that are subnormal
    before = torch.get_num_threads()
    want = choose_and_weigh(logits_TE, config, None, None, True)
    assert (want.weights < 2.0**-126).any()
    try:
        for threads, flush in ((1, False), (5, True)):
            torch.set_num_threads(threads)
            torch.set_flush_denormal(flush)
            got = choose_and_weigh(logits_TE, config, None, None, True)
            for mine, other in zip(got, want, strict=True):
                assert_bits(mine, other)
    finally:
        torch.set_num_threads(before)
        torch.set_flush_denormal(False)


def test_only_the_wanted_gradients_are_formed() -> None:
    logits_TE = torch.randn(5, 8, generator=generator(1), requires_grad=True)
    routed = route(logits_TE, top_k=2, with_probs=True)
    (by_weights,) = torch.autograd.grad(routed.weights[:, 0].sum(), logits_TE, retain_graph=True)
    zeros = torch.zeros(5, 8)
    (with_zeros,) = torch.autograd.grad(
        [routed.weights[:, 0].sum(), routed.probs], logits_TE, [torch.ones(()), zeros]
    )
    assert_bits(by_weights, with_zeros)
    assert by_weights.any()


LOSSES = {"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.7, "z_loss": 0.05}


@pytest.mark.parametrize("options", [{}, {"capacity_factor": 0.7}, {"bias_rate": 0.01, "num_groups": 4}])
@pytest.mark.parametrize("kind", KINDS)
def test_the_router_is_the_same_with_and_without_it(kind: dict[str, Any], options: dict[str, Any]) -> None:
    config = RouterConfig(num_experts=16, top_k=4, **kind, **LOSSES, **options)
    found = []
    for fused in (True, False):
        router = Router(config, hidden=24, fused=fused)
        x_TH = torch.randn(60, 24, generator=generator(2)).requires_grad_()
        for _ in range(2):  # the second time with a bias that has moved
            idx_TK, weights_TK = router(x_TH, torch.arange(60) % 5 == 0, seq_len=12)
            (weights_TK * torch.linspace(-1, 1, 4)).sum().backward()
            router.end_step()
        found.append((idx_TK, weights_TK, x_TH.grad, router.weight.grad, *router.losses.values()))
    for position, (mine, other) in enumerate(zip(*found, strict=True)):
        if position < 2:
            assert_bits(mine, other)
        scaled_close(mine, other, 2e-6)


def test_the_router_composes_what_is_too_wide_or_dealt(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr("flexep.moe.router.choose_and_weigh", lambda *args: calls.append(args))
    x_TH = torch.randn(3, 8)
    for options in (
        {"num_experts": 40, "top_k": 33},
        {"num_experts": 40, "top_k": 2, "force_balanced": True},
    ):
        assert Router(RouterConfig(**options), hidden=8)(x_TH).idx.shape == (3, options["top_k"])
    assert not calls
    with pytest.raises(TypeError):  # the planted call returns nothing
        Router(RouterConfig(num_experts=40, top_k=32), hidden=8)(x_TH)
    assert len(calls) == 1


def test_opcheck() -> None:
    logits_TE, bias_E = torch.randn(6, 8, requires_grad=True), torch.randn(8)
    mask_T = torch.tensor([False, True, False, False, False, False])
    for score in ("softmax", "softmax_after", "sigmoid", "sqrt_softplus"):
        for bias, mask, with_probs in ((None, None, True), (bias_E, mask_T, False), (bias_E, mask_T, True)):
            rule = (score, 3, 4, 2, "top2", True, 1.5)
            torch.library.opcheck(choose_experts, (logits_TE, bias, mask, *rule, with_probs))
    idx_TK = route(logits_TE, top_k=3).idx
    grads = (torch.randn(6, 3), torch.randn(6, 8))
    rule = ("softmax", 3, 1, 1, "top2", True, 1.0)
    torch.library.opcheck(choose_experts_grad, (logits_TE.detach(), idx_TK, *grads, *rule))


def test_compiles_in_one_graph() -> None:
    def through(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routed = route(logits * 2, top_k=3, score="sigmoid", num_groups=2, topk_groups=1, with_probs=True)
        return routed.weights, routed.probs.sum(0)

    compiled = torch.compile(through, backend="aot_eager", fullgraph=True)
    for T in (7, 9):
        ours, theirs = (torch.randn(T, 8, generator=generator(T)).requires_grad_() for _ in range(2))
        for call, logits in ((compiled, ours), (through, theirs)):
            torch.autograd.backward(call(logits), [torch.ones(T, 3), torch.arange(8.0)])
        assert_bits(ours.grad, theirs.grad)


GOOD: dict[str, Any] = {"logits": torch.zeros(4, 8), "top_k": 2}


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("logits", {"logits": torch.zeros(8)}),
        ("logits", {"logits": torch.zeros(4, 8, dtype=torch.float64)}),
        ("logits", {"logits": [[0.0]]}),
        ("num_experts", {"logits": torch.zeros(4, 0)}),
        ("num_experts", {"logits": torch.zeros(1, 16385)}),
        ("bias", {"bias": torch.zeros(7)}),
        ("bias", {"bias": torch.zeros(8, dtype=torch.bfloat16)}),
        ("padding_mask", {"padding_mask": torch.zeros(4)}),
        ("padding_mask", {"padding_mask": torch.zeros(3, dtype=torch.bool)}),
        ("top_k", {"top_k": 0}),
        ("top_k", {"top_k": 9}),
        ("top_k", {"top_k": 33, "logits": torch.zeros(1, 64)}),
        ("top_k", {"top_k": 3, "num_groups": 4}),
        ("num_groups", {"num_groups": 3}),
        ("num_groups", {"num_groups": 0}),
        ("topk_groups", {"num_groups": 4, "topk_groups": 5}),
        ("group_score", {"group_score": "min"}),
        ("score", {"score": "relu"}),
        ("score", {"score": "sigmoid", "pre_softmax": False}),
        ("pre_softmax", {"top_k": 1, "pre_softmax": False}),
    ],
)
def test_refusals(argument: str, change: dict[str, Any]) -> None:
    route(**GOOD)
    with pytest.raises(ArgumentError, match=f"^{argument} = "):
        route(**{**GOOD, **change})


@pytest.mark.parametrize(("archs", "can"), [((), False), (("90a",), True)])
def test_cuda_logits_need_a_build_with_kernels(
    monkeypatch: pytest.MonkeyPatch, archs: tuple[str, ...], can: bool
) -> None:
    """That a build without them names the option to set: tests/packaging/smoke_without_torch.py, on such a wheel."""
    monkeypatch.setattr("flexep.ops.route.build_info", lambda: BuildInfo(archs, False))
    assert can_route(torch.device("cuda"), 8, 2) is can
    assert can_route(torch.device("cpu"), 8, 2)
