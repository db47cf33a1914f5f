"""Group: all that FlexEP knows of the launcher. Rank, size, a bounded all-gather of bytes, a barrier."""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from flexep.errors import ArgumentError, PeerLost, Timeout, Unavailable

DEFAULT_TIMEOUT = 300.0  # seconds; generous, because ranks warm up unequally


class Group(ABC):
    """The ranks that exchange tokens. Make one with `from_process_group`, `from_store` or `local`.

    Attributes:
        rank: this process's rank (0 in a local group). size: R. device: where the ranks' tensors live.
        hosted: ranks that this process plays; `(rank,)`, or all of them in a local group.
        generation: number that keys of this group carry; the caller raises it when survivors regroup.
    """

    def __init__(
        self, rank: int, size: int, device: torch.device, hosted: Sequence[int], generation: int = 0
    ) -> None:
        self.rank = rank
        self.size = size
        self.device = device
        self.hosted = tuple(hosted)
        self.generation = generation

    @staticmethod
    def from_process_group(process_group: dist.ProcessGroup | None = None) -> Group:
        """A group over an initialised torch process group (None: the default one).

        Raises Unavailable when torch.distributed is not initialised or this process is not a member.
        """
        if not dist.is_available() or not dist.is_initialized():
            raise Unavailable(
                "torch.distributed is not initialised; call init_process_group, or use Group.local"
            )
        pg = dist.group.WORLD if process_group is None else process_group
        if pg is None or dist.get_rank(pg) < 0:
            raise Unavailable("this process is not a member of the process group")
        return _ProcessGroup(
            pg, dist.get_rank(pg), dist.get_world_size(pg), _device_of(dist.get_backend(pg)), 0
        )

    @staticmethod
    def from_store(
        store: dist.Store, rank: int, size: int, generation: int = 0, device: str | torch.device = "cpu"
    ) -> Group:
        """A group that meets through a torch store (TCPStore, FileStore, HashStore). Needs no
        init_process_group.

        A back end that needs a process group gets one made from the store: gloo on the CPU, NCCL on CUDA.
        Every key carries `generation`; survivors of a dead rank regroup with a higher one.
        """
        _check_size(size)
        if not isinstance(rank, int) or not 0 <= rank < size:
            raise ArgumentError("rank", rank, f"a rank in [0, {size})")
        return _StoreGroup(store, rank, size, _check_device(device), generation)

    @staticmethod
    def local(size: int, device: str | torch.device = "cpu") -> Group:
        """R ranks in this process. Dispatchers on it take lists of R tensors and return lists of R
        results."""
        _check_size(size)
        return _LocalGroup(0, size, _check_device(device), range(size))

    @property
    def is_local(self) -> bool:
        """Whether this process plays every rank and arguments are lists."""
        return False

    def process_group(self, timeout: float) -> dist.ProcessGroup:
        """The torch process group behind this group, made on first use with `timeout` seconds. Collective
        then.

        Raises Unavailable in a local group, which has none.
        """
        raise Unavailable("a local group has no process group: its collectives are plain copies")

    @abstractmethod
    def all_gather(self, payload: bytes, timeout: float = DEFAULT_TIMEOUT) -> list[bytes]:
        """Every rank's payload, in rank order. Collective.

        Raises Timeout after `timeout` seconds, naming the missing ranks where the transport can tell.
        """

    @abstractmethod
    def close(self) -> None:
        """Lets go of a process group that this group made; the caller's own stays. Safe to call twice."""

    def barrier(self, timeout: float = DEFAULT_TIMEOUT) -> None:
        """Returns when every rank has called it. Raises Timeout after `timeout` seconds."""
        self.all_gather(b"", timeout)


def _check_size(size: object) -> None:
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ArgumentError("size", size, "an integer of at least 1")


def _check_device(device: str | torch.device) -> torch.device:
    try:
        made = torch.device(device)
    except (RuntimeError, TypeError):
        made = torch.device("meta")
    if made.type not in ("cpu", "cuda"):
        raise ArgumentError("device", device, "cpu or cuda")
    return made


class _LocalGroup(Group):
    """R ranks in one process: whatever one rank says, all have said."""

    @property
    def is_local(self) -> bool:
        return True

    def all_gather(self, payload: bytes, timeout: float = DEFAULT_TIMEOUT) -> list[bytes]:
        return [payload] * self.size

    def close(self) -> None:
        """Nothing to let go of."""


class _ProcessGroup(Group):
    """A group over a process group that belongs to the caller."""

    def __init__(
        self, pg: dist.ProcessGroup, rank: int, size: int, device: torch.device, generation: int
    ) -> None:
        super().__init__(rank, size, device, (rank,), generation)
        self._pg = pg

    def process_group(self, timeout: float) -> dist.ProcessGroup:
        return self._pg

    def all_gather(self, payload: bytes, timeout: float = DEFAULT_TIMEOUT) -> list[bytes]:
        lengths = self._gather_tensor(torch.tensor([len(payload)], dtype=torch.int64), timeout).tolist()
        padded = torch.frombuffer(bytearray(payload.ljust(max(max(lengths), 1), b"\0")), dtype=torch.uint8)
        rows = self._gather_tensor(padded, timeout).view(self.size, -1)
        return [bytes(row[:length].tolist()) for row, length in zip(rows, lengths, strict=True)]

    def close(self) -> None:
        """The process group is the caller's."""

    def _gather_tensor(self, tensor: torch.Tensor, timeout: float) -> torch.Tensor:
        tensor = tensor.to(self.device)
        out = tensor.new_empty(self.size * tensor.numel())
        work = self._pg._allgather_base(out, tensor)
        wait(work, "all_gather", self.rank, timeout, self.device)
        if (
            self.device.type == "cuda"
        ):  # the host has not waited yet, and reading `out` would do so without an end
            _await_completion(work, self.rank, timeout)
        return out.cpu()


class _StoreGroup(Group):
    """A group that meets through a store. Its process group is made when a back end first asks for it."""

    def __init__(
        self, store: dist.Store, rank: int, size: int, device: torch.device, generation: int
    ) -> None:
        super().__init__(rank, size, device, (rank,), generation)
        self._store = dist.PrefixStore(f"flexep/{generation}", store)
        self._round = 0
        self._pg: dist.ProcessGroup | None = None
        self._finalizer: weakref.finalize[Any, Any] | None = None

    def process_group(self, timeout: float) -> dist.ProcessGroup:
        if self._pg is None:
            limit = timedelta(seconds=timeout)
            make = _make_nccl if self.device.type == "cuda" else _make_gloo
            kind, backend = make(dist.PrefixStore("backend", self._store), self.rank, self.size, limit)
            self._pg = dist.ProcessGroup(dist.PrefixStore("pg", self._store), self.rank, self.size)
            self._pg._set_default_backend(kind)
            self._pg._register_backend(torch.device(self.device.type), kind, backend)
            # Also at interpreter exit: a worker of an operation that timed out must not outlive the statics of
            # the process.
            self._finalizer = weakref.finalize(self, backend.abort)
        return self._pg

    def close(self) -> None:
        if self._finalizer is not None:
            self._finalizer()
        self._pg = None

    def all_gather(self, payload: bytes, timeout: float = DEFAULT_TIMEOUT) -> list[bytes]:
        this_round = self._round
        self._round += 1
        self._store.set(f"{this_round}/{self.rank}", payload)  # type: ignore[arg-type]  # bytes are accepted
        keys = [f"{this_round}/{r}" for r in range(self.size)]
        with named_errors(
            "all_gather", self.rank, timeout
        ):  # the store's own process may be the one that died
            self._await(keys, timeout)
        payloads = [self._store.get(key) for key in keys]
        if (
            this_round >= 2
        ):  # everybody has begun the round before this one, so nobody reads the one before that
            self._store.delete_key(f"{this_round - 2}/{self.rank}")
        return payloads

    def _await(self, keys: list[str], timeout: float) -> None:
        """Returns when all keys are there. Looks by itself, because a FileStore's own wait counts whole seconds."""
        deadline, nap = time.monotonic() + timeout, 0.0005
        while not self._store.check(keys):
            if time.monotonic() > deadline:
                late = tuple(r for r, key in enumerate(keys) if not self._store.check([key]))
                raise Timeout("all_gather", self.rank, late, timeout)
            time.sleep(nap)
            nap = min(2 * nap, 0.02)


def _make_gloo(store: dist.Store, rank: int, size: int, limit: timedelta) -> tuple[Any, Any]:
    return dist.ProcessGroup.BackendType.GLOO, dist.ProcessGroupGloo(store, rank, size, limit)


def _make_nccl(store: dist.Store, rank: int, size: int, limit: timedelta) -> tuple[Any, Any]:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = limit
    return dist.ProcessGroup.BackendType.NCCL, dist.ProcessGroupNCCL(store, rank, size, options)


def _device_of(backend: str) -> torch.device:
    if "nccl" in backend:
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def wait(work: dist.Work, op: str, rank: int, timeout: float, device: torch.device) -> None:
    """Waits for one collective: on the CPU until it is done, on CUDA only on behalf of the current stream.

    Raises Timeout after `timeout` seconds on the CPU (torch cannot say who is late), PeerLost when a connection
    broke. On CUDA the host does not wait at all, so that graphs can be captured; the watchdog of NCCL rules.
    """
    if device.type == "cuda":
        work.wait()
        return
    with named_errors(op, rank, timeout):
        work.wait(timedelta(seconds=timeout))


def _await_completion(work: dist.Work, rank: int, timeout: float) -> None:
    """Returns when the device has run an all-gather. Raises Timeout after `timeout` seconds."""
    deadline, nap = time.monotonic() + timeout, 0.00005
    while not work.is_completed():
        if time.monotonic() > deadline:
            raise Timeout("all_gather", rank, (), timeout)
        time.sleep(nap)
        nap = min(2 * nap, 0.005)


@contextmanager
def named_errors(op: str, rank: int, timeout: float) -> Iterator[None]:
    """Turns what torch raises about a collective on the CPU into Timeout or PeerLost; the rest passes."""
    try:
        yield
    except RuntimeError as error:
        text = str(error).lower()
        if "timed out" in text or "timeout" in text:
            raise Timeout(op, rank, (), timeout) from error
        if "closed" in text or "reset" in text or "refused" in text or "broken" in text:
            raise PeerLost(f"{op}: rank {rank} lost a peer: {error}") from error
        raise
