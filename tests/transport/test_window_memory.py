"""Windows in one process, what memory is free, and mailboxes: reserved whole, thrown away whole, no stranger let in."""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

import flexep
from flexep.errors import ArgumentError, FlexEPError, Timeout, Unavailable
from flexep.transport import _memory
from flexep.transport._fd_passing import RANK_BYTES, TOKEN_BYTES, Address, Mailbox
from flexep.transport.window_memory import open_windows
from tests.transport.held import held, is_mapped

NBYTES = 3 * 4096 + 128  # no whole number of pages
TIMEOUT = 20.0


# -- one process


def test_local_windows_are_zeroed_aligned_and_apart() -> None:
    opened = open_windows(flexep.Group.local(5), NBYTES, TIMEOUT)
    assert (opened.name, opened.nbytes, len(opened.addresses)) == ("local", NBYTES, 5)
    assert all(address % 4096 == 0 for address in opened.addresses)
    assert not any(opened.view(rank).any() for rank in range(5))
    for rank in range(5):
        opened.view(rank)[:] = rank + 1
        ctypes.memset(opened.addresses[rank], 100 + rank, 1)
    for rank in range(5):
        view = opened.view(rank)
        assert view.shape == (NBYTES,)
        assert view.dtype == np.uint8
        assert view[0] == 100 + rank
        assert (view[1:] == rank + 1).all()


@pytest.mark.parametrize("size", [1, 3])
def test_a_view_outlives_close_and_nothing_outlives_the_view(size: int) -> None:
    opened = open_windows(flexep.Group.local(size), NBYTES, TIMEOUT)
    address = opened.addresses[-1]
    tensor = torch.from_numpy(opened.view(size - 1))
    tensor.fill_(7)
    opened.close()
    opened.close()
    assert opened.addresses == ()
    with pytest.raises(FlexEPError, match="closed"):
        opened.view(0)
    assert tensor.data_ptr() == address
    assert tensor.eq(7).all()
    del tensor
    assert not is_mapped(address)


def test_windows_that_nobody_closed_go_with_their_object() -> None:
    opened = open_windows(flexep.Group.local(2), NBYTES, TIMEOUT)
    address = opened.addresses[1]
    assert is_mapped(address)
    del opened
    assert not is_mapped(address)


def test_sizes_and_devices_that_cannot_be_are_named() -> None:
    with pytest.raises(ArgumentError, match="nbytes = 0"):
        open_windows(flexep.Group.local(2), 0, TIMEOUT)
    if not torch.cuda.is_available():
        with pytest.raises(Unavailable, match=rf"2 windows of {NBYTES} bytes on cuda: .*CUDA"):
            open_windows(flexep.Group.local(2, "cuda"), NBYTES, TIMEOUT)
    with pytest.raises(Unavailable, match=rf"2 windows of {1 << 50} bytes.* the host has \d+ free"):
        open_windows(flexep.Group.local(2), 1 << 50, TIMEOUT)


# -- what is free


def control_group(folder: Path, most: str, used: int, cache: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{most}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


def test_limits_of_a_control_group_and_of_those_above_it(tmp_path: Path) -> None:
    control_group(tmp_path, "1000", 900, 100)
    control_group(tmp_path / "job", "max", 900, 100)
    control_group(tmp_path / "job" / "step", "500", 450, 20)
    files = ("memory.max", "memory.current", "inactive_file")
    found = list(_memory._free_in_cgroup(tmp_path, "/job/step", files))
    assert [free for _, free in found] == [70, 200]
    assert found[0][0] == f"the memory limit in {tmp_path / 'job' / 'step'}"
    assert [free for _, free in _memory._free_in_cgroup(tmp_path, "/unknown/here", files)] == [200]


def test_reserving_stops_at_the_limit_and_gives_back(monkeypatch) -> None:
    left = iter([1 << 40, 1 << 20])

    def free() -> Iterator[tuple[str, int]]:
        yield "the memory limit in a test", next(left, 0)

    monkeypatch.setattr(_memory, "_free_bytes", free)
    descriptors = held().descriptors
    want = rf"a window of {3 * _memory.PIECE_BYTES} bytes, {_memory.PIECE_BYTES} of them reserved: .* {1 << 20} free"
    with pytest.raises(Unavailable, match=want):
        _memory.reserve_memfd(3 * _memory.PIECE_BYTES, 1)
    assert held().descriptors == descriptors


def test_reserved_memory_is_all_there_and_cannot_shrink() -> None:
    fd = _memory.reserve_memfd(_memory.PIECE_BYTES + 4096, 1)
    try:
        found = os.fstat(fd)
        assert found.st_size == _memory.PIECE_BYTES + 4096
        assert found.st_blocks * 512 >= found.st_size
        for size in (4096, 2 * found.st_size):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


# -- descriptors between mailboxes


def swap_among(boxes: list[Mailbox], seconds: float) -> list[dict[int, int] | Exception]:
    """What `swap` gave every mailbox, each in a thread of its own; the descriptor of rank r is a memfd holding r."""
    out: list = [None] * len(boxes)
    addresses = [box.address for box in boxes]

    def run(rank: int) -> None:
        fd = os.memfd_create(f"of rank {rank}")
        os.write(fd, bytes([rank]))
        try:
            out[rank] = boxes[rank].swap(fd, rank, addresses, time.monotonic() + seconds, seconds)
        except Exception as error:
            out[rank] = error
        finally:
            os.close(fd)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(boxes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return out


def letter(to: Address, rank: int, token: bytes, descriptors: list[int]) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.connect(to.name)
        socket.send_fds(stranger, [token + rank.to_bytes(RANK_BYTES, "little")], descriptors)


@pytest.mark.parametrize("size", [1, 2, 24])  # 24: more letters than a mailbox holds
def test_every_mailbox_gets_the_descriptor_of_every_other(size: int) -> None:
    before = held().descriptors
    boxes = [Mailbox() for _ in range(size)]
    got = swap_among(boxes, TIMEOUT)
    for rank, fds in enumerate(got):
        assert isinstance(fds, dict), fds
        assert sorted(fds) == [r for r in range(size) if r != rank]
        for peer, fd in fds.items():
            assert os.pread(fd, 2, 0) == bytes([peer])
            assert not os.get_inheritable(fd)
            os.close(fd)
    for box in boxes:
        box.close()
    assert held().descriptors == before


def test_letters_of_strangers_are_thrown_away_with_their_descriptors() -> None:
    before = held().descriptors
    boxes = [Mailbox() for _ in range(3)]
    false = os.memfd_create("false")
    os.write(false, b"\xff")
    token = boxes[0].address.token
    letter(boxes[0].address, 1, bytes(TOKEN_BYTES), [false])  # not the token
    letter(boxes[0].address, 1, token[:-1], [false])  # too short
    letter(boxes[0].address, 7, token, [false])  # no such rank
    letter(boxes[0].address, 0, token, [false])  # this very rank
    letter(boxes[0].address, 2, token, [])  # nothing in it
    got = swap_among(boxes, TIMEOUT)
    os.close(false)
    for fds in got:
        assert isinstance(fds, dict), fds
        for peer, fd in fds.items():
            assert os.pread(fd, 2, 0) == bytes([peer])
            os.close(fd)
    for box in boxes:
        box.close()
    assert held().descriptors == before


def test_a_rank_that_swaps_with_nobody_names_them_in_time() -> None:
    before = held().descriptors
    present, absent, gone = Mailbox(), Mailbox(), Mailbox()
    addresses = [present.address, absent.address, absent.address]
    letter(present.address, 2, present.address.token, [0])  # came, and must not stay open
    started = time.monotonic()
    with pytest.raises(Timeout) as caught_timeout:
        present.swap(0, 0, addresses, started + 0.3, 0.3)
    assert 0.3 <= time.monotonic() - started < 3
    assert (caught_timeout.value.op, caught_timeout.value.awaited_ranks) == ("open_windows", (1,))
    gone.close()
    with pytest.raises(flexep.PeerLost, match="rank 1"):
        present.swap(0, 0, [present.address, gone.address], time.monotonic() + TIMEOUT, TIMEOUT)
    present.close()
    absent.close()
    assert held().descriptors == before


def test_a_full_table_of_descriptors_is_an_error_and_no_silent_loss() -> None:
    boxes = [Mailbox(), Mailbox()]
    letter(boxes[0].address, 1, boxes[0].address.token, [0])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) - 1, hard))
    filler = []
    try:
        with suppress(OSError):  # until the table is full
            while True:
                filler.append(os.dup(0))
        with pytest.raises(OSError, match="did not fit into the table"):
            boxes[0].swap(0, 0, [box.address for box in boxes], time.monotonic() + TIMEOUT, TIMEOUT)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filler:
            os.close(fd)
        for box in boxes:
            box.close()
