"""Windows of GPU processes above their memory: what a launch is told, and what its failures are called.

Over a fake driver and launches that are only written down, so that it runs without a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

import flexep
from flexep._native.window import WindowShape
from flexep.errors import CollectiveMismatch, PeerLost, Timeout, Unavailable, WindowBroken, WindowBusy
from flexep.transport import device_window
from flexep.transport._window import OPS
from flexep.transport.device_window import DeviceWindow
from flexep.transport.window import WindowCollectives, make_window
from tests.transport.fake_driver import FakeDriver, OnGpu
from tests.transport.held import window_mappings

R = 2
SHAPE = WindowShape(
    ranks=R, domain_size=R, slices=1, slots=2, pull_tokens=4, push_tokens=4, pull_row_bytes=64, push_row_bytes=64,
    mail_bytes=256, board_ints=64, registered_rows=3, landed_rows=0,
)  # fmt: skip


class WrittenDown:
    """Stands for DeviceWindows: keeps what it was told; `fault_now` is what the GPU has reported."""

    def __init__(self, shape: WindowShape, addresses: Any, hosted: Any, device: torch.device) -> None:
        self.told = (shape, list(addresses), tuple(hosted), device)
        self.moved = torch.zeros(1, len(OPS), 4, dtype=torch.int64)
        self.launched: list[str] = []
        self.fault_now: Any = None

    def publish(self, ints: Any, out: Any, op: int, seconds: float) -> None:
        self.launched.append(OPS[op])

    def leave(self) -> None:
        self.launched.append("leave")

    def fault(self) -> Any:
        return self.fault_now


@pytest.fixture
def windows(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[DeviceWindow]]:
    """Of two ranks, here threads, on GPUs 0 and 1."""
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(device_window, "DeviceWindows", WrittenDown)
    store = HashStore()

    def open_as(rank: int) -> DeviceWindow:
        group = OnGpu(flexep.Group.from_store(store, rank, R), rank)
        made = make_window(group, SHAPE, 20.0)
        assert isinstance(made, DeviceWindow)
        return made

    with ThreadPoolExecutor(R) as ranks:
        made = list(ranks.map(open_as, range(R)))
    yield made
    for one in made:
        one.close()
        one.close()
    assert (driver.live, window_mappings()) == ((0, 0, 0), 0)


def test_a_launch_is_for_the_hosted_rank_and_knows_every_window(windows: list[DeviceWindow]) -> None:
    seen = []
    for rank, one in enumerate(windows):
        shape, addresses, hosted, device = one._windows.told
        assert (shape, hosted, device) == (SHAPE, (rank,), torch.device("cuda", rank))
        assert one._memory.name == "peer"
        assert addresses == list(one._memory.addresses)
        seen += addresses
    assert len(set(seen)) == R * R  # every rank maps every window for itself
    assert window_mappings() == R * R


def test_registered_rows_are_those_of_the_own_window(windows: list[DeviceWindow]) -> None:
    for rank, one in enumerate(windows):
        one._memory.view(rank)[SHAPE.registered_at] = 7 + rank
        peer_sees = windows[1 - rank]._memory.view(rank)
        assert peer_sees[SHAPE.registered_at] == 7 + rank


@pytest.mark.parametrize(
    ("status", "error", "text"),
    [
        ("expired", Timeout, "dispatch.rows: rank 1 waited 20 s for rank 0 .*word offered: want"),
        ("left", PeerLost, "rank 1 waits for rank 0"),
        ("mismatched", CollectiveMismatch, r"dispatch.rows \(epoch 3\)"),
        ("busy", WindowBusy, "another operation ran"),
        ("failed", PeerLost, "rank 1 cannot run it"),
    ],
)
def test_what_the_gpu_reports_is_raised_by_name(
    windows: list[DeviceWindow], status: str, error: type[Exception], text: str
) -> None:
    one = windows[1]
    ints = [torch.zeros(3, dtype=torch.int32)]
    one.publish(ints, "dispatch.counts")
    one._windows.fault_now = SimpleNamespace(
        status=status, op=OPS.index("dispatch.rows"), epoch=3, waiter=1, awaited=0, word="offered",
        want=(3, 1, 5), got=(2, 0, 4),
    )  # fmt: skip
    with pytest.raises(error, match=text):
        one.publish(ints, "dispatch.counts")
    with pytest.raises(error):
        WindowCollectives(one).to_host(ints[0])
    assert one._windows.launched == ["dispatch.counts"]


def test_a_closed_window_launches_nothing(windows: list[DeviceWindow]) -> None:
    one = windows[0]
    one.close()
    with pytest.raises(WindowBroken):
        one.publish([torch.zeros(3, dtype=torch.int32)], "dispatch.counts")
    assert one._windows.launched == ["leave"]


def test_a_window_that_goes_tells_its_peers_once(windows: list[DeviceWindow]) -> None:
    told = [one._windows.launched for one in windows]
    windows[0].close()
    windows[0].close()
    windows.pop()
    gc.collect()
    assert told == [["leave"], ["leave"]]


def test_without_cuda_nothing_is_opened(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    group = OnGpu(flexep.Group.from_store(HashStore(), 0, 1))
    with pytest.raises(Unavailable, match="sees no CUDA GPU"):
        make_window(group, SHAPE, 1.0)
