"""How windows are cut up: slices, slots and chunks within a budget."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import flexep
from bench.suites.figures import curves_of
from flexep.cli._bench_sweep import curves
from flexep.config import DispatcherConfig
from flexep.dispatchers import _window_shape
from flexep.dispatchers._window_shape import modelled_sms, num_slices, sends_ahead, window_shape

ROW = 2 * 512  # bytes


def config(**changed: object) -> DispatcherConfig:
    default = {
        "num_ranks": 2, "num_experts": 8, "hidden": 512, "top_k": 2, "max_tokens": 4096, "backend": "deepep",
        "dtype": torch.bfloat16, "wire": None, "combine_wire": None, "domain_size": None, "layout": "flat",
        "alignment": 1, "capacity": None, "overflow": "error", "num_sms": None, "timeout": 1.0, "placement": None,
        "reduction": "ordered",
    }  # fmt: skip
    return DispatcherConfig(**{**default, **changed})


def fake_gpu(monkeypatch: pytest.MonkeyPatch, multiprocessors: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    seen = SimpleNamespace(multi_processor_count=multiprocessors)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: seen)


def on_gpus(hosted: int) -> SimpleNamespace:
    return SimpleNamespace(
        device=torch.device("cuda", 0), hosted=range(hosted), is_local=hosted > 1, size=hosted
    )


@pytest.mark.parametrize(
    ("hosted", "changed", "slices"),
    [
        (1, {}, 24),
        (1, {"layout": "expert_major"}, 32),  # 2 of 0.79 rows to write for each that comes
        (1, {"num_sms": 7}, 7),
        (1, {"num_sms": 500}, 128),  # what a window may have
        (1, {"max_tokens": 5}, 5),
        (1, {"max_tokens": 0}, 1),
        (8, {"layout": "expert_major"}, 16),  # 132 multiprocessors for all of them
        (72, {}, 1),
        (128, {}, 1),
    ],
)
def test_a_rank_takes_no_more_multiprocessors_than_there_are(
    hosted: int, changed: dict[str, object], slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_gpu(monkeypatch, 132)
    assert num_slices(config(**changed), on_gpus(hosted)) == slices


@pytest.mark.parametrize(
    ("part", "seen", "slices"), [("25", 33, 4), ("50", 66, 16), ("100", 132, 32), ("", 132, 32), ("1", 2, 1)]
)
def test_processes_that_share_a_gpu_fit_into_one_part_of_it(
    part: str, seen: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks on a GPU whose kernels did not fit beside each other waited for each other for ever."""
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", part)
    fake_gpu(monkeypatch, seen)
    got = num_slices(config(layout="expert_major"), on_gpus(1))
    assert got == slices
    assert got == 1 or part in ("", "100") or got * 100 // int(part) * 2 <= seen


@pytest.mark.parametrize("part", ["abc", "nan", "0", "-3", "101"])
def test_a_part_of_a_gpu_that_is_none_is_named(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", part)
    fake_gpu(monkeypatch, 132)
    with pytest.raises(flexep.ArgumentError, match=f"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE = .*{part}"):
        num_slices(config(), on_gpus(1))


def test_what_has_no_gpu_is_one_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_slices(config(), flexep.Group.local(3)) == 1
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert num_slices(config(), on_gpus(8)) == 1


@pytest.mark.parametrize(
    ("changed", "wanted", "cut"),
    [
        # (slices, slots, pull_tokens, push_tokens)
        ({}, 1, (1, 2, 512, 512)),
        ({}, 24, (24, 4, 171, 171)),
        ({"hidden": 7168}, 24, (24, 4, 29, 29)),  # 6 chunks of a slice, where 256 KiB would be 11
        ({"window_bytes": 2 * 2 * 24 * 4 * ROW}, 24, (24, 4, 2, 1)),
        ({"window_bytes": 2 * 2 * 24 * 4 * ROW - 1}, 24, (24, 2, 3, 1)),
        ({"window_bytes": 2 * 2 * 24 * ROW}, 24, (12, 2, 2, 1)),
        ({"window_bytes": 2 * 2 * 2 * ROW}, 24, (1, 2, 2, 1)),
        ({"max_tokens": 5}, 3, (3, 4, 2, 2)),
    ],
)
def test_a_budget_too_small_for_the_slices_makes_them_fewer(
    changed: dict[str, object], wanted: int, cut: tuple[int, int, int, int]
) -> None:
    made = config(**changed)
    shape = window_shape(made, 2, wanted)
    assert (shape.slices, shape.slots, shape.pull_tokens, shape.push_tokens) == cut
    if made.window_bytes is not None:
        assert shape.slices * shape.slots * shape.pull_tokens * ROW <= made.window_bytes // 2
        assert 2 * shape.slices * shape.slots * shape.push_tokens * ROW <= made.window_bytes // 2


@pytest.mark.parametrize(
    ("changed", "slices", "ahead", "cut"),
    [
        # (slices, slots, pull_tokens, push_tokens)
        ({"hidden": 4096}, 16, False, (16, 4, 43, 43)),  # a fifth of a slice's 256 tokens, and evenly
        ({"hidden": 4096, "max_tokens": 8192}, 16, False, (16, 4, 103, 103)),
        ({"hidden": 7168}, 128, False, (128, 4, 8, 8)),  # all that there is room for
        ({"hidden": 7168}, 24, True, (24, 4, 16, 29)),  # 256 KiB of rows that are sent ahead
        ({"hidden": 7168, "combine_wire": "fp32"}, 24, True, (24, 4, 16, 19)),
    ],
)
def test_a_slice_with_many_tokens_has_larger_chunks(
    changed: dict[str, object], slices: int, ahead: bool, cut: tuple[int, int, int, int]
) -> None:
    shape = window_shape(config(**changed), 2, slices, ahead)
    assert (shape.slices, shape.slots, shape.pull_tokens, shape.push_tokens) == cut


@pytest.mark.parametrize(
    ("changed", "cut"),
    [
        # (pull_tokens, push_tokens) of 64 tokens a slice, or of 8
        ({"hidden": 2048}, (64, 64)),  # 256 KiB, and all of them
        ({"hidden": 5120}, (22, 16)),  # a fourth of the slice
        ({"hidden": 7168}, (16, 16)),
        ({"hidden": 5120, "combine_wire": "fp32"}, (22, 8)),  # 256 KiB at most, evenly
        ({"hidden": 7168, "max_tokens": 512}, (8, 8)),
    ],
)
def test_partial_sums_of_a_slice_with_few_tokens_come_in_one_chunk_or_four(
    changed: dict[str, object], cut: tuple[int, int]
) -> None:
    shape = window_shape(config(**changed), 2, 64)
    assert (shape.pull_tokens, shape.push_tokens) == cut


@pytest.mark.parametrize("slices", [8, 16, 24, 32, 64, 96, 128])
@pytest.mark.parametrize("max_tokens", [1024, 4096, 8192])
def test_no_slice_has_many_more_tokens_than_others(max_tokens: int, slices: int) -> None:
    """Chunks of 18 tokens, as many as suit a window of such rows, would give some of 64 slices 72 and others 54."""
    shape = window_shape(config(hidden=7168, max_tokens=max_tokens), 2, slices)
    for tokens in (shape.pull_tokens, shape.push_tokens):
        most = tokens * -(-max_tokens // (tokens * slices))
        assert most <= 1.06 * max_tokens / slices + 1


def test_many_tokens_are_cut_into_no_more_chunks_than_a_signal_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(_window_shape, "MAX_CHUNKS", 100)
    shape = window_shape(config(hidden=2**20, max_tokens=1000), 2, 1)
    assert shape.pull_tokens == shape.push_tokens == 10
    least = 2 * 10 * 2 * 2 * 2 * 2**20
    assert window_shape(config(hidden=2**20, max_tokens=1000, window_bytes=least), 2, 1).push_tokens == 10
    with pytest.raises(flexep.ArgumentError, match=f"window_bytes = {least - 1}: expected at least {least}"):
        window_shape(config(hidden=2**20, max_tokens=1000, window_bytes=least - 1), 2, 1)


@pytest.mark.parametrize(
    ("changed", "share"),
    [
        ({"num_ranks": 4, "top_k": 1}, 3 / 4),
        ({"num_ranks": 4}, 1 - 1 / 28),  # the two experts of the rank are one choice of C(8, 2)
        ({"num_experts": 2, "top_k": 3}, 1 - 1 / 8),  # repeated
    ],
)
def test_the_share_of_rows_that_leave_a_rank(changed: dict[str, object], share: float) -> None:
    assert config(**changed).leaving == pytest.approx(share)


@pytest.mark.parametrize(
    ("changed", "ahead"),
    [
        ({}, True),  # half of the experts are a peer's, and 1 - C(4, 2) / C(8, 2) = 0.79 of the rows
        ({"top_k": 1}, False),
        ({"max_tokens": 1023}, False),
        ({"hidden": 16 << 10, "max_tokens": 8192}, True),
        ({"hidden": 16 << 10, "max_tokens": 8193}, False),  # more than 256 MiB
        ({"num_ranks": 1}, False),
        ({"num_ranks": 8}, False),
        ({"send_ahead": True, "max_tokens": 1}, True),
        ({"send_ahead": False}, False),
    ],
)
def test_rows_are_sent_ahead_where_nearly_all_are_needed(changed: dict[str, object], ahead: bool) -> None:
    made = config(**changed)
    assert sends_ahead(made, on_gpus(1), made.num_ranks) is ahead
    if made.send_ahead is None:
        assert not sends_ahead(made, on_gpus(8), made.num_ranks)
        assert not sends_ahead(made, flexep.Group.local(1), made.num_ranks)


def test_rows_over_relays_are_not_sent_ahead() -> None:
    assert not sends_ahead(config(), on_gpus(1), 1)
    with pytest.raises(flexep.ArgumentError, match="send_ahead = True"):
        sends_ahead(config(send_ahead=True), on_gpus(1), 1)


def test_a_window_of_several_domains_has_no_room_for_them() -> None:
    with pytest.raises(flexep.ArgumentError, match="landed_rows = 4096: expected 0"):
        window_shape(config(), 1, 1, ahead=True)


def test_room_for_rows_that_are_sent_ahead() -> None:
    pulled, ahead = (window_shape(config(max_tokens=100), 2, 1, ahead) for ahead in (False, True))
    assert (pulled.landed_rows, ahead.landed_rows) == (0, 100)
    rings = pulled.slices * pulled.slots * pulled.pull_tokens
    assert ahead.nbytes - pulled.nbytes == (100 - rings) * ROW


@pytest.mark.parametrize(("hosted", "num_sms", "slices"), [(1, 200, 110), (1, 64, 64), (8, 64, 13)])
def test_who_posts_rows_sent_ahead_has_room(
    hosted: int, num_sms: int, slices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its kernel would wait for those that wait for it, if they had every multiprocessor."""
    fake_gpu(monkeypatch, 114)
    assert num_slices(config(num_sms=num_sms), on_gpus(hosted), ahead=True) == slices


RESULTS = Path(__file__).parents[2] / "bench" / "results"


@pytest.mark.parametrize("layout", ["flat", "expert_major"])
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_the_model_is_near_the_knee_of_the_measured_curve(layout: str, op: str) -> None:
    """Of two H200s: with so many multiprocessors less than a fifth is lost, and with half of them more than a sixth."""
    sweeps = curves_of(json.loads((RESULTS / "ep2-curve-h200.json").read_text()))
    (measured,) = (sweep for sweep in sweeps if sweep["results"][0]["layout"] == layout)
    row = measured["results"][0]
    made = config(num_experts=row["experts"], top_k=row["top_k"], hidden=row["hidden"], layout=layout)
    curve = curves(measured, op)["deepep"]
    wanted = modelled_sms(made)
    assert wanted == {"flat": 24, "expert_major": 88}[layout]

    def share(sms: float) -> float:
        """Of the best bandwidth; between two measured numbers, on the line through them."""
        below, above = max(n for n in curve if n <= sms), min(n for n in curve if n >= sms)
        part = 0.0 if above == below else (sms - below) / (above - below)
        return (curve[below] + part * (curve[above] - curve[below])) / max(curve.values())

    assert share(wanted) > 4 / 5
    assert share(wanted / 2) < 5 / 6


@pytest.mark.parametrize(
    ("changed", "sms"),
    [
        ({"num_ranks": 8, "num_experts": 256, "top_k": 8}, 16),  # 8 rows written for 7 that come
        ({"num_ranks": 8, "num_experts": 256, "top_k": 8, "layout": "expert_major"}, 24),
        ({"num_ranks": 1, "layout": "expert_major"}, 24),
    ],
)
def test_fewer_multiprocessors_where_more_comes_over_the_link(changed: dict[str, object], sms: int) -> None:
    assert modelled_sms(config(**changed)) == sms
