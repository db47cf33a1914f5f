"""Scores, and the choice of experts by them. fp32 throughout; every tie goes to the lower id."""

from __future__ import annotations

import torch
from torch import Tensor

from flexep.moe import fixed_math
from flexep.moe.router_config import RouterConfig
from flexep.ops.route import Routed, can_route, route

# Added to a sum of scores before dividing, so that scores near nothing give weights near 0 instead of NaN; sums below
# about 1e-17 (sigmoids of logits below -40) are no longer renormalised to 1.
EPSILON = 1e-20


def score(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """The score of every expert, [T, E]. Post-softmax: the logits themselves."""
    if config.score == "sigmoid":
        return fixed_math.sigmoid(logits_TE)
    if config.score == "sqrt_softplus":
        return fixed_math.sqrt_softplus(logits_TE)
    return fixed_math.softmax(logits_TE) if config.pre_softmax else logits_TE


def probabilities(logits_TE: Tensor, config: RouterConfig) -> Tensor:
    """[T, E], each row adding up to 1: what the balancing losses call p. Softmax, or scores over their sum."""
    if config.score == "softmax":
        return fixed_math.softmax(logits_TE)
    scores_TE = score(logits_TE, config)
    return scores_TE / (fixed_math.lane_sum(scores_TE) + EPSILON)


def largest(values: Tensor, k: int) -> Tensor:
    """Indices of the k largest of each row, largest first, of equal ones the lower index first. int64 [..., k]."""
    # A stable sort, because torch.topk promises no order among equal values.
    return torch.sort(values, dim=-1, descending=True, stable=True).indices[..., :k]


def choose(logits_TE: Tensor, config: RouterConfig, bias_E: Tensor | None = None) -> Tensor:
    """int64 [T, K]: the experts of each token, best first. Not differentiable.

    The choice is by score plus bias. Where neither a bias nor groups need the score itself, it is by logit:
    the same order, but one that does not saturate.
    """
    with torch.no_grad():
        grouped = config.num_groups > 1
        key_TE = score(logits_TE, config) if grouped or bias_E is not None else logits_TE
        if bias_E is not None:
            key_TE = key_TE + bias_E
        if grouped:
            key_TE = key_TE.masked_fill(~_in_best_groups(key_TE, config), -torch.inf)
        return largest(key_TE, config.top_k)


def _in_best_groups(key_TE: Tensor, config: RouterConfig) -> Tensor:
    """bool [T, E]: the experts of each token's best groups."""
    key_TGe = key_TE.unflatten(-1, (config.num_groups, -1))
    best = min(2 if config.group_score == "top2" else 1, key_TGe.shape[-1])
    group_TG = key_TGe.sort(dim=-1, descending=True).values[..., :best].sum(dim=-1)
    chosen_TG = torch.zeros_like(group_TG, dtype=torch.bool)
    chosen_TG.scatter_(-1, largest(group_TG, config.topk_groups), True)
    return chosen_TG.repeat_interleave(key_TGe.shape[-1], dim=-1)


def weigh(logits_TE: Tensor, idx_TK: Tensor, config: RouterConfig) -> Tensor:
    """fp32 [T, K]: the weights of chosen experts, without the bias. Differentiable."""
    weights_TK = score(logits_TE, config).gather(-1, idx_TK)
    if config.score == "softmax" and not config.pre_softmax:
        weights_TK = fixed_math.softmax(weights_TK)
    elif config.renormalize and config.top_k > 1:
        weights_TK = weights_TK / (fixed_math.lane_sum(weights_TK) + EPSILON)
    return weights_TK if config.scaling == 1.0 else weights_TK * config.scaling


def fusable(logits_TE: Tensor, config: RouterConfig) -> bool:
    """Whether `choose_and_weigh` takes these logits; the functions above, composed, take any."""
    return not config.force_balanced and can_route(logits_TE.device, config.num_experts, config.top_k)


def choose_and_weigh(
    logits_TE: Tensor,
    config: RouterConfig,
    bias_E: Tensor | None,
    padding_mask_T: Tensor | None,
    with_probs: bool,
) -> Routed:
    """`choose`, `weigh` and (where asked for) `probabilities` in one operation, with the same bits. Differentiable."""
    return route(
        logits_TE,
        bias_E,
        padding_mask_T,
        top_k=config.top_k,
        score=config.score,
        pre_softmax=config.pre_softmax,
        renormalize=config.renormalize,
        scaling=config.scaling,
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
        group_score=config.group_score,
        with_probs=with_probs,
    )


def deal(real_T: Tensor, config: RouterConfig, rank: int) -> Tensor:
    """int64 [T, K]: experts dealt round-robin to the real tokens, of which every rank is taken to have as many.

    Counts differ by at most one, over all ranks if they do have as many.
    """
    place_T = real_T.long().cumsum(0) - 1
    start = rank * real_T.sum() * config.top_k
    slot_K = torch.arange(config.top_k, device=real_T.device)
    return (start + place_T[:, None] * config.top_k + slot_K) % config.num_experts
