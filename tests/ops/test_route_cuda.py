"""The router's kernel on one GPU: the bits of CPU and composition, one launch, no host wait, graphs, any pointer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexep._native import route as native
from flexep._native._load import _C
from flexep.errors import ArgumentError
from flexep.moe.choose import choose, choose_and_weigh, probabilities, weigh
from flexep.moe.router import Router
from flexep.moe.router_config import RouterConfig
from flexep.ops.route import route
from tests.moe.draws import KINDS, generator
from tests.ops.reference import assert_bits
from tests.ops.test_route import WIDE, make_bias, make_logits

pytestmark = pytest.mark.gpu

WIDER: tuple[dict[str, Any], ...] = (
    *WIDE,
    {"num_experts": 1, "top_k": 1},
    {"num_experts": 7, "top_k": 7, "pre_softmax": False},
    {"num_experts": 33, "top_k": 5, "score": "sigmoid", "num_groups": 11, "topk_groups": 4},
    {"num_experts": 192, "top_k": 12, "score": "sigmoid", "num_groups": 3, "topk_groups": 2},
    {"num_experts": 100, "top_k": 32},
    {"num_experts": 40, "top_k": 4, "num_groups": 40, "topk_groups": 9, "score": "sqrt_softplus"},
    {"num_experts": 4096, "top_k": 32, "num_groups": 64, "topk_groups": 8},
    {"num_experts": 16384, "top_k": 8, "score": "sigmoid", "num_groups": 16384, "topk_groups": 100},
)


def ramp(count: int, device: torch.device) -> torch.Tensor:
    """fp32 [count], the same bits on every device."""
    return (torch.arange(count, device=device) % 97 - 48).float() / 64


def through(
    logits_TE: torch.Tensor, bias_E: torch.Tensor | None, padding_T: torch.Tensor | None, config: RouterConfig
) -> tuple[torch.Tensor, ...]:
    """Everything the operation computes: ids, weights, probabilities and gradients by one or both of them."""
    logits_TE = logits_TE.detach().requires_grad_()
    idx_TK, weights_TK, probs_TE = choose_and_weigh(logits_TE, config, bias_E, padding_T, True)
    up_TK = ramp(weights_TK.numel(), logits_TE.device).view_as(weights_TK)
    up_E = ramp(config.num_experts, logits_TE.device)
    grads = [
        torch.autograd.grad([weights_TK], logits_TE, [up_TK], retain_graph=True)[0],
        torch.autograd.grad([probs_TE.sum(0)], logits_TE, [up_E], retain_graph=True)[0],
        torch.autograd.grad([weights_TK, probs_TE], logits_TE, [up_TK, probs_TE * up_E])[0],
    ]
    return idx_TK, weights_TK, probs_TE, *grads


@pytest.mark.parametrize("options", WIDER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("biased", [False, True])
def test_has_the_bits_of_the_cpu(options: dict[str, Any], dtype: torch.dtype, biased: bool) -> None:
    config = RouterConfig(**options)
    E, T = config.num_experts, max(9, min(1000, 400_000 // config.num_experts))
    bias_E = make_bias(config, biased, 8)
    padding_T = torch.arange(T) % 5 == 2
    levels_TE = torch.randint(3, (T, E), generator=generator(9)).to(dtype)  # ties
    for logits_TE in (make_logits((T, E), 7).to(dtype), levels_TE):
        want = through(logits_TE, bias_E, padding_T, config)
        got = through(logits_TE.cuda(), None if bias_E is None else bias_E.cuda(), padding_T.cuda(), config)
        for mine, other in zip(got, want, strict=True):
            assert_bits(mine.cpu(), other)


@pytest.mark.parametrize("options", WIDE)
@pytest.mark.parametrize("biased", [False, True])
def test_has_the_bits_of_the_composition_on_the_gpu(options: dict[str, Any], biased: bool) -> None:
    config = RouterConfig(**options)
    bias_E = make_bias(config, biased, 8)
    bias_E = None if bias_E is None else bias_E.cuda()
    close_TE = 1.0 + 1e-6 * torch.randn(2000, config.num_experts, generator=generator(9))
    for logits_TE in (make_logits((2000, config.num_experts), 6), close_TE):
        logits_TE = logits_TE.cuda()
        idx_TK = choose(logits_TE, config, bias_E)
        fused = choose_and_weigh(logits_TE, config, bias_E, None, True)
        assert_bits(fused.idx, idx_TK.int())
        assert_bits(fused.weights, weigh(logits_TE, idx_TK, config))
        assert_bits(fused.probs, probabilities(logits_TE, config))


def test_sigmoids_of_every_size() -> None:
    """Ordinary logits are divided without a branch, those below -86 with one."""
    logits_TE = torch.linspace(-100.0, 45.0, 8192 * 256).view(8192, 256)
    strewn_TE = logits_TE.view(-1)[torch.randperm(8192 * 256, generator=generator(5))].view(8192, 256)
    bias_E = torch.zeros(256)
    for each_TE in (logits_TE, strewn_TE):
        options: dict[str, Any] = {"top_k": 32, "score": "sigmoid", "with_probs": True}
        want = route(each_TE, bias_E, **options)
        got = route(each_TE.cuda(), bias_E.cuda(), **options)
        for mine, other in zip(got, want, strict=True):
            assert_bits(mine.cpu(), other)


@pytest.mark.parametrize("shape", [(0, 8), (1, 8), (8192, 256), (100_003, 12)])
def test_any_number_of_tokens(shape: tuple[int, int]) -> None:
    config = RouterConfig(num_experts=shape[1], top_k=4, score="sigmoid", num_groups=2)
    logits_TE = make_logits(shape, 4)
    got, want = (through(each, None, None, config) for each in (logits_TE.cuda(), logits_TE))
    for mine, other in zip(got, want, strict=True):
        assert_bits(mine.cpu(), other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_writes_inside_its_outputs_and_reads_from_any_address(dtype: torch.dtype) -> None:
    """Outputs between guard bands of poison; logits that begin at every element of 16 bytes."""
    T, E, K = 67, 64, 5
    rule = native.Rule("softmax", K, 1, 1, "top2", True, 1.0)
    wide = make_logits((1, T * E + 8), 3).view(-1).to(dtype).cuda()
    for shift in range(9):
        logits_TE = wide[shift : shift + T * E]
        want = native.route(logits_TE.view(T, E).cpu(), None, None, rule, True)
        bands = [
            torch.full((size + 512,), -77, dtype=torch.int32, device="cuda") for size in (T * K, T * E, T * K)
        ]
        weights, probs, ids = (band[256:] for band in bands)
        _C.route(
            rule=native._compiled(rule), logits=logits_TE.data_ptr(), dtype=native._CODE[dtype], bias=0, padding=0,
            tokens=T, experts=E, ids=ids.data_ptr(), weights=weights.data_ptr(), probs=probs.data_ptr(), threads=1,
            stream=torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        for band, expected in zip(bands, want, strict=True):
            assert (band[:256] == -77).all()
            assert (band[256 + expected.numel() :] == -77).all()
            assert_bits(band[256:][: expected.numel()].view(expected.dtype).cpu(), expected.view(-1))


def test_twenty_runs_are_equal() -> None:
    config = RouterConfig(num_experts=256, top_k=8, score="sigmoid", num_groups=8, topk_groups=4)
    logits_TE, bias_E = make_logits((8192, 256), 2).cuda(), torch.randn(256, generator=generator(1)).cuda()
    first = through(logits_TE, bias_E, None, config)
    for _ in range(19):
        for mine, other in zip(through(logits_TE, bias_E, None, config), first, strict=True):
            assert_bits(mine, other)


def test_one_kernel_each_way() -> None:
    logits_TE = torch.randn(512, 256, device="cuda", requires_grad=True)
    up_TK = torch.randn(512, 8, device="cuda")
    calls: list[tuple[str, Callable[[], object]]] = [
        ("route", lambda: route(logits_TE, top_k=8, with_probs=True)),
        ("grad", lambda: torch.autograd.grad(route(logits_TE, top_k=8).weights, logits_TE, up_TK)),
    ]
    for name, call in calls:
        call()
        with torch.profiler.profile(
            activities=list(torch.profiler.supported_activities()), acc_events=True
        ) as trace:
            call()
            torch.cuda.synchronize()
        kernels = [e.name for e in trace.events() if e.device_type == torch.autograd.DeviceType.CUDA]
        assert len([k for k in kernels if "route_" in k]) == len(kernels) == 1 + (name == "grad"), kernels


@pytest.mark.parametrize("kind", KINDS)
def test_replays_in_a_graph_with_other_logits(kind: dict[str, Any]) -> None:
    config = RouterConfig(num_experts=256, top_k=8, num_groups=4, topk_groups=2, **kind)
    bias_E = make_bias(config, True, 3).cuda()
    static_TE = make_logits((512, 256), 0).cuda()
    through(static_TE, bias_E, None, config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = through(static_TE, bias_E, None, config)
    for seed in range(1, 6):
        logits_TE = make_logits((512, 256), seed)
        static_TE.copy_(logits_TE)
        bias_E.mul_(-1.1)
        graph.replay()
        for mine, other in zip(out, through(logits_TE, bias_E.cpu(), None, config), strict=True):
            assert_bits(mine.cpu(), other)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_waits_for_nothing() -> None:
    router = Router(RouterConfig(num_experts=16, top_k=4, score="sigmoid", bias_rate=0.1), hidden=32).cuda()
    x_TH = torch.randn(64, 32, device="cuda", requires_grad=True)
    router(x_TH).weights.sum().backward()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        router(x_TH).weights.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_runs_on_another_stream_and_refuses_another_device() -> None:
    logits_TE = make_logits((300, 64), 1)
    stream = torch.cuda.Stream()
    on_gpu_TE = logits_TE.cuda()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        routed = route(on_gpu_TE, top_k=6)
    stream.synchronize()
    assert_bits(routed.weights.cpu(), route(logits_TE, top_k=6).weights)
    with pytest.raises(ArgumentError, match=r"^bias = "):
        route(on_gpu_TE, torch.zeros(64), top_k=6)
    with pytest.raises(ArgumentError, match=r"^padding_mask = "):
        route(on_gpu_TE, padding_mask=torch.zeros(300, dtype=torch.bool), top_k=6)
