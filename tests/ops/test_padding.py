"""pad and unpad: against loops, both backwards, static sizes, opcheck, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep.errors import ArgumentError
from flexep.ops import pad, padding, unpad
from tests.ops.reference import assert_bits


def loop_pad(x: torch.Tensor, counts: list[int], alignment: int, num_rows: int | None) -> torch.Tensor:
    parts = []
    for part in x.split(counts):
        parts += [part, x.new_zeros(-len(part) % alignment, x.shape[1])]
    out = torch.cat(parts)
    return out if num_rows is None else torch.cat([out, x.new_zeros(num_rows - len(out), x.shape[1])])


@given(
    counts=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    alignment=st.sampled_from([1, 2, 8, 16]),
    extra=st.none() | st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.uint8]),
)
def test_pad_and_unpad(counts: list[int], alignment: int, extra: int | None, dtype: torch.dtype) -> None:
    x = torch.randint(1, 100, (sum(counts), 16)).to(dtype)
    sizes = torch.tensor(counts)
    want_counts = [-(-c // alignment) * alignment for c in counts]
    num_rows = None if extra is None else sum(want_counts) + extra
    padded, padded_counts = pad(x, sizes, alignment, num_rows=num_rows)
    assert padded_counts.dtype == torch.int32
    assert padded_counts.tolist() == want_counts
    assert_bits(padded, loop_pad(x, counts, alignment, num_rows))
    padded[padded.eq(0).all(1)] = 77  # the padding is not read
    assert_bits(unpad(padded, sizes.int(), alignment), x)
    longer = unpad(padded, sizes, alignment, num_rows=sum(counts) + 3)
    assert_bits(longer, torch.cat([x, x.new_zeros(3, 16)]))


@pytest.mark.parametrize("num_rows", [None, 40])
def test_backwards(num_rows: int | None) -> None:
    counts = torch.tensor([3, 0, 8, 5])
    x = torch.randn(16, 8, requires_grad=True)
    padded, _ = pad(x, counts, 8, num_rows=num_rows)
    up = torch.randn(padded.shape)
    (dx,) = torch.autograd.grad(padded, x, up)
    assert_bits(dx, torch.cat([up[:3], up[8:16], up[16:21]]))
    y = torch.randn(padded.shape, requires_grad=True)
    up = torch.randn(16, 8)
    (dy,) = torch.autograd.grad(unpad(y, counts, 8), y, up)
    assert_bits(dy, loop_pad(up, counts.tolist(), 8, padded.shape[0]))


def test_opcheck() -> None:
    counts, x = torch.tensor([3, 0, 2]), torch.randn(5, 8, requires_grad=True)
    y = torch.randn(8, 8, requires_grad=True)
    for num_rows in (None, 12):
        torch.library.opcheck(padding.pad_rows, (x, counts, 4, num_rows))
        torch.library.opcheck(padding.unpad_rows, (y, counts, 4, num_rows))


def test_refusals() -> None:
    counts, x = torch.tensor([3, 0, 2]), torch.randn(5, 8)
    for argument, call in (
        ("alignment", lambda: pad(x, counts, 0)),
        ("alignment", lambda: unpad(x, counts, -1)),
        ("counts", lambda: pad(x, counts.float(), 4)),
        ("counts", lambda: pad(x, counts.view(1, 3), 4)),
        ("counts", lambda: pad(x, torch.tensor([6, -1]), 4)),
        ("x", lambda: pad(x, counts + 1, 4)),
        ("x", lambda: unpad(x, counts, 4)),
        ("num_rows", lambda: pad(x, counts, 4, num_rows=7)),
        ("num_rows", lambda: unpad(torch.randn(8, 8), counts, 4, num_rows=4)),
        ("hidden", lambda: pad(torch.randn(5, 3), counts, 4)),
        ("alignment", lambda: pad(x, counts, 2**31)),
        ("alignment", lambda: unpad(x, counts, 2**63)),
        ("alignment", lambda: pad(x, counts, 2**30)),
        ("alignment", lambda: pad(x, counts, 2**30, num_rows=8)),
        ("num_rows", lambda: pad(x, counts, 4, num_rows=2**31)),
        ("num_rows", lambda: unpad(x, counts, 1, num_rows=-1)),
        ("counts", lambda: pad(x, torch.tensor([2**62] * 4), 1)),
        ("counts", lambda: unpad(x, torch.tensor([2**62] * 4), 1)),
        ("counts", lambda: pad(x, torch.tensor([2**31]), 1)),
        ("counts", lambda: pad(x, torch.tensor([2**30] * 2), 1)),
        ("counts", lambda: pad(x, [3, 2], 1)),
        ("counts", lambda: pad(x, counts.to("meta"), 1)),
        ("counts", lambda: pad(x, counts.to_sparse(), 1)),
        ("x", lambda: pad(x.tolist(), counts, 1)),
        ("x", lambda: pad(x[0], counts, 1)),
        ("x", lambda: unpad(x[0], counts, 1)),
        ("x", lambda: unpad(x.to_sparse(), counts, 1)),
        ("x", lambda: unpad(torch.randn(8, 5).t(), counts, 1)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
