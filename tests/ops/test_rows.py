"""The row functors: exact against loops, the same bits on every vector path, opcheck, refusals."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flexep._native import rows as native
from flexep.errors import ArgumentError
from flexep.ops.rows import dot_rows, dot_slots, gather_rows, reduce_rows
from tests.ops import composed
from tests.ops.reference import assert_bits, loop_dot, loop_gather, loop_reduce

FLOATS = [torch.float32, torch.float16, torch.bfloat16]
# No multiples of a vector, of its block or of the 32 lanes of the dot; 2880 is a real model's.
HIDDEN = [8, 16, 24, 40, 104, 2880]


@pytest.fixture(params=native.isa_names())
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    with native.forced_isa(request.param):
        yield request.param


def make_rows(rows: int, hidden: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Values over the whole range of the type, subnormals, infinities, NaN and both zeros among them."""
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.float32:
        bits = torch.randint(-(2**31), 2**31, (rows, hidden), generator=generator).to(torch.int32)
    else:
        bits = torch.randint(-(2**15), 2**15, (rows, hidden), generator=generator).to(torch.int16)
    wild = bits.view(dtype)
    tame = torch.randn(rows, hidden, generator=generator).to(dtype)
    choose = torch.rand(rows, hidden, generator=generator)
    return torch.where(choose < 0.2, wild, torch.where(choose < 0.25, torch.tensor(-0.0, dtype=dtype), tame))


def make_idx(shape: tuple[int, ...], rows: int, seed: int = 0, empty: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(0, rows, shape, generator=generator, dtype=torch.int32)
    return torch.where(torch.rand(shape, generator=generator) < empty, -1, idx)


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("weighted", [False, True])
def test_gather(isa: str, dtype: torch.dtype, hidden: int, weighted: bool) -> None:
    src, idx = make_rows(11, hidden, dtype), make_idx((29,), 11)
    weights = torch.randn(29) if weighted else None
    got = gather_rows(src, idx, weights)
    assert_bits(got, loop_gather(src, idx, weights))
    assert_bits(composed.gather_rows(src, idx, weights), got)


def test_gather_copies_bits_of_any_dtype(isa: str) -> None:
    src = torch.arange(7 * 48, dtype=torch.int32).to(torch.uint8).view(7, 48)
    idx = make_idx((20,), 7)
    for view in (src, src.view(torch.int64), src.view(torch.float8_e4m3fn)):
        got = gather_rows(view, idx)
        assert torch.equal(got.view(torch.uint8), loop_gather(src, idx, None))


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sort", [False, True])
def test_reduce(isa: str, dtype: torch.dtype, hidden: int, sort: bool) -> None:
    src, idx = make_rows(13, hidden, dtype), make_idx((9, 6), 13)
    weights = torch.randn(9, 6)
    weights[0, 0] = 0.0
    for given in (None, weights):
        for out_dtype in FLOATS:
            got = reduce_rows(src, idx, given, out_dtype, sort)
            assert_bits(got, loop_reduce(src, idx, given, out_dtype, sort))
            assert_bits(composed.reduce_rows(src, idx, given, out_dtype, sort), got)


@pytest.mark.parametrize("group_dtype", FLOATS)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sort", [False, True])
def test_reduce_groups(isa: str, dtype: torch.dtype, group_dtype: torch.dtype, sort: bool) -> None:
    src, idx, groups = make_rows(13, 88, dtype), make_idx((9, 8), 13), make_idx((9, 8), 3, seed=1, empty=0)
    weights = torch.randn(9, 8)
    got = reduce_rows(src, idx, weights, dtype, sort, groups, group_dtype)
    assert_bits(got, loop_reduce(src, idx, weights, dtype, sort, groups, group_dtype))
    assert_bits(composed.reduce_rows(src, idx, weights, dtype, sort, groups, group_dtype), got)


def test_a_sum_starts_from_its_first_term_and_an_empty_one_is_plus_zero(isa: str) -> None:
    src = torch.full((1, 8), -0.0)
    out = reduce_rows(src, torch.tensor([[0, -1], [-1, -1]], dtype=torch.int32), None, torch.float32, False)
    assert out[0].signbit().all()
    assert not out[1].signbit().any()


def test_reduce_takes_more_terms_than_any_top_k(isa: str) -> None:
    src, idx = make_rows(50, 16, torch.bfloat16), make_idx((3, 200), 50)
    assert_bits(
        reduce_rows(src, idx, None, torch.bfloat16, True), loop_reduce(src, idx, None, torch.bfloat16, True)
    )


@pytest.mark.parametrize("hidden", HIDDEN)
@pytest.mark.parametrize("dtype", FLOATS)
def test_dot(isa: str, dtype: torch.dtype, hidden: int) -> None:
    a, b, idx = make_rows(17, hidden, dtype), make_rows(6, hidden, dtype, seed=1), make_idx((17,), 6)
    assert_bits(dot_rows(a, b, idx), loop_dot(a, b, idx))
    a, b = torch.randn(17, hidden).to(dtype), torch.randn(6, hidden).to(dtype)
    exact = torch.where(idx < 0, 0.0, (a.double() * b.double()[idx.clamp(min=0).long()]).sum(1))
    for got in (dot_rows(a, b, idx), composed.dot_rows(a, b, idx)):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", FLOATS)
def test_dot_slots_is_the_dot_of_every_slot(isa: str, dtype: torch.dtype) -> None:
    tokens, rows, row_map = make_rows(9, 104, dtype), make_rows(13, 104, dtype, seed=1), make_idx((9, 4), 13)
    got = dot_slots(tokens, rows, row_map)
    for k in range(4):
        assert_bits(got[:, k], loop_dot(tokens, rows, row_map[:, k]))
    assert dot_slots(tokens, rows, row_map[:, :0]).shape == (9, 0)


def test_paths_agree_bit_for_bit_past_the_cache_and_across_threads() -> None:
    src = make_rows(4096, 1032, torch.bfloat16)
    idx, slots, weights = make_idx((9001,), 4096), make_idx((9001, 2), 4096), torch.randn(9001, 2)
    runs = {}
    for name in native.isa_names():
        for threads in (1, 3):
            before = torch.get_num_threads()
            torch.set_num_threads(threads)
            with native.forced_isa(name):
                runs[name, threads] = (
                    gather_rows(src, idx),
                    gather_rows(src, idx, weights[:, 0].contiguous()),
                    reduce_rows(src, slots, weights, torch.bfloat16, True),
                    dot_rows(src, src, idx[:4096]),
                )
            torch.set_num_threads(before)
    first = runs.pop(("portable", 1))
    for other in runs.values():
        for x, y in zip(first, other, strict=True):
            assert torch.equal(x.view(torch.uint8), y.view(torch.uint8))


def test_strided_source(isa: str) -> None:
    wide = make_rows(12, 64, torch.float16)
    src, idx, slots = wide[::2, 8:40], make_idx((9,), 6), make_idx((5, 3), 6)
    assert src.stride() == (128, 1)
    assert_bits(gather_rows(src, idx), loop_gather(src, idx, None))
    assert_bits(
        reduce_rows(src, slots, None, torch.float16, False),
        loop_reduce(src, slots, None, torch.float16, False),
    )
    assert_bits(dot_rows(src, src, idx[:6]), loop_dot(src, src, idx[:6]))


@pytest.mark.parametrize(("rows", "entries"), [(0, 0), (0, 3), (3, 0)])
def test_empty(rows: int, entries: int) -> None:
    src, idx = torch.randn(rows, 16), torch.full((entries,), -1, dtype=torch.int32)
    for op in (gather_rows, composed.gather_rows):
        assert torch.equal(op(src, idx), torch.zeros(entries, 16))
    for op in (reduce_rows, composed.reduce_rows):
        assert torch.equal(op(src, idx.view(-1, 1), None, torch.float32, True), torch.zeros(entries, 16))
    for op in (dot_rows, composed.dot_rows):
        assert torch.equal(op(torch.randn(entries, 16), src, idx), torch.zeros(entries))


def test_results_do_not_depend_on_the_callers_denormal_mode(isa: str) -> None:
    src, idx = torch.full((1, 8), 2.0**-126), torch.tensor([[0]], dtype=torch.int32)
    assert torch.set_flush_denormal(True)
    try:
        out = reduce_rows(src, idx, torch.tensor([[0.25]]), torch.float32, False)
        kept = out.view(torch.int32).clone()
    finally:
        torch.set_flush_denormal(False)
    assert (kept == 1 << 21).all()


def test_opcheck() -> None:
    src, idx, slots = torch.randn(6, 16), make_idx((5,), 6), make_idx((5, 3), 6)
    weights = torch.randn(5, 3)
    torch.library.opcheck(gather_rows, (src, idx))
    torch.library.opcheck(gather_rows, (src, idx, weights[:, 0].contiguous()))
    torch.library.opcheck(reduce_rows, (src, slots, weights, torch.bfloat16, True))
    torch.library.opcheck(reduce_rows, (src, slots, None, torch.float32, False, slots, torch.bfloat16))
    torch.library.opcheck(dot_rows, (src[:5], src, idx))
    torch.library.opcheck(dot_slots, (src[:5], src, slots))


def _refused(argument: str, call: object, *args: object) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(*args)
    assert caught.value.argument == argument


def test_refusals() -> None:
    src, idx, slots = torch.randn(6, 16), make_idx((5,), 6), make_idx((5, 3), 6)
    f32 = torch.float32
    _refused("hidden", gather_rows, torch.randn(6, 15), idx)
    _refused("hidden", gather_rows, torch.zeros(6, 4, dtype=torch.bfloat16), idx)
    _refused("src", gather_rows, torch.randn(16, 6).t(), idx)
    _refused("src", gather_rows, torch.randn(16), idx)
    _refused("src", gather_rows, src.double(), idx, torch.randn(5))
    _refused("idx", gather_rows, src, idx.long())
    _refused("idx", gather_rows, src, slots)
    _refused("weights", gather_rows, src, idx, torch.randn(5).double())
    _refused("weights", gather_rows, src, idx, torch.randn(4))
    _refused("src", reduce_rows, src.double(), slots, None, f32, False)
    _refused("out_dtype", reduce_rows, src, slots, None, torch.float64, False)
    _refused("group_dtype", reduce_rows, src, slots, None, f32, False, slots)
    _refused("groups", reduce_rows, src, slots, None, f32, False, slots[:4], f32)
    _refused("weights", reduce_rows, src, slots, torch.randn(3, 5), f32, False)
    _refused("b", dot_rows, src, src.half(), make_idx((6,), 6))
    _refused("b", dot_rows, src, torch.randn(6, 8), make_idx((6,), 6))
    _refused("idx", dot_rows, src, src, idx)
    _refused("rows", dot_slots, src, src.half(), slots)
    _refused("row_map", dot_slots, src, src, slots)
    _refused("row_map", dot_slots, src, src, make_idx((6, 3), 6).long())
    _refused("src", gather_rows, src[:1].expand(2**31, 16), idx)
    _refused("src", reduce_rows, src[:1].expand(2**31, 16), slots, None, f32, False)
    for bad in (6, -2, 2**31 - 1):
        with pytest.raises(ArgumentError, match=rf"idx = {bad}: .*position 4"):
            gather_rows(src, torch.tensor([0, -1, 5, 0, bad], dtype=torch.int32))


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="sse1"), native.forced_isa("sse1"):
        pass
