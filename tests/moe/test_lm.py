"""The language model: causal, keyed initial values, any number of sequences."""

from __future__ import annotations

import pytest
import torch

import flexep
from flexep.errors import ArgumentError
from flexep.moe.layer import MoELayer
from flexep.moe.lm import ByteLM


class _OneRank(torch.nn.Module):
    """Rank 0 of a local group of one, so that the layer takes a tensor as it does in a process of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        group = flexep.Group.local(1)
        dispatcher = flexep.Dispatcher(
            group, num_experts=4, hidden=64, top_k=2, max_tokens=512, dtype=torch.float32, backend="alltoall"
        )
        self.layer = MoELayer(dispatcher, inner=32, seed=1, name=name)
        self.experts = self.layer.experts

    def forward(self, x_TH: torch.Tensor) -> torch.Tensor:
        return self.layer([x_TH])[0]


def make_model(hidden: int = 64) -> ByteLM:
    return ByteLM(_OneRank, hidden=hidden, num_layers=2, max_seq=16, dtype=torch.float32, seed=1)


def draw_bytes(num_sequences: int) -> torch.Tensor:
    return torch.randint(256, (num_sequences, 16), generator=torch.Generator().manual_seed(3))


def test_no_byte_sees_a_later_one() -> None:
    model = make_model()
    bytes_BS = draw_bytes(3)
    changed_BS = bytes_BS.clone()
    changed_BS[:, 10:] = (changed_BS[:, 10:] + 1) % 256
    logits, changed = model(bytes_BS), model(changed_BS)
    assert logits.shape == (3, 16, 256)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits[:, :10], changed[:, :10], rtol=1e-5, atol=1e-5)
    assert (logits[:, 10:] - changed[:, 10:]).abs().amax(-1).min() > 1e-3


def test_starts_near_the_uniform_guess() -> None:
    logits = make_model()(draw_bytes(4))
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), draw_bytes(4).flatten())
    assert abs(loss.item() - torch.tensor(256.0).log().item()) < 0.5


def test_every_parameter_has_a_gradient_even_without_sequences() -> None:
    model = make_model()
    copied, owned = model.split_parameters()
    assert len(copied) + len(owned) == len(list(model.parameters()))
    model(draw_bytes(0)).sum().backward()
    for parameter in (*copied, *owned):
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def test_initial_values_do_not_depend_on_what_was_drawn_before() -> None:
    torch.manual_seed(1)
    first = make_model().state_dict()
    torch.randn(7)
    for name, value in make_model().state_dict().items():
        assert torch.equal(value, first[name]), name


@pytest.mark.parametrize("hidden", [16, 65])
def test_refuses_a_width_without_heads(hidden: int) -> None:
    with pytest.raises(ArgumentError, match=f"hidden = {hidden}"):
        make_model(hidden)
