"""The training text, which every Python ships, and the batches cut from it."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from flexep.errors import ArgumentError, Unavailable
from flexep.moe.init import keyed_generator


@dataclass(frozen=True)
class Text:
    """`data` uint8 [n] on the CPU, and the SHA-256 of those bytes."""

    data: Tensor
    sha256: str


def load_text() -> Text:
    """The help topics of this Python, in the order of their names, as UTF-8.

    The text differs between Python versions, so a loss curve belongs to a `sha256`.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise Unavailable(
            "this Python was installed without pydoc_data.topics, the text to train on; "
            "install the full standard library"
        ) from error
    raw = "\n".join(topics[name] for name in sorted(topics)).encode()
    return Text(torch.frombuffer(bytearray(raw), dtype=torch.uint8), hashlib.sha256(raw).hexdigest())


def share(count: int, rank: int, ranks: int) -> slice:
    """The contiguous part of `count` things that `rank` gets; the first `count mod ranks` ranks get one more.

    >>> [share(5, rank, 3) for rank in range(3)]
    [slice(0, 2, None), slice(2, 4, None), slice(4, 5, None)]
    """
    each, more = divmod(count, ranks)
    begin = rank * each + min(rank, more)
    return slice(begin, begin + each + (rank < more))


def num_windows(text: Text, seq: int) -> int:
    """How many windows of `seq` bytes and the byte behind them the text holds. Raises ArgumentError if none."""
    count = text.data.numel() - seq
    if count < 1:
        raise ArgumentError(
            "seq", seq, f"at most {text.data.numel() - 1}, one less than the bytes of the text"
        )
    return count


def cut_batch(
    text: Text, *, seed: int, step: int, batch: int, seq: int, rank: int, ranks: int
) -> tuple[Tensor, Tensor]:
    """This rank's part of the global batch of one step: `(inputs, targets)`, int64 [B, S], B may be 0.

    The global batch depends on (seed, step) alone and is cut by sequence, in rank order.
    """
    generator = keyed_generator(seed, "batch", step)
    starts_B = torch.randint(num_windows(text, seq), (batch,), generator=generator)
    window_BS = text.data[starts_B[share(batch, rank, ranks), None] + torch.arange(seq + 1)].long()
    return window_BS[:, :-1], window_BS[:, 1:]
