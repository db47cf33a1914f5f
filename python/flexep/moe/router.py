"""The router: which experts a token goes to, and with what weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexep.errors import ArgumentError
from flexep.group import DEFAULT_TIMEOUT, Group
from flexep.moe import losses
from flexep.moe.capacity import kept_slots
from flexep.moe.choose import choose, choose_and_weigh, deal, fusable, probabilities, weigh
from flexep.moe.counts import count_experts, sum_over_ranks
from flexep.moe.init import keyed_generator, keyed_normal
from flexep.moe.router_config import LOSSES, RouterConfig

BALANCING = ("aux_loss", "seq_aux_loss", "global_aux_loss")  # the losses that sum probabilities


class Routing(NamedTuple):
    """`idx` int32 [T, K], -1 where a token is padding or was dropped; `weights` fp32 [T, K], 0 there."""

    idx: Tensor
    weights: Tensor


class _Draft(NamedTuple):
    """One rank's routing before anything is known of the other ranks. chosen: int32 or int64 [T, K], -1 for padding.

    weights, probs: what the fused operation made; None where it was not taken, or not asked for probabilities.
    """

    logits_TE: Tensor
    chosen_TK: Tensor
    real_T: Tensor
    weights_TK: Tensor | None = None
    probs_TE: Tensor | None = None


class Router(nn.Module):
    """Chooses experts by a linear map. Weight, logits and all that follows are fp32 whatever the dtype of x.

    While training with gradients, the losses that `config` names enter the gradient by themselves, through the
    weights that are returned; `losses` holds their values. Counts are then summed over the ranks of `group`, so
    every rank must call, with any number of tokens.

    Args:
        config: what to do. hidden: H.
        group: ranks whose tokens are balanced together; None: this process alone. In a local group x, padding_mask
            and the result are lists, one of each a rank.
        timeout: seconds a wait for another rank may take. seed, name: what initial values and noise depend on.
        fused: take the operation that chooses and weighs in one pass (flexep.ops.route) where it applies: at most 32 of
            at most 16,384 experts, not dealt, on CUDA in a build with kernels. The composition that is taken otherwise
            gives the same bits.

    Attributes:
        bias: fp32 [E] buffer, or None; fp32 through every cast of the module. `end_step` moves it.
        step_counts, step_tokens: int64 [E] and [] buffers (or None): slots that chose each expert, and tokens, over
            all ranks and the calls of this optimizer step.
        losses: {name: fp32 scalar} of the last call, without gradient: the share of the ranks of this process.
        loss_scale: factor of the gradients of the losses; set it to the share that a micro-batch has in its step.
    """

    bias: Tensor | None
    step_counts: Tensor | None
    step_tokens: Tensor | None

    def __init__(
        self,
        config: RouterConfig,
        *,
        hidden: int,
        group: Group | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        seed: int = 0,
        name: str = "router",
        fused: bool = True,
    ) -> None:
        super().__init__()
        if hidden < 1:
            raise ArgumentError("hidden", hidden, "at least 1")
        self.config = config
        self.group = group
        self.timeout = timeout
        self.fused = fused
        self.loss_scale = 1.0
        self.losses: dict[str, Tensor] = {}
        self.weight = nn.Parameter(keyed_normal((config.num_experts, hidden), hidden**-0.5, seed, name))
        self.register_buffer("bias", None if config.bias_rate is None else torch.zeros(config.num_experts))
        counts = torch.zeros(config.num_experts, dtype=torch.int64) if config.balances else None
        self.register_buffer("step_counts", counts)
        self.register_buffer("step_tokens", torch.zeros((), dtype=torch.int64) if config.balances else None)
        self._noise_key = (seed, name, "jitter")
        self._noise: dict[tuple[int, torch.device], torch.Generator] = {}

    def forward(self, x: Any, padding_mask: Any = None, *, seq_len: int | None = None) -> Any:
        """x [T, H] of any float dtype -> Routing (lists of R in a local group).

        Args:
            padding_mask: bool [T], True where a token is padding: it chooses nothing, counts nowhere and may hold
                anything.
            seq_len: tokens of a sequence; x then holds whole sequences, one behind the other. Needed for
                seq_aux_loss.
        Raises: ArgumentError for x, padding_mask and seq_len; Timeout, PeerLost where counts are summed over processes.
        """
        is_local = self.group is not None and self.group.is_local
        xs = list(x) if is_local else [x]
        masks = (
            [None] * len(xs) if padding_mask is None else list(padding_mask) if is_local else [padding_mask]
        )
        self.losses = {}
        for x_TH, mask in zip(xs, masks, strict=True):
            self._check_rows(x_TH, mask)
        if self.counting and self.config.seq_aux_loss and seq_len is None:
            raise ArgumentError("seq_len", None, "the tokens of a sequence, for seq_aux_loss")
        self._check_seq_len(seq_len, xs)
        drafts = [
            self._draft(x_TH, mask, rank) for x_TH, mask, rank in zip(xs, masks, self._hosted, strict=True)
        ]
        added: list[Tensor | None] = [None] * len(drafts)
        if self.counting:
            added = self._count(drafts, seq_len)
        done = [self._finish(draft, loss) for draft, loss in zip(drafts, added, strict=True)]
        return done if is_local else done[0]

    @torch.no_grad()
    def end_step(self) -> None:
        """Call once an optimizer step, after it: moves the bias by the sign rule and forgets the step's counts.

        b_e += rate * sign(mean load - load of e), decided in integers. Every rank holds the same counts, so all
        move alike and nothing is sent.
        """
        if self.step_counts is None or self.step_tokens is None:
            return
        if self.bias is not None and self.config.bias_rate is not None:
            short_E = self.step_counts.sum() - self.config.num_experts * self.step_counts
            self.bias += self.config.bias_rate * short_E.sign()
        # New tensors: a backward that runs late still reads the counts of its own step.
        self.step_counts = torch.zeros_like(self.step_counts)
        self.step_tokens = torch.zeros_like(self.step_tokens)

    @property
    def counting(self) -> bool:
        """Whether a call now counts, and so sends something: training, with gradients, for a loss or a bias."""
        wanted = self.config.balances or any(getattr(self.config, name) for name in LOSSES)
        return wanted and self.training and torch.is_grad_enabled()

    @property
    def _hosted(self) -> Sequence[int]:
        return (0,) if self.group is None else self.group.hosted

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Casts reach the weight; the bias changes its device alone, for steps of 0.001 are lost in bf16."""
        bias = self.bias
        super()._apply(fn, recurse)
        if bias is not None and self.bias is not None and self.bias.dtype != torch.float32:
            self.bias = bias.to(self.bias.device)
        return self

    def _check_rows(self, x_TH: Tensor, padding_mask: Tensor | None) -> None:
        hidden = self.weight.shape[1]
        if x_TH.dim() != 2 or x_TH.shape[1] != hidden:
            raise ArgumentError("x.shape", tuple(x_TH.shape), f"(tokens, {hidden})")
        if not x_TH.is_floating_point():
            raise ArgumentError("x.dtype", x_TH.dtype, "a floating-point dtype")
        if padding_mask is None:
            return
        if padding_mask.dtype != torch.bool:
            raise ArgumentError("padding_mask.dtype", padding_mask.dtype, "torch.bool")
        if padding_mask.shape != x_TH.shape[:1]:
            raise ArgumentError("padding_mask.shape", tuple(padding_mask.shape), f"({x_TH.shape[0]},)")

    def _check_seq_len(self, seq_len: int | None, xs: Sequence[Tensor]) -> None:
        if seq_len is None:
            return
        if not isinstance(seq_len, int) or isinstance(seq_len, bool):
            raise ArgumentError("seq_len", seq_len, "an integer")
        if seq_len < 1 or any(x_TH.shape[0] % seq_len for x_TH in xs):
            raise ArgumentError("seq_len", seq_len, f"a divisor of the tokens, {[x.shape[0] for x in xs]}")

    def _draft(self, x_TH: Tensor, padding_mask: Tensor | None, rank: int) -> _Draft:
        config = self.config
        real_T = torch.ones(x_TH.shape[0], dtype=torch.bool, device=x_TH.device)
        if padding_mask is not None:
            real_T = ~padding_mask
            x_TH = losses.mask_rows(x_TH, real_T)  # so that a NaN there reaches neither logits nor gradients
        noisy = self.training and config.jitter > 0
        x_TH = x_TH.float()
        if noisy and config.jitter_at == "input":
            noise = torch.rand(x_TH.shape, device=x_TH.device, generator=self._generator(rank, x_TH.device))
            x_TH = x_TH * (1 + config.jitter * (2 * noise - 1))
        logits_TE = F.linear(x_TH, self.weight.float())
        if noisy and config.jitter_at == "logits":
            noise = torch.randn(
                logits_TE.shape, device=x_TH.device, generator=self._generator(rank, x_TH.device)
            )
            logits_TE = logits_TE + config.jitter * noise
        if self.fused and fusable(logits_TE, config):
            return self._draft_fused(logits_TE, padding_mask, real_T)
        if config.force_balanced:
            chosen_TK = deal(real_T, config, rank)
        else:
            chosen_TK = choose(logits_TE, config, self.bias)
        return _Draft(logits_TE, chosen_TK.masked_fill(~real_T[:, None], -1), real_T)

    def _draft_fused(self, logits_TE: Tensor, padding_mask: Tensor | None, real_T: Tensor) -> _Draft:
        with_probs = self.counting and any(getattr(self.config, name) for name in BALANCING)
        idx_TK, weights_TK, probs_TE = choose_and_weigh(
            logits_TE, self.config, self.bias, padding_mask, with_probs
        )
        return _Draft(logits_TE, idx_TK, real_T, weights_TK, probs_TE)

    def _generator(self, rank: int, device: torch.device) -> torch.Generator:
        """Each rank has noise of its own, which goes on from call to call."""
        key = (rank, device)
        if key not in self._noise:
            seed = keyed_generator(*self._noise_key, rank).initial_seed()
            self._noise[key] = torch.Generator(device).manual_seed(seed)
        return self._noise[key]

    def _count(self, drafts: Sequence[_Draft], seq_len: int | None) -> list[Tensor | None]:
        """Sums the counts over ranks and keeps them. Returns the loss to attach for each draft."""
        E = self.config.num_experts
        local = [
            torch.cat(
                [
                    count_experts(draft.chosen_TK, E),
                    draft.real_T.sum().view(1),
                    draft.real_T.view(-1, seq_len or 1).any(1).sum().view(1),
                ]
            )
            for draft in drafts
        ]
        counts_E, tokens, sequences = sum_over_ranks(local, self.group, self.timeout).split([E, 1, 1])
        step = losses.StepCounts(counts_E, tokens[0])
        if self.step_counts is not None and self.step_tokens is not None:
            step = losses.StepCounts(self.step_counts.add_(counts_E), self.step_tokens.add_(tokens[0]))
        each = [self._losses(draft, counts_E, tokens[0], sequences[0], step, seq_len) for draft in drafts]
        self.losses = {
            name: torch.stack([values[name].detach() for values in each]).sum() for name in each[0]
        }
        return [torch.stack(list(values.values())).sum() if values else None for values in each]

    def _losses(
        self,
        draft: _Draft,
        counts_E: Tensor,
        tokens: Tensor,
        sequences: Tensor,
        step: losses.StepCounts,
        seq_len: int | None,
    ) -> dict[str, Tensor]:
        """The losses whose coefficient is not 0, coefficient included: this rank's share of each."""
        config, K = self.config, self.config.top_k
        found = {}
        if any(getattr(config, name) for name in BALANCING):
            probs_TE = _probs(draft, config)
            prob_sum_E = probs_TE.sum(0)
        if config.aux_loss:
            found["aux_loss"] = config.aux_loss * losses.balance(prob_sum_E, counts_E, tokens, K)
        if config.seq_aux_loss:
            assert seq_len is not None
            mean = losses.sequence_balance(probs_TE, draft.chosen_TK, draft.real_T, seq_len, sequences)
            found["seq_aux_loss"] = config.seq_aux_loss * mean
        if config.global_aux_loss:
            found["global_aux_loss"] = config.global_aux_loss * losses.step_balance(
                prob_sum_E, step, tokens, K
            )
        if config.z_loss:
            found["z_loss"] = config.z_loss * losses.z_value(draft.logits_TE, draft.real_T, tokens)
        return found

    def _finish(self, draft: _Draft, loss: Tensor | None) -> Routing:
        """Weights, the loss behind them, and what the capacity drops."""
        weights_TK = draft.weights_TK
        if weights_TK is None:
            weights_TK = weigh(draft.logits_TE, draft.chosen_TK.clamp(min=0), self.config)
            weights_TK = losses.mask_rows(weights_TK, draft.real_T)
        if loss is not None:
            weights_TK = losses.attach_loss(weights_TK, loss, self.loss_scale)
        idx_TK = draft.chosen_TK.to(torch.int32)
        if self.config.capacity_factor is None:
            return Routing(idx_TK, weights_TK)
        kept_TK = kept_slots(idx_TK, weights_TK, draft.real_T, self.config)
        return Routing(idx_TK.masked_fill(~kept_TK, -1), weights_TK.masked_fill(~kept_TK, 0.0))


def _probs(draft: _Draft, config: RouterConfig) -> Tensor:
    """fp32 [T, E], 0 for padding."""
    if draft.probs_TE is not None:
        return draft.probs_TE
    return losses.mask_rows(probabilities(draft.logits_TE, config), draft.real_T)
