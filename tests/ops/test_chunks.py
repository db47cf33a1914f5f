"""sort_chunks_by_index and transpose_chunks: against cat and transpose, backwards, opcheck, refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from flexep.errors import ArgumentError
from flexep.ops import chunks, sort_chunks_by_index, transpose_chunks
from tests.ops.reference import assert_bits


@given(
    sizes=st.lists(st.integers(0, 7), max_size=8),
    data=st.data(),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.uint8]),
)
def test_sort_chunks(sizes: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    order = data.draw(st.permutations(range(len(sizes))))
    x = torch.randint(0, 100, (sum(sizes), 16)).to(dtype)
    parts = x.split(sizes) if sizes else []
    want = torch.cat([x[:0]] + [parts[c] for c in order])
    for ints in (torch.int32, torch.int64):
        assert_bits(
            sort_chunks_by_index(x, torch.tensor(sizes, dtype=ints), torch.tensor(order, dtype=ints)), want
        )


def test_sort_chunks_backward() -> None:
    sizes, order = torch.tensor([2, 0, 3, 1]), torch.tensor([2, 3, 0, 1])
    x, up = torch.randn(6, 8, requires_grad=True), torch.randn(6, 8)
    (dx,) = torch.autograd.grad(sort_chunks_by_index(x, sizes, order), x, up)
    assert_bits(dx, torch.cat([up[4:6], up[:3], up[3:4]]))


@pytest.mark.parametrize(("outer", "inner", "size"), [(1, 1, 3), (3, 2, 4), (4, 5, 1), (2, 3, 0)])
def test_transpose_chunks(outer: int, inner: int, size: int) -> None:
    x = torch.randn(outer * inner * size, 8, requires_grad=True)
    out = transpose_chunks(x, outer, inner)
    assert_bits(out, x.detach().view(outer, inner, size, 8).transpose(0, 1).reshape(-1, 8))
    assert_bits(transpose_chunks(out, inner, outer), x)
    up = torch.randn(x.shape)
    (dx,) = torch.autograd.grad(out, x, up)
    assert_bits(dx, up.view(inner, outer, size, 8).transpose(0, 1).reshape(-1, 8))


def test_opcheck() -> None:
    x = torch.randn(6, 8, requires_grad=True)
    torch.library.opcheck(chunks.sort_chunks, (x, torch.tensor([2, 4]), torch.tensor([1, 0])))
    torch.library.opcheck(chunks.swap_chunks, (x, 3, 2))


def test_refusals() -> None:
    x, sizes, order = torch.randn(6, 8), torch.tensor([2, 4]), torch.tensor([1, 0])
    for argument, call in (
        ("split_sizes", lambda: sort_chunks_by_index(x, torch.tensor([2, 3]), order)),
        ("split_sizes", lambda: sort_chunks_by_index(x, torch.tensor([-1, 7]), order)),
        ("split_sizes", lambda: sort_chunks_by_index(x, sizes.float(), order)),
        ("split_sizes", lambda: sort_chunks_by_index(x, torch.tensor([2**62] * 4 + [6]), torch.arange(5))),
        ("split_sizes", lambda: sort_chunks_by_index(x, torch.tensor([2**31]), torch.arange(1))),
        ("split_sizes", lambda: sort_chunks_by_index(x, torch.tensor([2**30] * 2), order)),
        ("split_sizes", lambda: sort_chunks_by_index(x, [2, 4], order)),
        ("split_sizes", lambda: sort_chunks_by_index(x, sizes.to("meta"), order)),
        ("split_sizes", lambda: sort_chunks_by_index(x, sizes.to_sparse(), order)),
        ("sorted_index", lambda: sort_chunks_by_index(x, sizes, [1, 0])),
        ("sorted_index", lambda: sort_chunks_by_index(x, sizes, order.to("meta"))),
        ("x", lambda: sort_chunks_by_index(x[0], sizes, order)),
        ("x", lambda: sort_chunks_by_index(x.to_sparse(), sizes, order)),
        ("x", lambda: transpose_chunks(x.tolist(), 2, 3)),
        ("x", lambda: transpose_chunks(x[0], 2, 3)),
        ("num_outer", lambda: transpose_chunks(x, 2**31, 2)),
        ("num_inner", lambda: transpose_chunks(x, 2, 2**63)),
        ("sorted_index", lambda: sort_chunks_by_index(x, sizes, torch.tensor([1, 1]))),
        ("sorted_index", lambda: sort_chunks_by_index(x, sizes, torch.tensor([1, 2]))),
        ("sorted_index", lambda: sort_chunks_by_index(x, sizes, torch.tensor([0]))),
        ("sorted_index", lambda: sort_chunks_by_index(x, sizes, order.float())),
        ("hidden", lambda: sort_chunks_by_index(torch.randn(6, 3), sizes, order)),
        ("x", lambda: transpose_chunks(x, 2, 2)),
        ("num_outer", lambda: transpose_chunks(x, 0, 2)),
        ("num_inner", lambda: transpose_chunks(x, 2, -1)),
        ("x", lambda: transpose_chunks(torch.randn(8, 6).t(), 2, 3)),
    ):
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
