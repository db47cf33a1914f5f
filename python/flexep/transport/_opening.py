"""A collective opening of windows: every rank reserves memory without a name, gives a handle of it to every peer and
maps theirs. What the memory is, a Reserver knows.

Nothing but handles and mappings keeps the memory, so nothing is left behind however a process ends.
"""

from __future__ import annotations

import json
import os
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, TypeVar

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

OPEN = "open_windows"
LEAST_SECONDS = 0.05  # a rank that ran out of time still looks once whether the others have
T = TypeVar("T")
Hello = dict[str, Any]  # what a rank says of itself before any of them reserves, as JSON


class Mapped(Protocol):
    """Memory that this process has mapped, until nobody refers to it any more."""

    @property
    def address(self) -> int: ...

    def view(self, offset: int, nbytes: int) -> Any:
        """uint8 [nbytes] at `offset`, without a copy: a numpy array of host memory, a tensor of a GPU's."""


class Reserver(ABC):
    """How one rank comes to memory of `nbytes` that its peers can map. Methods raise Unavailable.

    Attributes: `name` (of the transport), `nbytes`, `ranks`.
    """

    name: str

    def __init__(self, nbytes: int, ranks: int) -> None:
        self.nbytes = nbytes
        self.ranks = ranks

    @abstractmethod
    def introduce(self) -> Hello:
        """Judges what this rank needs before anybody reserves; what peers must know of it."""

    @abstractmethod
    def check(self, hellos: Sequence[Hello], elsewhere: str) -> None:
        """Raises what every rank must refuse alike. `elsewhere` names ranks that no descriptor can be sent to; ""
        where there are none. If it does not raise, handles are bytes."""

    @abstractmethod
    def reserve(self) -> tuple[int | bytes, Mapped]:
        """A handle of zeroed memory, and the memory as this rank maps it. A descriptor is the caller's to close;
        bytes can go anywhere."""

    @abstractmethod
    def map(self, handle: int | bytes, peer: int, hello: Hello) -> Mapped:
        """The memory of rank `peer`, which said `hello`."""


def check_size(nbytes: int) -> None:
    if nbytes < 1:
        raise ArgumentError("nbytes", nbytes, "at least 1")


class Opening:
    """One opening. What it holds is let go of by `close`, except what `run` returned."""

    def __init__(self, group: Group, reserver: Reserver, layout: str, timeout: float) -> None:
        self._group = group
        self._reserver = reserver
        self._layout = layout
        self._timeout = timeout
        self._deadline = time.monotonic() + timeout
        self._mailbox: Mailbox | None = None
        self._fd: int | None = None
        self._mappings: dict[int, Mapped] = {}

    def run(self) -> list[Mapped]:
        """Every rank's window. Raises as `open_windows` does."""
        hellos = self._together(self._introduce)
        _check_alike(hellos)
        self._reserver.check(hellos, out_of_reach([hello["host"] for hello in hellos], self._group.rank))
        handles = self._together(self._reserve)
        self._together(lambda: self._map_peers(hellos, handles))
        return [self._mappings[rank] for rank in range(self._group.size)]

    def close(self) -> None:
        if self._mailbox is not None:
            self._mailbox.close()
        if self._fd is not None:
            os.close(self._fd)
        self._mappings = {}

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

    def _introduce(self) -> Hello:
        """Who this rank is. Judges what all ranks need before any of them reserves."""
        hello = self._reserver.introduce()
        self._mailbox = Mailbox()
        address = self._mailbox.address
        return {
            **hello,
            "nbytes": self._reserver.nbytes,
            "layout": self._layout,
            "host": host_identity(),
            "name": address.name.hex(),
            "token": address.token.hex(),
        }

    def _reserve(self) -> str | None:
        """The handle as text, if it is one that can be said."""
        handle, self._mappings[self._group.rank] = self._reserver.reserve()
        if isinstance(handle, bytes):
            return handle.hex()
        self._fd = handle
        return None

    def _map_peers(self, hellos: Sequence[Hello], handles: Sequence[str | None]) -> None:
        if self._fd is None:
            for peer, handle in enumerate(handles):
                if peer != self._group.rank:
                    assert handle is not None
                    self._mappings[peer] = self._reserver.map(bytes.fromhex(handle), peer, hellos[peer])
        else:
            self._swap(self._fd, hellos)

    def _swap(self, fd: int, hellos: Sequence[Hello]) -> None:
        """Maps what peers send; no descriptor stays open for it."""
        assert self._mailbox is not None
        addresses = [Address(bytes.fromhex(h["name"]), bytes.fromhex(h["token"])) for h in hellos]
        fds = self._mailbox.swap(fd, self._group.rank, addresses, self._deadline, self._timeout)
        try:
            for peer, theirs in sorted(fds.items()):
                self._mappings[peer] = self._reserver.map(theirs, peer, hellos[peer])
        finally:
            for theirs in fds.values():
                os.close(theirs)


def host_identity() -> list[str]:
    """[boot, network namespace] of this process: ranks whose two are equal can pass descriptors to each other."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    namespace = ""
    with suppress(OSError):
        found = os.stat("/proc/self/ns/net")
        namespace = f"{found.st_dev}:{found.st_ino}"
    return [boot, namespace]


def out_of_reach(identities: Sequence[Sequence[str]], rank: int) -> str:
    """Names the ranks that `rank` can send no descriptor to, and why; "" where there are none."""
    boot, namespace = identities[rank]
    elsewhere = [r for r, (theirs, _) in enumerate(identities) if theirs != boot]
    walled = [
        r for r, (theirs, theirs_too) in enumerate(identities) if theirs == boot and theirs_too != namespace
    ]
    where = [f"ranks {elsewhere} run on another host"] if elsewhere else []
    where += [f"ranks {walled} run in another network namespace"] if walled else []
    return ", ".join(where)


def _check_alike(hellos: Sequence[Hello]) -> None:
    """Sizes, and layouts too: windows of one size can be cut up in several ways."""
    for field in ("nbytes", "layout"):
        by_value: dict[str, list[int]] = defaultdict(list)
        for rank, hello in enumerate(hellos):
            by_value[str(hello[field])].append(rank)
        if len(by_value) > 1:
            raise CollectiveMismatch(OPEN, {field: dict(by_value)})
