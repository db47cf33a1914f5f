"""The router in fp64, token by token: scores, choice, weights, capacity, losses and the expert bias.

Written from the formulae of docs/router.md, with sorted lists for choices and masks over all experts for weights.
Differentiable in the logits; everything but ids and counts is fp64. Shape letters: T tokens, E experts, K slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Rule:
    """The part of a router's settings that decides choices and weights, under the names of RouterConfig."""

    top_k: int
    score: str = "softmax"
    pre_softmax: bool = True
    renormalize: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2"


def _best(keys: Sequence[float], candidates: Sequence[int], k: int) -> list[int]:
    """The k candidates of the largest key, of equal keys the lower candidate."""
    return sorted(candidates, key=lambda c: (-keys[c], c))[:k]


def scores(logits_TE: Tensor, rule: Rule) -> Tensor:
    """[T, E]. Post-softmax routing scores by the logit."""
    if rule.score == "sigmoid":
        return 1 / (1 + torch.exp(-logits_TE))
    if rule.score == "sqrt_softplus":
        return torch.log1p(torch.exp(logits_TE)) ** 0.5
    if not rule.pre_softmax:
        return logits_TE
    exp_TE = torch.exp(logits_TE - logits_TE.detach().amax(1, keepdim=True))
    return exp_TE / exp_TE.sum(1, keepdim=True)


def choose(logits_TE: Tensor, rule: Rule, bias_E: Tensor | None = None) -> list[list[int]]:
    """The experts of each token, best first."""
    key_TE = scores(logits_TE.detach().double(), rule)
    if bias_E is not None:
        key_TE = key_TE + bias_E.double()
    E = logits_TE.shape[1]
    size = E // rule.num_groups
    chosen = []
    for keys in key_TE.tolist():
        group_of = [list(range(g * size, (g + 1) * size)) for g in range(rule.num_groups)]
        count = {"top2": 2, "max": 1}[rule.group_score]
        value = [sum(sorted((keys[e] for e in members), reverse=True)[:count]) for members in group_of]
        groups = _best(value, range(rule.num_groups), rule.topk_groups)
        chosen.append(_best(keys, [e for g in sorted(groups) for e in group_of[g]], rule.top_k))
    return chosen


def weights(logits_TE: Tensor, chosen: Sequence[Sequence[int]], rule: Rule) -> Tensor:
    """[T, K], the order of `chosen`."""
    mask_TE = torch.zeros_like(logits_TE)
    for token, experts in enumerate(chosen):
        mask_TE[token, list(experts)] = 1
    if rule.score == "softmax" and not rule.pre_softmax:
        exp_TE = torch.exp(logits_TE - logits_TE.detach().amax(1, keepdim=True)) * mask_TE
        all_TE = exp_TE / exp_TE.sum(1, keepdim=True)
    else:
        all_TE = scores(logits_TE, rule) * mask_TE
        if rule.renormalize and rule.top_k > 1:
            all_TE = all_TE / (all_TE.sum(1, keepdim=True) + 1e-20)
    rows = [torch.stack([all_TE[t, e] for e in experts]) for t, experts in enumerate(chosen)]
    return rule.scaling * (torch.stack(rows) if rows else all_TE[:, : rule.top_k])


def keep(
    chosen: Sequence[Sequence[int]], weights_TK: Tensor, num_experts: int, factor: float, by: str
) -> list[list[bool]]:
    """Which slots the experts keep of one rank's tokens; -1 in `chosen` is a slot of padding."""
    top_k = weights_TK.shape[1]
    tokens = sum(any(e >= 0 for e in experts) for experts in chosen)
    capacity = math.ceil(factor * tokens * top_k / num_experts)
    kept = [[False] * top_k for _ in chosen]
    values = weights_TK.tolist()
    for expert in range(num_experts):
        slots = [(t, k) for t, row in enumerate(chosen) for k, e in enumerate(row) if e == expert]
        if by == "weight":
            slots.sort(key=lambda tk: (-values[tk[0]][tk[1]], tk))
        for t, k in slots[:capacity]:
            kept[t][k] = True
    return kept


def shares(logits_TE: Tensor, rule: Rule) -> Tensor:
    """The probabilities of the balancing losses: rows that add up to 1."""
    if rule.score == "softmax":
        return scores(logits_TE, Rule(top_k=rule.top_k))
    raw_TE = scores(logits_TE, rule)
    return raw_TE / (raw_TE.sum(1, keepdim=True) + 1e-20)


def balancing_loss(
    probs_TE: Tensor, chosen: Sequence[Sequence[int]], load: Sequence[Sequence[int]] | None = None
) -> Tensor:
    """E * sum over e of (fraction of slots that chose e) * (mean probability of e) over real tokens.

    The fractions are those of `load`, where it is given: the choices of more tokens than these. A token whose
    choices are -1 is no token.
    """
    E = probs_TE.shape[1]
    real = [t for t, experts in enumerate(chosen) if experts[0] >= 0]
    slots = [e for experts in (chosen if load is None else load) for e in experts if e >= 0]
    if not real:
        return probs_TE.sum() * 0
    terms = [slots.count(e) / len(slots) * probs_TE[real, e].sum() / len(real) for e in range(E)]
    return E * torch.stack(terms).sum()


def sequence_loss(probs_TE: Tensor, chosen: Sequence[Sequence[int]], seq_len: int) -> Tensor:
    """The mean of `balancing_loss` over the sequences that have a real token."""
    starts = [s for s in range(0, len(chosen), seq_len) if any(c[0] >= 0 for c in chosen[s : s + seq_len])]
    each = [balancing_loss(probs_TE[s : s + seq_len], chosen[s : s + seq_len]) for s in starts]
    return torch.stack(each).mean() if each else probs_TE.sum() * 0


def z_loss(logits_TE: Tensor, real: Sequence[bool]) -> Tensor:
    """The mean of log(sum exp(logits))^2 over real tokens."""
    terms = [
        torch.log(torch.exp(row).sum()) ** 2 for row, is_real in zip(logits_TE, real, strict=True) if is_real
    ]
    return torch.stack(terms).mean() if terms else logits_TE.sum() * 0


def moved_bias(bias_E: Sequence[float], counts_E: Sequence[int], rate: float) -> list[float]:
    """Up by `rate` below the mean load, down above it, still at it."""
    total, E = sum(counts_E), len(counts_E)
    return [b + rate * ((total > c * E) - (total < c * E)) for b, c in zip(bias_E, counts_E, strict=True)]
