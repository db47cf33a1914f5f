"""The clocks of GPUs on a GPU of the mind: streams are sums of microseconds, and what is enqueued is written down."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from flexep.benchmark import beside, timing

DEVICE = torch.device("cpu")  # of the tensors; the clocks do not look
PRODUCT_US = 100.0


class Gpu:
    """Streams by name and how far each has come, the current one, and all that was enqueued."""

    def __init__(self) -> None:
        self.now = {"main": 0.0, "side": 0.0}
        self.stream = "main"
        self.log: list[str] = []

    def run(self, what: str, us: float) -> None:
        self.log.append(what)
        self.now[self.stream] += us

    def synchronize(self, *_: Any) -> None:
        self.log.append("synchronize")
        self.now = dict.fromkeys(self.now, max(self.now.values()))

    @contextlib.contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before


class Stream(str):
    """The side stream."""

    gpu: Gpu

    def __new__(cls, *_: Any) -> Stream:
        return super().__new__(cls, "side")

    def wait_stream(self, main: str) -> None:
        self.gpu.now["side"] = max(self.gpu.now["side"], self.gpu.now[main])


class Event:
    """A moment of the current stream."""

    gpu: Gpu

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.gpu.log.append("event")
        self.at = self.gpu.now[self.gpu.stream]

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu()
    monkeypatch.setattr(Stream, "gpu", made, raising=False)
    monkeypatch.setattr(Event, "gpu", made, raising=False)
    fakes = {
        "Event": Event, "Stream": Stream, "synchronize": made.synchronize, "stream": made.on,
        "current_stream": lambda device: "main", "_sleep": lambda cycles: made.run(f"sleep {cycles}", cycles / 2e3),
    }  # fmt: skip
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "mm", lambda a, b, out: made.run("product", PRODUCT_US))
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op=None: made.run("all_reduce", 5.0))
    monkeypatch.setattr(dist, "barrier", lambda: made.log.append("barrier"))
    monkeypatch.setattr(beside, "SIDE", 2)
    return made


def test_every_call_stands_behind_a_gate_that_was_enqueued_before(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "_host_us", lambda call, device: 400.0)
    times = timing._gated_cuda(lambda: gpu.run("call", 70.0), 3, DEVICE)
    sleep = f"sleep {2 * 400 * timing.CYCLES_PER_US}"
    assert gpu.log == ["synchronize", sleep, "all_reduce", "event", "call", "event", "synchronize"] * 3
    assert times.device == pytest.approx([70.0] * 3)
    assert times.host is not None
    assert len(times.host) == 3


def test_the_host_is_timed_with_an_idle_device(gpu: Gpu) -> None:
    assert (
        timing._host_us(lambda: gpu.run("call", 1e6), DEVICE) < 1e5
    )  # the device's second is not the host's
    assert gpu.log == ["synchronize", "barrier", "call"] * 2


def test_a_chain_has_one_gate_and_no_wait(gpu: Gpu) -> None:
    periods = timing._chained_cuda(lambda: gpu.run("pair", 50.0), 4, DEVICE)
    assert periods == pytest.approx([50.0] * 4)
    assert gpu.log[0] == gpu.log[-1] == "synchronize"
    assert gpu.log[3:-1] == ["event", *["pair", "event"] * 4]


def test_products_are_timed_alone_and_beside_calls(gpu: Gpu) -> None:
    found = beside.run_beside(lambda: gpu.run("call", 40.0), DEVICE)
    alone = beside.PRODUCTS * PRODUCT_US
    assert (found.alone_us, found.beside_us) == pytest.approx(
        (alone, alone)
    )  # streams of the mind take nothing
    assert found.covered == 1.0
    assert gpu.log.count("product") == 3 * beside.PRODUCTS  # to warm up, alone, and beside


def test_calls_that_do_not_cover_the_chain_are_doubled(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "_agreed", lambda value, device: value)
    monkeypatch.setattr(beside, "calls_to_cover", lambda chain_us, call_us: 5)
    found = beside.run_beside(lambda: gpu.run("call", 40.0), DEVICE)
    assert found.covered == 1.0  # 5 and 10 calls are too short for 800 us, 20 are not
    begins = [i for i, what in enumerate(gpu.log) if what.startswith("sleep")]
    calls = [gpu.log[a:b].count("call") for a, b in zip(begins, [*begins[1:], None], strict=True)]
    assert calls == [0, 1, 8, 5, 10, 20]  # products twice alone, the pace of calls, and three attempts
