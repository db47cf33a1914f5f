"""What a router does, as one frozen value that checks itself."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flexep.errors import ArgumentError

SCORES = ("softmax", "sigmoid", "sqrt_softplus")
GROUP_SCORES = ("top2", "max")
DROP_BY = ("weight", "position")
JITTER_AT = ("input", "logits")
LOSSES = ("aux_loss", "seq_aux_loss", "global_aux_loss", "z_loss")


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """How tokens choose experts. docs/router.md has the formulae.

    Attributes:
        num_experts, top_k: E and K; a token chooses K distinct experts.
        score: what a logit becomes: "softmax", "sigmoid" or "sqrt_softplus".
        pre_softmax: with softmax: over all experts before the choice, or else over the chosen ones after it.
        renormalize: the K weights of a token are divided by their sum. Post-softmax weights add up to 1 anyway, and
            one weight alone is left as it is, because the constant 1 would teach the router nothing.
        scaling: factor of all weights, applied last.
        num_groups, topk_groups: experts are E / num_groups consecutive ones a group; a token chooses among those of
            its best `topk_groups` groups.
        group_score: a group is as good as the sum of its two best experts ("top2") or as its best ("max").
        bias_rate: step of the expert bias, which is added for choosing only; None: there is no bias.
        aux_loss, seq_aux_loss, global_aux_loss, z_loss: coefficients; 0 is off.
        capacity_factor: an expert takes ceil(capacity_factor * tokens * K / E) slots of a rank; None: all.
        drop_by: slots kept: those of the largest weights ("weight") or of the first tokens ("position").
        pad_to_capacity: the layer pads every expert's rows to the capacity of max_tokens tokens on every rank.
        force_balanced: ignore the scores and deal tokens round-robin, for benchmarks.
        jitter: noise while training: "input" times uniform [1 - jitter, 1 + jitter], or "logits" plus
            jitter * standard normal. `jitter_at` says which.

    Raises:
        ArgumentError: a value outside its range, named.
    """

    num_experts: int
    top_k: int
    score: str = "softmax"
    pre_softmax: bool = True
    renormalize: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "top2"
    bias_rate: float | None = None
    aux_loss: float = 0.0
    seq_aux_loss: float = 0.0
    global_aux_loss: float = 0.0
    z_loss: float = 0.0
    capacity_factor: float | None = None
    drop_by: str = "weight"
    pad_to_capacity: bool = False
    force_balanced: bool = False
    jitter: float = 0.0
    jitter_at: str = "input"

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "num_groups", "topk_groups"):
            self._require(name, _is_int(getattr(self, name)), "an integer of at least 1")
        for name in ("pre_softmax", "renormalize", "pad_to_capacity", "force_balanced"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        choices = {"score": SCORES, "group_score": GROUP_SCORES, "drop_by": DROP_BY, "jitter_at": JITTER_AT}
        for name, allowed in choices.items():
            self._require(name, getattr(self, name) in allowed, f"one of {', '.join(allowed)}")
        for name in (*LOSSES, "jitter"):
            self._require(name, _is_number(getattr(self, name), 0), "a finite number of at least 0")
        self._require("scaling", _is_number(self.scaling) and self.scaling > 0, "a positive finite number")
        self._require(
            "bias_rate", self.bias_rate is None or _is_number(self.bias_rate, 0), "None or at least 0"
        )
        self._check_choice()
        factor = self.capacity_factor
        positive = factor is None or (_is_number(factor, 0) and factor > 0)
        self._require("capacity_factor", positive, "None or a positive number")
        self._require("pad_to_capacity", not (self.pad_to_capacity and factor is None), "a capacity_factor")

    def _check_choice(self) -> None:
        self._require(
            "top_k",
            self.top_k <= self.num_experts,
            f"at most num_experts = {self.num_experts}, as they differ",
        )
        divides = self.num_experts % self.num_groups == 0
        self._require("num_groups", divides, f"a divisor of num_experts = {self.num_experts}")
        self._require(
            "topk_groups", self.topk_groups <= self.num_groups, f"at most num_groups = {self.num_groups}"
        )
        within = self.topk_groups * (self.num_experts // self.num_groups)
        self._require(
            "topk_groups",
            within >= self.top_k,
            f"groups of at least top_k = {self.top_k} experts, not {within}",
        )
        after = self.score == "softmax" and not self.pre_softmax
        self._require(
            "pre_softmax",
            not (after and self.top_k == 1),
            "True where top_k = 1: a softmax over one is constant",
        )
        if self.score != "softmax":
            self._require("pre_softmax", self.pre_softmax, f"True: {self.score} scores each expert by itself")

    def _require(self, name: str, accepted: bool, expected: str) -> None:
        if not accepted:
            raise ArgumentError(name, getattr(self, name), expected)

    @property
    def balances(self) -> bool:
        """Whether counts outlive a call: for the expert bias, or for the loss over a whole step."""
        return self.bias_rate is not None or self.global_aux_loss > 0

    def capacity(self, num_tokens: int) -> int:
        """Slots that an expert takes of a rank with `num_tokens` tokens.

        Raises ArgumentError without a capacity_factor.
        """
        self._require("capacity_factor", self.capacity_factor is not None, "a positive number")
        assert self.capacity_factor is not None
        return math.ceil(self.capacity_factor * num_tokens * self.top_k / self.num_experts)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_number(value: object, least: float = -math.inf) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and value >= least
