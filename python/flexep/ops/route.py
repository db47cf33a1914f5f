"""The router as one operation over logits: choice, weights, and the probabilities that balancing losses sum.

Shape letters: T tokens, E experts, K chosen experts a token. docs/router.md has the formulae, csrc/ops/route.h the
contract: one kernel on CUDA, no host wait, the CPU's bits.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from flexep._native import route as native
from flexep.build_info import build_info
from flexep.errors import ArgumentError
from flexep.ops import _check


class Routed(NamedTuple):
    """`idx` int32 [T, K], best first, -1 for padding; `weights` fp32 [T, K]; `probs` fp32 [T, E] or None."""

    idx: torch.Tensor
    weights: torch.Tensor
    probs: torch.Tensor | None


def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None = None,
    padding_mask: torch.Tensor | None = None,
    *,
    top_k: int,
    score: str = "softmax",
    pre_softmax: bool = True,
    renormalize: bool = True,
    scaling: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "top2",
    with_probs: bool = False,
) -> Routed:
    """The K best experts of each token and their weights, in fp32. Differentiable, once, in the logits.

    Args:
        logits: fp32 or bf16 [T, E], E <= 16384.
        bias: fp32 [E], added to the scores for choosing only; no gradient.
        padding_mask: bool [T], True where a token is padding: ids -1, weights and probs 0, no gradient.
        top_k: K, 1 to 32. The others are named and explained by flexep.moe.RouterConfig.
        with_probs: also the probabilities over all experts; their rows add up to 1.
    Raises:
        ArgumentError: an argument outside its range, or of another dtype, shape or device; NotBuilt: CUDA logits in a
            build without CUDA.
    """
    _check.tensor("logits", logits)
    if score == "softmax" and not pre_softmax:
        if top_k == 1:
            raise ArgumentError("pre_softmax", False, "True where top_k = 1: a softmax over one is constant")
        score = "softmax_after"
    elif score == "softmax_after" or not pre_softmax:
        raise ArgumentError(
            "score", score, "softmax, sigmoid or sqrt_softplus; pre_softmax=False for softmax"
        )
    weights, probs, idx = choose_experts(
        logits, bias, padding_mask, score, top_k, num_groups, topk_groups, group_score, renormalize, scaling,
        with_probs,
    )  # fmt: skip
    return Routed(idx, weights, probs if with_probs else None)


def can_route(device: torch.device, num_experts: int, top_k: int) -> bool:
    """Whether `route` takes logits of this width on this device, in this build."""
    fits = num_experts <= native.MAX_EXPERTS and top_k <= native.MAX_TOP_K
    return fits and (device.type == "cpu" or (device.type == "cuda" and bool(build_info().cuda_archs)))


@torch.library.custom_op("flexep::choose_experts", mutates_args=())
def choose_experts(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    score: str,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    scaling: float,
    with_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Weights, probabilities and ids: see route. `score` may also be "softmax_after"; without `with_probs`, probs is
    [0, E]."""
    rule = native.Rule(score, top_k, num_groups, topk_groups, group_score, renormalize, scaling)
    return native.route(logits, bias, padding_mask, rule, with_probs)


@choose_experts.register_fake
def _choose_fake(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    padding_mask: torch.Tensor | None,
    score: str,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    scaling: float,
    with_probs: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T, E = logits.shape
    weights = logits.new_empty(T, top_k, dtype=torch.float32)
    probs = logits.new_empty(T if with_probs else 0, E, dtype=torch.float32)
    return weights, probs, logits.new_empty(T, top_k, dtype=torch.int32)


@torch.library.custom_op("flexep::choose_experts_grad", mutates_args=())
def choose_experts_grad(
    logits: torch.Tensor,
    idx: torch.Tensor,
    grad_weights: torch.Tensor | None,
    grad_probs: torch.Tensor | None,
    score: str,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    scaling: float,
) -> torch.Tensor:
    """[T, E] in the dtype of the logits: the gradient of choose_experts, through the chosen weights and the
    probabilities. A row of idx that begins with -1 is padding."""
    rule = native.Rule(score, top_k, num_groups, topk_groups, group_score, renormalize, scaling)
    return native.route_grad(logits, idx, grad_weights, grad_probs, rule)


@choose_experts_grad.register_fake
def _grad_fake(
    logits: torch.Tensor,
    idx: torch.Tensor,
    grad_weights: torch.Tensor | None,
    grad_probs: torch.Tensor | None,
    score: str,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    group_score: str,
    renormalize: bool,
    scaling: float,
) -> torch.Tensor:
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    logits, _, _, *rule, with_probs = inputs
    ctx.save_for_backward(logits, output[2])
    ctx.rule, ctx.with_probs = rule, with_probs
    ctx.set_materialize_grads(False)


def _backward(
    ctx: Any, grad_weights: torch.Tensor | None, grad_probs: torch.Tensor | None, _: None
) -> tuple[torch.Tensor | None, ...]:
    logits, idx = ctx.saved_tensors
    grad_probs = grad_probs if ctx.with_probs else None
    if grad_weights is None and grad_probs is None:
        return (None,) * 11
    grad = choose_experts_grad(logits, idx, grad_weights, grad_probs, *ctx.rule)
    return grad, *(None,) * 10


choose_experts.register_autograd(_backward, setup_context=_setup)
