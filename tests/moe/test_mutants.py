"""Bugs planted in the router and the layer from outside: a named test of this folder must fail for each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexep.moe import capacity, choose, counts, expert_rows, experts, layer, losses, router
from tests.moe import test_bias, test_capacity, test_choose, test_expert_rows, test_layer_parts, test_losses

Plant = tuple[Any, str, Callable[..., Any]]
ATTACH = losses.attach_loss  # as it is, where its place is taken by a plant


def _unstable(values: torch.Tensor, k: int) -> torch.Tensor:
    """Of equal values the higher index."""
    return (
        values.shape[-1]
        - 1
        - torch.sort(values.flip(-1), dim=-1, descending=True, stable=True).indices[..., :k]
    )


def _biased_weights(logits_TE: torch.Tensor, idx_TK: torch.Tensor, config: Any) -> torch.Tensor:
    return choose.weigh(logits_TE, idx_TK, config) + 0.01


def _groups_masked_with_zero(logits_TE: torch.Tensor, config: Any, bias_E: Any = None) -> torch.Tensor:
    key_TE = choose.score(logits_TE, config) + (0 if bias_E is None else bias_E)
    return choose.largest(key_TE.masked_fill(~choose._in_best_groups(key_TE, config), 0.0), config.top_k)


def _no_sum_over_ranks(tensors: Any, group: Any, timeout: float) -> torch.Tensor:
    return tensors[0].clone()


def _float_counts(idx_TK: torch.Tensor, num_experts: int) -> torch.Tensor:
    return counts.count_experts(idx_TK, num_experts).float()


def _padding_counts(values: torch.Tensor, real_T: torch.Tensor) -> torch.Tensor:
    return values


def _detached(out: torch.Tensor, loss: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return out


def _unscaled(out: torch.Tensor, loss: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
    return ATTACH(out, loss)


def _mean_of_squares(logits_TE: torch.Tensor, real_T: torch.Tensor, num_tokens: torch.Tensor) -> torch.Tensor:
    return torch.logsumexp(logits_TE, -1).square().mean()


def _counts_of_forward(
    prob_sum_E: torch.Tensor, step: Any, num_tokens: torch.Tensor, top_k: int
) -> torch.Tensor:
    return (prob_sum_E * step.factor(num_tokens, top_k)).sum()


def _one_too_many(
    idx_TK: torch.Tensor, weights_TK: torch.Tensor, real_T: torch.Tensor, config: Any
) -> torch.Tensor:
    return capacity.kept_slots(idx_TK, weights_TK, torch.ones_like(real_T), config)


def _zero_is_empty(
    idx_TK: torch.Tensor, weights_TK: torch.Tensor, real_T: torch.Tensor, config: Any
) -> torch.Tensor:
    return capacity.kept_slots(idx_TK, weights_TK, real_T, config) & (weights_TK != 0)


def _bias_on_padding(counts_L: torch.Tensor, padded_L: torch.Tensor, num_rows: int) -> Any:
    return expert_rows.owners(padded_L, padded_L, num_rows)


def _unmasked(x: torch.Tensor, real_T: torch.Tensor) -> torch.Tensor:
    return x


MUTANTS: dict[str, tuple[Plant, Callable[[], None]]] = {
    "the higher id wins ties": ((choose, "largest", _unstable), test_choose.test_ties_in_words),
    "the higher id wins ties among groups": (
        (choose, "largest", _unstable),
        lambda: test_choose.test_ties_go_to_the_lower_id(),
    ),
    "bias in the weights": (
        (test_choose, "weigh", _biased_weights),
        test_choose.test_the_bias_chooses_and_does_not_weigh,
    ),
    "groups masked with 0": (
        (test_choose, "choose", _groups_masked_with_zero),
        test_choose.test_an_expert_outside_the_groups_is_never_chosen,
    ),
    "counts of one rank alone": (
        (router, "sum_over_ranks", _no_sum_over_ranks),
        lambda: test_bias.test_ranks_and_micro_batches_do_not_matter((20, 40)),
    ),
    "losses by the counts of one rank": (
        (router, "sum_over_ranks", _no_sum_over_ranks),
        lambda: test_losses.test_any_number_of_ranks_gives_the_losses_of_one(
            {"score": "sigmoid"}, (10, 0, 10)
        ),
    ),
    "padding in the sums": (
        (losses, "mask_rows", _padding_counts),
        lambda: test_losses.test_padding_changes_nothing(1),
    ),
    "padding in the z loss": (
        (losses, "z_value", _mean_of_squares),
        lambda: test_losses.test_a_batch_with_padding_is_the_batch_without_it(),
    ),
    "losses without gradient": (
        (losses, "attach_loss", _detached),
        lambda: test_losses.test_any_number_of_ranks_gives_the_losses_of_one({"score": "sigmoid"}, (20,)),
    ),
    "losses without their scale": (
        (losses, "attach_loss", _unscaled),
        test_losses.test_the_scale_reaches_the_losses_alone,
    ),
    "the step's counts read too early": (
        (losses, "step_balance", _counts_of_forward),
        lambda: test_losses.test_micro_batches_of_any_size_give_the_gradient_of_the_whole("global_aux_loss"),
    ),
    "padding in the capacity": (
        (test_capacity, "kept_slots", _one_too_many),
        lambda: test_capacity.test_kept_set_matches_the_oracle(),
    ),
    "a weight of zero is empty": (
        (router, "kept_slots", _zero_is_empty),
        test_capacity.test_a_zero_weight_is_a_weight,
    ),
    "bias gradients from padding": (
        (experts, "owners", _bias_on_padding),
        lambda: test_expert_rows.test_padding_gives_experts_with_biases_no_gradient("grouped", False),
    ),
    "the shared expert sees padding": (
        (layer, "mask_rows", _unmasked),
        lambda: test_layer_parts.test_padding_is_not_dispatched_and_reaches_nothing("alltoall"),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_planted_bug_is_seen(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (where, name, planted), test = MUTANTS[mutant]
    test()
    monkeypatch.setattr(where, name, planted)
    with pytest.raises(AssertionError):
        test()


def test_float_counts_lose_what_integers_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one decision that hangs on it: 2**33 + 1 slots against 2**33."""
    assert counts.count_experts(torch.zeros(1, 1), 2).dtype == torch.int64
    test_bias.test_one_slot_more_than_the_mean_decides()
    monkeypatch.setattr(torch, "int64", torch.float32)  # buffers of the step are made with it
    with pytest.raises(AssertionError):
        test_bias.test_one_slot_more_than_the_mean_decides()
