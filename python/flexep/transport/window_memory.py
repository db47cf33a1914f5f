"""The windows of one-sided transports on the CPU: the only memory that other ranks can see.

`local`: the ranks are one process, and its memory is theirs. `shm`: the ranks are processes of one host. Each reserves
memory without a name and gives its descriptor to every peer; nothing but descriptors and mappings keeps the memory,
so nothing is left behind however a process ends.
"""

from __future__ import annotations

import json
import mmap
import os
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from flexep.errors import (
    ArgumentError,
    CollectiveMismatch,
    FlexEPError,
    PeerLost,
    PeerRefused,
    Timeout,
    Unavailable,
)
from flexep.group import Group
from flexep.transport._fd_passing import Address, Mailbox
from flexep.transport._memory import Mapping, require_free, reserve_memfd

OPEN = "open_windows"
LEAST_SECONDS = 0.05  # a rank that ran out of time still looks once whether the others have
T = TypeVar("T")


class WindowMemory:
    """The windows of all ranks, as this process can address them.

    Attributes:
        name: "local" or "shm". nbytes: of one rank's window.
        addresses: [R], where each rank's window begins in this process; page aligned. Empty once closed.
    """

    def __init__(self, name: str, nbytes: int, places: Sequence[tuple[Mapping, int]]) -> None:
        """`places`: mapping and offset of each rank's window."""
        self.name = name
        self.nbytes = nbytes
        self._places = tuple(places)
        self.addresses = tuple(mapping.address + offset for mapping, offset in places)

    def view(self, rank: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [nbytes]: a rank's window, without a copy. Its memory stays while the view lives, also after
        `close`.

        Raises FlexEPError when the windows are closed.
        """
        if not self._places:
            raise FlexEPError("these windows were closed")
        mapping, offset = self._places[rank]
        return mapping.view(offset, self.nbytes)

    def close(self) -> None:
        """Unmaps what no view holds. Idempotent, not collective; also happens when this object is collected.

        Nobody may use `addresses` any more. Peers that have mapped this rank's window keep it.
        """
        self._places = ()
        self.addresses = ()


def open_windows(group: Group, nbytes: int, timeout: float) -> WindowMemory:
    """A window of `nbytes` zeroed bytes for every rank. Collective; ends within `timeout` seconds.

    Raises on every rank, leaving nothing behind:
        Unavailable: ranks that shared memory cannot reach, too little memory, or a CUDA group.
        PeerRefused: another rank could not reserve or map. CollectiveMismatch: ranks passed different sizes.
        Timeout, PeerLost: a rank did not come along.
    """
    if group.device.type != "cpu":
        raise Unavailable(
            f"windows of {group.device.type} ranks cannot be opened: shared memory serves CPU ranks; "
            "use backend='alltoall' on CUDA"
        )
    if group.is_local:
        _check_size(nbytes)
        return _open_local(group.size, nbytes)
    opening = _Opening(group, nbytes, timeout)
    try:
        return opening.run()
    finally:
        opening.close()


def _check_size(nbytes: int) -> None:
    if nbytes < 1:
        raise ArgumentError("nbytes", nbytes, "at least 1")


def _open_local(size: int, nbytes: int) -> WindowMemory:
    """One mapping for all ranks: fewer of them, and huge pages may span small windows."""
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    require_free(size * stride, size * stride, f"{size} windows of {nbytes} bytes")
    try:
        mapping = Mapping.private(size * stride)
    except OSError as error:
        raise Unavailable(f"{size} windows of {nbytes} bytes: {error}") from error
    return WindowMemory("local", nbytes, [(mapping, rank * stride) for rank in range(size)])


class _Opening:
    """One collective opening over shared memory. What it holds is let go by `close`, except what `run` returned."""

    def __init__(self, group: Group, nbytes: int, timeout: float) -> None:
        self._group = group
        self._nbytes = nbytes
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._mailbox: Mailbox | None = None
        self._fd: int | None = None
        self._mappings: list[Mapping] = []

    def run(self) -> WindowMemory:
        hellos = self._together(self._introduce)
        _check_hellos(hellos, self._group.rank)
        self._together(self._reserve)
        addresses = [Address(bytes.fromhex(h["name"]), bytes.fromhex(h["token"])) for h in hellos]
        self._together(lambda: self._swap(addresses))
        return WindowMemory("shm", self._nbytes, [(mapping, 0) for mapping in self._mappings])

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
        if self._fd is not None:
            os.close(self._fd)
        self._mappings = []

    def _together(self, act: Callable[[], T]) -> list[T]:
        """What `act` returned on every rank. If it raised anywhere: its own error there, PeerRefused elsewhere.

        A lost or late peer would not hear of it: then nobody is told, and the others find out as this rank did.
        """
        value = error = None
        try:
            value = act()
        except (PeerLost, Timeout):
            raise
        except FlexEPError as refused:
            error = refused
        except OSError as failed:
            error = Unavailable(f"rank {self._group.rank} cannot open its windows: {failed}")
            error.__cause__ = failed
        said = json.dumps({"value": value, "error": None if error is None else str(error)}).encode()
        left = max(LEAST_SECONDS, self._deadline - time.monotonic())
        try:
            heard = [json.loads(payload) for payload in self._group.all_gather(said, left)]
        except Timeout as late:
            if error is not None:
                raise error from late
            raise Timeout(OPEN, late.waiting_rank, late.awaited_ranks, self._timeout) from late
        if error is not None:
            raise error
        refused_by = {rank: one["error"] for rank, one in enumerate(heard) if one["error"] is not None}
        if refused_by:
            raise PeerRefused(OPEN, refused_by)
        return [one["value"] for one in heard]

    def _introduce(self) -> dict[str, Any]:
        """Who this rank is. Judges what all ranks need before any of them reserves."""
        _check_size(self._nbytes)
        size = self._group.size
        require_free(
            size * self._nbytes, self._nbytes, f"{size} windows of {self._nbytes} bytes on this host"
        )
        self._mailbox = Mailbox()
        address = self._mailbox.address
        return {
            "nbytes": self._nbytes,
            "host": host_identity(),
            "name": address.name.hex(),
            "token": address.token.hex(),
        }

    def _reserve(self) -> None:
        self._fd = reserve_memfd(self._nbytes, self._group.size)

    def _swap(self, addresses: Sequence[Address]) -> None:
        """Maps every rank's window; no descriptor stays open for it."""
        assert self._mailbox is not None
        assert self._fd is not None
        rank = self._group.rank
        fds = self._mailbox.swap(self._fd, rank, addresses, self._deadline, self._timeout)
        try:
            fds[rank] = self._fd
            self._fd = None
            self._mappings = [Mapping.shared(fds[r], self._nbytes) for r in range(self._group.size)]
        finally:
            for fd in fds.values():
                os.close(fd)


def host_identity() -> list[str]:
    """[boot, network namespace] of this process: ranks whose two are equal can pass descriptors to each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = ""
    with suppress(OSError):
        found = os.stat("/proc/self/ns/net")
        namespace = f"{found.st_dev}:{found.st_ino}"
    return [boot, namespace]


def _check_hellos(hellos: Sequence[dict[str, Any]], rank: int) -> None:
    """Raises what every rank must refuse alike."""
    here = hellos[rank]["host"]
    elsewhere = [r for r, hello in enumerate(hellos) if hello["host"][0] != here[0]]
    walled = [r for r, hello in enumerate(hellos) if r not in elsewhere and hello["host"] != here]
    if elsewhere or walled:
        where = [f"ranks {elsewhere} run on another host"] if elsewhere else []
        where += [f"ranks {walled} run in another network namespace"] if walled else []
        raise Unavailable(
            f"shared memory does not reach every rank from rank {rank}: {', '.join(where)}; use backend='alltoall'"
        )
    by_size: dict[str, list[int]] = defaultdict(list)
    for r, hello in enumerate(hellos):
        by_size[str(hello["nbytes"])].append(r)
    if len(by_size) > 1:
        raise CollectiveMismatch(OPEN, {"nbytes": dict(by_size)})
