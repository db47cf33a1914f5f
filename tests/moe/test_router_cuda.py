"""The router and the layer's parts on one GPU: the CPU's answers, and no host wait in the router."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexep
from flexep.moe.layer import MoELayer
from flexep.moe.router import Router
from flexep.moe.router_config import RouterConfig
from tests.moe.draws import clear_logits, scaled_close

pytestmark = pytest.mark.gpu

E, K = 16, 4
LOSSES = {"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.7, "z_loss": 0.05}
WAYS: tuple[dict[str, Any], ...] = (
    {"score": "softmax", **LOSSES},
    {"score": "sigmoid", "bias_rate": 0.01, "num_groups": 4, "topk_groups": 2, **LOSSES},
    {"score": "sqrt_softplus", "capacity_factor": 0.8},
    {"score": "softmax", "pre_softmax": False, "capacity_factor": 0.8, "drop_by": "position"},
    {"force_balanced": True, **LOSSES},
)


def run(device: str, options: dict[str, Any]) -> list[torch.Tensor]:
    """[ids, weights, gradient of x and of the weight, losses, bias after the step]."""
    config = RouterConfig(num_experts=E, top_k=K, **options)
    router = Router(config, hidden=E)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    router = router.to(device)
    x_TH = clear_logits(120, config, None, 5).to(device).requires_grad_()
    mask_T = (torch.arange(120) % 7 == 0).to(device)
    idx_TK, weights_TK = router(x_TH, mask_T, seq_len=30)
    (weights_TK * torch.linspace(-1, 1, K, device=device)).sum().backward()
    router.end_step()
    found = [idx_TK, weights_TK, x_TH.grad, router.weight.grad, *router.losses.values()]
    return [each.detach().cpu() for each in [*found, *([] if router.bias is None else [router.bias])]]


@pytest.mark.parametrize("way", range(len(WAYS)))
def test_answers_as_on_the_cpu(way: int) -> None:
    ours, theirs = run("cuda", WAYS[way]), run("cpu", WAYS[way])
    assert torch.equal(ours[0], theirs[0])
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        scaled_close(mine, other, 1e-5)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("way", range(len(WAYS)))
def test_no_host_wait(way: int) -> None:
    router = Router(RouterConfig(num_experts=E, top_k=K, jitter=0.1, **WAYS[way]), hidden=32).cuda()
    x_TH = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    mask_T = torch.zeros(64, dtype=torch.bool, device="cuda")
    router(x_TH, mask_T, seq_len=32)  # generators are made at first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        router(x_TH, mask_T, seq_len=32).weights.sum().backward()
        router.end_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x_TH.grad is not None


@pytest.mark.parametrize("layout", ["expert_major", "flat"])
def test_the_parts_of_the_layer_answer_as_on_the_cpu(layout: str) -> None:
    results = []
    for device in ("cpu", "cuda"):
        dispatcher = flexep.Dispatcher(
            flexep.Group.local(2, device), num_experts=E, hidden=64, top_k=K, max_tokens=64,
            layout=layout, dtype=torch.float32,
        )  # fmt: skip
        router = RouterConfig(num_experts=E, top_k=K, capacity_factor=0.8, pad_to_capacity=True, aux_loss=0.1)
        layer = MoELayer(
            dispatcher, inner=32, hidden=128, router=router, shared_inner=32, shared_gate=True, bias=True
        )
        x_TH = torch.randn(60, 128, generator=torch.Generator().manual_seed(3)).to(device).requires_grad_()
        mask_T = (torch.arange(60) % 5 == 0).to(device)
        z = torch.cat(layer(list(x_TH.split([40, 20])), list(mask_T.split([40, 20]))))
        z.square().sum().backward()
        grads = [parameter.grad for parameter in layer.parameters()]
        results.append([each.detach().cpu() for each in (z, x_TH.grad, *grads)])
    for ours, theirs in zip(*results, strict=True):
        scaled_close(ours, theirs, 1e-3)
