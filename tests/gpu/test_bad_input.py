"""Bad input to the Dispatcher on a GPU is refused by name, or masked and counted: never an illegal access. A refusal
leaves everything usable."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import flexep
from flexep.errors import ArgumentError
from tests.gpu.odd_tensors import (
    DEVICE,
    Change,
    E,
    H,
    K,
    T,
    check_device,
    ids,
    rand,
    same,
    shifted,
    strided,
    wild_ids,
)

pytestmark = pytest.mark.gpu
R = 3
SIZES = {"num_experts": E, "hidden": H, "top_k": K, "max_tokens": T, "alignment": 4}
STATIC = {"capacity": 400, "overflow": "drop"}
BACKENDS = list(flexep.BACKENDS)


@pytest.fixture(autouse=True)
def the_device_still_works() -> Iterator[None]:
    yield
    check_device()


class Round:
    """Good arguments of every rank, and what becomes of them."""

    def __init__(self, backend: str, **options: Any) -> None:
        self.ep = flexep.Dispatcher(flexep.Group.local(R, DEVICE), backend=backend, **SIZES, **options)
        self.x = [rand(T, H, dtype=torch.bfloat16) for _ in range(R)]
        self.idx = [ids(T, E) for _ in range(R)]
        self.weights = [rand(T, K) for _ in range(R)]

    def run(self, idx: list[torch.Tensor]) -> list[torch.Tensor]:
        r = self.ep.dispatch(self.x, idx, self.weights)
        z = self.ep.combine([one.x for one in r], [one.handle for one in r], [one.weights for one in r])
        return [*z, *(t for one in r for t in (one.x, one.weights, one.counts, one.dropped))]


def with_one(tensors: list[torch.Tensor], change: Change) -> list[torch.Tensor]:
    return [*tensors[:1], change(tensors[1]), *tensors[2:]]


CHANGES: dict[str, Change] = {
    "device": lambda t: t.cpu(),
    "dtype": lambda t: t.to(torch.float64),
    "shape": lambda t: torch.cat([t, t], 1),
    "stride()": strided,
    "data_ptr()": shifted,
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("options", [{}, STATIC], ids=["exact", "static"])
def test_bad_tensors_are_refused_by_name_and_nothing_breaks(backend: str, options: dict[str, Any]) -> None:
    good = Round(backend, **options)
    want, ep = good.run(good.idx), good.ep
    r = ep.dispatch(good.x, good.idx, good.weights)
    y, handles, weights = ([getattr(one, n) for one in r] for n in ("x", "handle", "weights"))
    for what, change in CHANGES.items():
        calls: dict[str, Callable[[], Any]] = {
            "x": lambda: ep.dispatch(with_one(good.x, change), good.idx, good.weights),  # noqa: B023
            "y": lambda: ep.combine(with_one(y, change), handles, weights),  # noqa: B023
        }
        if what != "data_ptr()":
            calls |= {
                "topk_idx": lambda: ep.dispatch(good.x, with_one(good.idx, change), good.weights),  # noqa: B023
                "topk_weights": lambda: ep.dispatch(good.x, good.idx, with_one(good.weights, change)),  # noqa: B023
            }
            if what != "shape":  # row weights have one dimension
                calls["weights"] = lambda: ep.combine(y, handles, with_one(weights, change))  # noqa: B023
        for argument, call in calls.items():
            with pytest.raises(ArgumentError) as caught:
                call()
            assert caught.value.argument == f"{argument}.{what}"
    assert same(good.run(good.idx), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_integers_and_weights_may_lie_anywhere(backend: str) -> None:
    good = Round(backend, **STATIC)
    want = good.run(good.idx)
    good.weights = [shifted(w) for w in good.weights]
    assert same(good.run([shifted(idx.int()) for idx in good.idx]), want)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_may_lie_anywhere(backend: str) -> None:
    good = Round(backend, **STATIC)
    up = [rand(T, H, dtype=torch.bfloat16) for _ in range(R)]

    def grads(up: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        xs = [x.detach().requires_grad_() for x in good.x]
        weights = [w.detach().requires_grad_() for w in good.weights]
        r = good.ep.dispatch(xs, good.idx, weights)
        z = good.ep.combine([one.x for one in r], [one.handle for one in r], [one.weights for one in r])
        return torch.autograd.grad(z, [*xs, *weights], up)

    want = grads(up)
    for change in (shifted, strided):
        assert same(grads([change(t) for t in up]), want)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_outside_are_empty_slots_and_counted(backend: str, dtype: torch.dtype) -> None:
    good = Round(backend, **STATIC)
    wild, tame, strays = zip(*(wild_ids(dtype) for _ in range(R)), strict=True)
    want = good.run(list(tame))
    assert good.ep.masked_ids == 0
    for rounds in (1, 2):
        assert same(good.run(list(wild)), want)
        assert good.ep.masked_ids == rounds * sum(strays)
    good.ep.check()
    assert same(good.run(list(tame)), want)
    assert good.ep.masked_ids == 2 * sum(strays)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("debug", [False, True])
def test_values_are_refused_in_debug_and_in_exact_mode(
    backend: str, debug: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if debug:
        monkeypatch.setenv("FLEXEP_DEBUG", "1")
    good = Round(backend, **(STATIC if debug else {}))
    want, ep = good.run(good.idx), good.ep
    nan = with_one(good.weights, lambda w: torch.where(w == w.max(), torch.nan, w))
    stray = with_one(good.idx, lambda idx: torch.where(idx == idx.max(), 2**40, idx))
    handles = [one.handle for one in ep.dispatch(good.x, good.idx)]
    refusals: list[tuple[str, Callable[[], Any]]] = [
        ("topk_idx", lambda: ep.dispatch(good.x, stray, good.weights)),
        ("topk_weights", lambda: ep.dispatch(good.x, good.idx, nan)),
    ]
    if debug:
        refusals.append(("topk_weights", lambda: ep.dispatch(good.x, handle=handles, topk_weights=nan)))
    for argument, call in refusals:
        with pytest.raises(ArgumentError) as caught:
            call()
        assert caught.value.argument == argument
    assert ep.masked_ids == 0
    assert same(good.run(good.idx), want)


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_dispatch_counts_too(backend: str, debug: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if debug:
        monkeypatch.setenv("FLEXEP_DEBUG", "1")
    good = Round(backend, **STATIC)
    idx = [one.clone() for one in good.idx]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        good.run(idx)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        good.run(idx)
    graph.replay()
    assert good.ep.masked_ids == 0
    wild, _, strays = zip(*(wild_ids(torch.int64) for _ in range(R)), strict=True)
    for one, outside in zip(idx, wild, strict=True):
        one.copy_(outside)
    for replays in (1, 2):
        graph.replay()
        assert good.ep.masked_ids == replays * sum(strays)
