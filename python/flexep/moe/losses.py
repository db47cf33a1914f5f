"""Losses of the router. Each value is this rank's share: added over ranks, the shares are the loss of the batch.

So the gradients of a replicated router, added over ranks, are those of one rank that holds the whole batch. Counts
are integers, already summed over ranks, and carry no gradient. Shape letters: T tokens, E experts, K slots,
B sequences, S tokens a sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def balance(prob_sum_E: Tensor, counts_E: Tensor, num_tokens: Tensor, top_k: int) -> Tensor:
    """E * sum over e of f_e * P_e, where f_e = counts / (K * tokens) and P_e = prob_sum / tokens. fp32 [].

    1 when the load is even. Leading dimensions are kept. No tokens: 0. The fractions are formed in fp64, from
    integers of any size.
    """
    tokens = num_tokens.clamp(min=1).double()
    factor_E = counts_E * counts_E.shape[-1] / (top_k * tokens * tokens)[..., None]
    return (prob_sum_E * factor_E.float()).sum(dim=-1)


class _StepBalance(torch.autograd.Function):
    """`balance` with the counts of the step, read again when backward runs, by when more may have been counted."""

    @staticmethod
    def forward(ctx: Any, prob_sum_E: Tensor, step: StepCounts, num_tokens: Tensor, top_k: int) -> Tensor:
        ctx.step, ctx.top_k = step, top_k
        ctx.save_for_backward(num_tokens)
        return (prob_sum_E * step.factor(num_tokens, top_k)).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        (num_tokens,) = ctx.saved_tensors
        return grad * ctx.step.factor(num_tokens, ctx.top_k), None, None, None


class StepCounts:
    """What the micro-batches of one optimizer step have counted so far: `counts_E` int64 [E], `tokens` int64 []."""

    def __init__(self, counts_E: Tensor, tokens: Tensor) -> None:
        self.counts_E = counts_E
        self.tokens = tokens

    def factor(self, num_tokens: Tensor, top_k: int) -> Tensor:
        """E * f_e / num_tokens, fp32 [E]; f from the step, num_tokens of the micro-batch."""
        scale = self.counts_E.shape[-1] / (
            top_k * self.tokens.clamp(min=1) * num_tokens.clamp(min=1).double()
        )
        return (self.counts_E * scale).float()


def step_balance(prob_sum_E: Tensor, step: StepCounts, num_tokens: Tensor, top_k: int) -> Tensor:
    """As `balance`, with f_e from all micro-batches that the step has counted when the gradient is taken."""
    return _StepBalance.apply(prob_sum_E, step, num_tokens, top_k)


def sequence_balance(
    probs_TE: Tensor, idx_TK: Tensor, real_T: Tensor, seq_len: int, num_sequences: Tensor
) -> Tensor:
    """The mean over sequences of `balance` within each. fp32 [].

    Tokens are whole sequences of `seq_len` each, one behind the other; a sequence without a real token is none.
    num_sequences int64 []: sequences of all ranks.
    """
    E, top_k = probs_TE.shape[1], idx_TK.shape[1]
    tokens_B = real_T.view(-1, seq_len).sum(1)
    chosen_TE = torch.zeros(probs_TE.shape[0], E + 1, dtype=torch.int64, device=probs_TE.device)
    chosen_TE = chosen_TE.scatter_(1, torch.where(idx_TK < 0, E, idx_TK.long()), 1)[:, :E]
    counts_BE = chosen_TE.view(-1, seq_len, E).sum(1)
    prob_sum_BE = mask_rows(probs_TE, real_T).view(-1, seq_len, E).sum(1)
    return balance(prob_sum_BE, counts_BE, tokens_B, top_k).sum() / num_sequences.clamp(min=1)


def z_value(logits_TE: Tensor, real_T: Tensor, num_tokens: Tensor) -> Tensor:
    """The mean over all tokens of logsumexp(logits)^2, fp32 []; num_tokens int64 []: tokens of all ranks."""
    squares_T = torch.logsumexp(logits_TE, dim=-1).square()
    return mask_rows(squares_T, real_T).sum() / num_tokens.clamp(min=1)


def mask_rows(values: Tensor, real_T: Tensor) -> Tensor:
    """Rows of tokens that are no tokens, set to 0 whatever they hold."""
    return values.masked_fill(~real_T.view(-1, *[1] * (values.dim() - 1)), 0)


class _Attach(torch.autograd.Function):
    """Passes `out` on; in backward the loss receives `scale` whatever the gradient of `out`."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, loss: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return out.view_as(out)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad, torch.full((), ctx.scale, dtype=torch.float32, device=grad.device), None


def attach_loss(out: Tensor, loss: Tensor, scale: float = 1.0) -> Tensor:
    """`out` itself, through whose backward `scale * loss` (an fp32 scalar) is minimised as well."""
    return _Attach.apply(out, loss, scale)
