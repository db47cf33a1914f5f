"""The text and the batches: same for everybody, cut by sequence."""

from __future__ import annotations

import hashlib

import pytest
import torch

from flexep.errors import ArgumentError
from flexep.training.text import cut_batch, load_text, share

TEXT = load_text()


def test_text_is_english_and_named_by_its_digest() -> None:
    raw = bytes(TEXT.data.numpy())
    assert len(raw) > 100_000
    assert hashlib.sha256(raw).hexdigest() == TEXT.sha256
    assert raw.count(b" the ") > 1000


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7])
def test_ranks_cut_the_same_global_batch(ranks: int) -> None:
    def cut(rank: int, of: int) -> tuple[torch.Tensor, torch.Tensor]:
        return cut_batch(TEXT, seed=5, step=2, batch=5, seq=32, rank=rank, ranks=of)

    for whole, parts in zip(
        cut(0, 1), zip(*(cut(rank, ranks) for rank in range(ranks)), strict=True), strict=True
    ):
        assert whole.shape == (5, 32)
        assert torch.equal(torch.cat(parts), whole)
    inputs, targets = cut(0, 1)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_steps_and_seeds_differ() -> None:
    def first(seed: int, step: int) -> torch.Tensor:
        return cut_batch(TEXT, seed=seed, step=step, batch=4, seq=64, rank=0, ranks=1)[0]

    assert torch.equal(first(0, 3), first(0, 3))
    assert not torch.equal(first(0, 3), first(0, 4))
    assert not torch.equal(first(0, 3), first(1, 3))


def test_share_covers_everything_once() -> None:
    for count in range(9):
        for ranks in range(1, 6):
            got = [i for rank in range(ranks) for i in range(count)[share(count, rank, ranks)]]
            assert got == list(range(count))


def test_a_sequence_longer_than_the_text_is_refused() -> None:
    longest = TEXT.data.numel() - 1
    assert cut_batch(TEXT, seed=0, step=0, batch=1, seq=longest, rank=0, ranks=1)[0].shape == (1, longest)
    with pytest.raises(ArgumentError, match=f"seq = {longest + 1}"):
        cut_batch(TEXT, seed=0, step=0, batch=1, seq=longest + 1, rank=0, ranks=1)
