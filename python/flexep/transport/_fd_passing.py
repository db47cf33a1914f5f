"""Passing a descriptor to every rank of this host, over datagram sockets without a name in the file system."""

from __future__ import annotations

import array
import contextlib
import errno
import os
import secrets
import select
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass

from flexep.errors import PeerLost, Timeout

TOKEN_BYTES = 16
RANK_BYTES = 4
RETRY_SECONDS = 0.001  # between two attempts at a mailbox that is full


@dataclass(frozen=True)
class Address:
    """Where a rank's mailbox is, and the token that letters to it must bear. Known to the group alone."""

    name: bytes
    token: bytes


class Mailbox:
    """Receives descriptors. The kernel chooses its name, so those of two jobs never collide.

    A letter is one datagram: token of the receiver, rank of the sender, and the descriptor. Datagrams, not
    connections, because a stranger who connects and says nothing would be somebody to wait for.
    """

    def __init__(self) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind("")
        self.address = Address(self._socket.getsockname(), secrets.token_bytes(TOKEN_BYTES))

    def close(self) -> None:
        """Idempotent. Descriptors in letters that nobody read are closed by the kernel."""
        self._socket.close()

    def swap(
        self, fd: int, rank: int, addresses: Sequence[Address], deadline: float, timeout: float
    ) -> dict[int, int]:
        """Gives `fd` to every other rank and returns theirs, by rank; the caller closes them. Collective.

        Raises Timeout naming the ranks that have not taken or given theirs at `deadline` (of time.monotonic;
        `timeout` is what the error reports), PeerLost naming one that is gone, OSError where descriptors run out.
        """
        got: dict[int, int] = {}
        unsent = [peer for peer in range(len(addresses)) if peer != rank]
        try:
            while unsent or len(got) < len(addresses) - 1:
                # Nobody waits only to send: two ranks with full mailboxes would wait for each other.
                unsent = [peer for peer in unsent if not self._send(fd, rank, peer, addresses[peer])]
                self._receive(rank, len(addresses), got, unsent, deadline, timeout)
        except BaseException:
            for theirs in got.values():
                os.close(theirs)
            raise
        return got

    def _send(self, fd: int, rank: int, peer: int, to: Address) -> bool:
        """Whether the letter is in the mailbox of `peer`."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        try:
            self._socket.sendmsg([to.token, rank.to_bytes(RANK_BYTES, "little")], rights, 0, to.name)
        except BlockingIOError:
            return False
        except ConnectionRefusedError as error:
            raise PeerLost(
                f"open_windows: rank {peer} was gone before it took rank {rank}'s window"
            ) from error
        except OSError as error:
            if error.errno == errno.ETOOMANYREFS:  # too many descriptors are on their way; some will arrive
                return False
            raise
        return True

    def _receive(
        self, rank: int, ranks: int, got: dict[int, int], unsent: list[int], deadline: float, timeout: float
    ) -> None:
        """Waits for letters and takes all that are there."""
        left = deadline - time.monotonic()
        missing = tuple(
            sorted({*unsent, *(peer for peer in range(ranks) if peer not in got and peer != rank)})
        )
        if not missing:
            return
        if left <= 0:
            raise Timeout("open_windows", rank, missing, timeout)
        letters = select.poll()  # select itself knows no descriptor above 1023
        letters.register(self._socket, select.POLLIN)
        letters.poll(1000 * (min(left, RETRY_SECONDS) if unsent else left))
        with contextlib.suppress(BlockingIOError):
            while True:
                sender, fds = self._read()
                if sender is not None and sender < ranks and sender != rank and sender not in got and fds:
                    got[sender] = fds.pop()
                for stranger in fds:
                    os.close(stranger)

    def _read(self) -> tuple[int | None, list[int]]:
        """(rank that sent the next letter, its descriptors); None: it does not bear the token.

        Raises BlockingIOError when there is none.
        """
        length = TOKEN_BYTES + RANK_BYTES
        text, rights, flags, _ = self._socket.recvmsg(
            length + 1, socket.CMSG_LEN(array.array("i").itemsize), socket.MSG_CMSG_CLOEXEC
        )
        fds = array.array("i")
        for level, kind, data in rights:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(data[: len(data) - len(data) % fds.itemsize])
        if len(text) != length or not secrets.compare_digest(text[:TOKEN_BYTES], self.address.token):
            return None, list(fds)
        if not fds and flags & socket.MSG_CTRUNC:
            raise OSError(errno.EMFILE, "a peer's window did not fit into the table of open descriptors")
        return int.from_bytes(text[TOKEN_BYTES:], "little"), list(fds)
