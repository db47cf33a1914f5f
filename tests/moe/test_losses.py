"""The router's losses: against fp64 with gradients, and what each of them is invariant to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import flexep
from flexep.errors import ArgumentError
from flexep.moe.router import Router
from flexep.moe.router_config import LOSSES, RouterConfig
from flexep.ref import router as ref
from tests.moe.draws import KINDS, clear_logits, generator, rule_of, scaled_close

E, SEQ = 8, 5
COEFFICIENTS = {"aux_loss": 0.3, "seq_aux_loss": 0.2, "global_aux_loss": 0.7, "z_loss": 0.05}


def make(ranks: int | None = None, **options: Any) -> Router:
    """A router whose logits are its tokens, so that a gradient of x is one of the logits, and of the weight too."""
    config = RouterConfig(**{"num_experts": E, "top_k": 3, **options})
    group = None if ranks is None else flexep.Group.local(ranks)
    router = Router(config, hidden=E, group=group)
    with torch.no_grad():
        router.weight.copy_(torch.eye(E))
    return router


def tokens(num_tokens: int, seed: int, **options: Any) -> torch.Tensor:
    return clear_logits(num_tokens, RouterConfig(**{"num_experts": E, "top_k": 3, **options}), None, seed)


def padding(num_tokens: int, seed: int) -> torch.Tensor:
    return torch.rand(num_tokens, generator=generator(seed)) < 0.3


def oracle(x_TH: torch.Tensor, mask_T: torch.Tensor, config: RouterConfig) -> dict[str, torch.Tensor]:
    """{name: loss in fp64} of one batch, coefficients included."""
    rule = rule_of(config)
    chosen = ref.choose(x_TH, rule)
    chosen = [[-1] * len(row) if gone else row for row, gone in zip(chosen, mask_T.tolist(), strict=True)]
    probs_TE = ref.shares(x_TH, rule)
    values = {
        "aux_loss": ref.balancing_loss(probs_TE, chosen),
        "seq_aux_loss": ref.sequence_loss(probs_TE, chosen, SEQ),
        "global_aux_loss": ref.balancing_loss(probs_TE, chosen),
        "z_loss": ref.z_loss(x_TH, [not gone for gone in mask_T.tolist()]),
    }
    return {name: getattr(config, name) * values[name] for name in LOSSES if getattr(config, name)}


def gradient_of_losses(
    router: Router, parts: Sequence[torch.Tensor], masks: Any
) -> tuple[dict, torch.Tensor]:
    """(values, gradient of all tokens) where the weights themselves get a zero gradient: the losses' alone."""
    parts = [part.clone().requires_grad_() for part in parts]
    done = router(parts, masks, seq_len=SEQ)
    sum((routing.weights * 0).sum() for routing in done).backward()
    return router.losses, torch.cat([part.grad for part in parts])


@settings(max_examples=25)
@given(
    st.sampled_from(KINDS), st.sampled_from(LOSSES), st.integers(0, 4), st.booleans(), st.integers(0, 2**16)
)
def test_each_loss_matches_fp64_with_gradients(
    kind: dict, name: str, num_sequences: int, masked: bool, seed: int
) -> None:
    x_TH = tokens(num_sequences * SEQ, seed, **kind)
    mask_T = padding(len(x_TH), seed) if masked else torch.zeros(len(x_TH), dtype=torch.bool)
    router = make(1, **kind, **{name: COEFFICIENTS[name]})
    values, grad = gradient_of_losses(router, [x_TH], [mask_T])
    wide_TH = x_TH.double().requires_grad_()
    expected = oracle(wide_TH, mask_T, router.config)
    assert values.keys() == expected.keys() == {name}
    assert values[name].dtype == torch.float32
    assert values[name].shape == ()
    scaled_close(values[name], expected[name].detach(), 2e-6)
    expected[name].backward()
    scaled_close(grad, wide_TH.grad, 5e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cut", [(20,), (10, 0, 10), (5, 5, 5, 5), (0, 20)])
def test_any_number_of_ranks_gives_the_losses_of_one(kind: dict, cut: tuple[int, ...]) -> None:
    """Shares of ranks add up to the losses of the whole batch; so do their gradients."""
    x_TH, mask_T = tokens(20, 7, **kind), padding(20, 8)
    one, grad_one = gradient_of_losses(make(1, **kind, **COEFFICIENTS), [x_TH], [mask_T])
    router = make(len(cut), **kind, **COEFFICIENTS)
    many, grad_many = gradient_of_losses(router, x_TH.split(cut), mask_T.split(cut))
    assert one.keys() == set(LOSSES)
    for name in LOSSES:
        torch.testing.assert_close(many[name], one[name], rtol=1e-6, atol=0)
    scaled_close(grad_many, grad_one, 2e-6)
    wide_TH = x_TH.double().requires_grad_()
    sum(oracle(wide_TH, mask_T, router.config).values()).backward()
    scaled_close(grad_many, wide_TH.grad, 5e-6)


@pytest.mark.parametrize("ranks", [1, 2])
def test_padding_changes_nothing(ranks: int) -> None:
    """Whatever padding holds, NaN included, and wherever it lies; it gets no gradient."""
    x_TH, mask_T = tokens(20, 9), padding(20, 10)
    results = []
    for filler in (0.0, 1e30, torch.nan, torch.inf):
        filled_TH = torch.where(mask_T[:, None], filler, x_TH)
        router = make(ranks, **COEFFICIENTS, bias_rate=0.1, capacity_factor=0.7)
        size = 20 // ranks
        values, grad = gradient_of_losses(router, filled_TH.split(size), mask_T.split(size))
        routed = router.eval()(list(filled_TH.split(size)), list(mask_T.split(size)))
        both = [torch.cat([r.idx for r in routed]), torch.cat([r.weights for r in routed])]
        results.append([*values.values(), grad, router.weight.grad, router.step_counts, *both])
        assert torch.equal(grad[mask_T], torch.zeros_like(grad[mask_T]))
        assert (both[0][mask_T] == -1).all()
        assert router.step_tokens.item() == (~mask_T).sum()
    for other in results[1:]:
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(results[0], other, strict=True))


def test_a_batch_with_padding_is_the_batch_without_it() -> None:
    """All losses but the one over sequences, which need their places; and the choice, whatever its mode."""
    x_TH, mask_T = tokens(20, 11), padding(20, 12)
    for mode in ({}, {"force_balanced": True}, {"capacity_factor": 0.6}):
        options = {**{n: c for n, c in COEFFICIENTS.items() if n != "seq_aux_loss"}, **mode}
        padded, short = make(**options), make(**options)
        with_it, without = padded(x_TH, mask_T), short(x_TH[~mask_T])
        assert torch.equal(with_it.idx[~mask_T], without.idx)
        torch.testing.assert_close(with_it.weights[~mask_T], without.weights)
        for name, value in padded.losses.items():
            torch.testing.assert_close(value, short.losses[name], rtol=1e-6, atol=0)


def test_nothing_but_padding_is_no_loss() -> None:
    x_TH, mask_T = tokens(5, 13), torch.ones(5, dtype=torch.bool)
    values, grad = gradient_of_losses(make(1, **COEFFICIENTS), [x_TH], [mask_T])
    assert {name: value.item() for name, value in values.items()} == dict.fromkeys(LOSSES, 0.0)
    assert torch.equal(grad, torch.zeros_like(grad))


def accumulate(router: Router, parts: Sequence[torch.Tensor], masks: Any, late: bool) -> torch.Tensor:
    """The router's gradient after the micro-batches of a step; `late`: all forwards before any backward."""
    total = sum(int((~mask).sum()) for mask in masks)
    pending = []
    for part, mask in zip(parts, masks, strict=True):
        router.loss_scale = int((~mask).sum()) / total
        pending.append((router(part, mask, seq_len=SEQ).weights * 0).sum())
        if not late:
            pending.pop().backward()
    for out in pending:
        out.backward()
    return router.weight.grad


@pytest.mark.parametrize("name", ["global_aux_loss", "z_loss"])
def test_micro_batches_of_any_size_give_the_gradient_of_the_whole(name: str) -> None:
    """The loss over the step does so where backward follows all forwards, z loss always."""
    x_TH, mask_T = tokens(20, 14), padding(20, 15)
    whole = make(**{name: 0.5})
    expected = accumulate(whole, [x_TH], [mask_T], late=False)
    for cut in ((10, 10), (5, 15), (5, 5, 5, 5)):
        router = make(**{name: 0.5})
        ours = accumulate(router, x_TH.split(cut), mask_T.split(cut), late=True)
        scaled_close(ours, expected, 2e-6)
        if name == "global_aux_loss":
            assert torch.equal(router.step_counts, whole.step_counts)
            assert router.step_tokens == whole.step_tokens
    if name == "z_loss":
        parts = (x_TH.split(5), mask_T.split(5))
        scaled_close(accumulate(make(**{name: 0.5}), *parts, late=False), expected, 2e-6)


def test_micro_batches_of_whole_sequences_give_the_loss_over_sequences() -> None:
    x_TH, mask_T = tokens(20, 24), torch.zeros(20, dtype=torch.bool)
    expected = accumulate(make(seq_aux_loss=0.5), [x_TH], [mask_T], late=False)
    for size in (5, 10):
        ours = accumulate(make(seq_aux_loss=0.5), x_TH.split(size), mask_T.split(size), late=False)
        scaled_close(ours, expected, 2e-6)


def test_the_loss_over_the_step_uses_all_it_has_counted() -> None:
    """Backward right after its forward: the micro-batch's probabilities against the counts of it and those before."""
    parts = tokens(20, 16).split(10)
    router = make(global_aux_loss=0.5)
    for number, part in enumerate(parts):
        router.zero_grad()
        x_TH = part.clone().requires_grad_()
        (router(x_TH).weights * 0).sum().backward()
        wide = [p.double().requires_grad_() for p in parts[: number + 1]]
        rule = rule_of(router.config)
        load = [row for p in wide for row in ref.choose(p, rule)]
        loss = 0.5 * ref.balancing_loss(ref.shares(wide[-1], rule), ref.choose(wide[-1], rule), load)
        loss.backward()
        scaled_close(router.losses["global_aux_loss"], loss.detach(), 2e-6)
        scaled_close(x_TH.grad, wide[-1].grad, 5e-6)
    router.end_step()
    assert router.step_counts.tolist() == [0] * E
    again = make(global_aux_loss=0.5)
    router(parts[0])
    again(parts[0])
    assert torch.equal(router.losses["global_aux_loss"], again.losses["global_aux_loss"])


def test_a_backward_after_the_step_reads_its_own_counts() -> None:
    grads = []
    for late in (False, True):
        router = make(global_aux_loss=0.5)
        x_TH = tokens(10, 17).requires_grad_()
        out = (router(x_TH).weights * 0).sum()
        if late:
            router.end_step()
        out.backward()
        grads.append(x_TH.grad)
    assert torch.equal(*grads)


def test_micro_batches_of_the_per_call_loss_are_means_of_means() -> None:
    """aux_loss promises no more: it judges each call by the counts of that call alone."""
    parts = tokens(20, 18).split(10)
    router, mask = make(aux_loss=0.5), torch.zeros(10, dtype=torch.bool)
    ours = accumulate(router, parts, [mask, mask], late=True)
    alone = []
    for part in parts:
        one = make(aux_loss=0.5)
        alone.append(accumulate(one, [part], [mask], late=False))
    scaled_close(ours, (alone[0] + alone[1]) / 2, 2e-6)


def test_losses_do_not_change_the_weights_and_add_to_their_gradient() -> None:
    x_TH = tokens(10, 19)
    plain, lossy = make(), make(**COEFFICIENTS)
    grad_TK = torch.randn(10, 3, generator=generator(20))
    for router in (plain, lossy):
        done = router(x_TH, seq_len=SEQ)
        done.weights.backward(grad_TK)
        assert torch.equal(done.weights, plain(x_TH).weights)
    _, only = gradient_of_losses(make(1, **COEFFICIENTS), [x_TH], None)
    total = lossy.weight.grad - plain.weight.grad
    scaled_close(total, only.t() @ x_TH, 5e-6)


def test_the_scale_reaches_the_losses_alone() -> None:
    x_TH = tokens(10, 21)
    grads = []
    for scale in (1.0, 0.25):
        router = make(1, **COEFFICIENTS)
        router.loss_scale = scale
        values, grad = gradient_of_losses(router, [x_TH], None)
        grads.append((values, grad))
    assert grads[0][0] == grads[1][0]
    torch.testing.assert_close(grads[0][1] * 0.25, grads[1][1])


@pytest.mark.parametrize("how", ["eval", "no_grad"])
def test_nothing_counts_outside_training(how: str) -> None:
    router = make(**COEFFICIENTS, bias_rate=0.1)
    if how == "eval":
        router.eval()
    with torch.set_grad_enabled(how != "no_grad"):
        router(tokens(10, 22))
    assert router.losses == {}
    assert router.step_tokens == 0


@pytest.mark.parametrize("seq_len", [None, 0, 3])
def test_refuses_sequences_that_do_not_fit(seq_len: int | None) -> None:
    with pytest.raises(ArgumentError, match=f"seq_len = {seq_len}"):
        make(seq_aux_loss=0.1)(tokens(10, 23), seq_len=seq_len)
