"""The windows of one-sided transports: the only memory that other ranks can see.

`local`: the ranks are one process, and its memory is theirs. `gpu`: the same on one GPU. `shm`: the ranks are CPU
processes of one host. `peer`: they are processes whose GPUs reach each other.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch

from flexep.errors import FlexEPError, Unavailable
from flexep.group import Group
from flexep.transport._memory import Mapping, require_free, reserve_memfd
from flexep.transport._opening import Hello, Mapped, Opening, Reserver, check_size
from flexep.transport._peer_memory import PeerReserver, refuse_capture


class WindowMemory:
    """The windows of all ranks, as this process can address them.

    Attributes:
        name: "local", "gpu", "shm" or "peer". nbytes: of one rank's window.
        addresses: [R], where each rank's window begins in this process; page aligned. Empty once closed.
    """

    def __init__(self, name: str, nbytes: int, places: Sequence[tuple[Mapped, int]]) -> None:
        """`places`: mapping and offset of each rank's window."""
        self.name = name
        self.nbytes = nbytes
        self._places = tuple(places)
        self.addresses = tuple(mapping.address + offset for mapping, offset in places)

    def view(self, rank: int) -> Any:
        """uint8 [nbytes]: a rank's window, without a copy; a numpy array of host memory, a tensor of a GPU's (of hosted
        ranks alone: torch copies what lies on another GPU). Its memory stays while the view lives, also after `close`.

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


def open_windows(group: Group, nbytes: int, timeout: float, layout: str = "") -> WindowMemory:
    """A window of `nbytes` zeroed bytes for every rank. Collective; ends within `timeout` seconds. `layout` says how
    they are cut up, in words that must be every rank's.

    Raises on every rank, leaving nothing behind:
        Unavailable: ranks that windows cannot reach, too little memory, a CUDA graph that is being captured.
        PeerRefused: another rank could not reserve or map. CollectiveMismatch: ranks passed other sizes or layouts.
        Timeout, PeerLost: a rank did not come along.
    """
    if group.is_local:
        check_size(nbytes)
        return (_open_on_gpu if group.device.type == "cuda" else _open_on_host)(group, nbytes)
    reserver: Reserver
    if group.device.type == "cuda":
        reserver = PeerReserver(nbytes, group.size, group.device)
    else:
        reserver = SharedReserver(nbytes, group.size)
    opening = Opening(group, reserver, layout, timeout)
    try:
        return WindowMemory(reserver.name, nbytes, [(mapping, 0) for mapping in opening.run()])
    finally:
        opening.close()


def _open_on_host(group: Group, nbytes: int) -> WindowMemory:
    """One mapping for all ranks: fewer of them, and huge pages may span small windows."""
    size = group.size
    stride = -(-nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    require_free(size * stride, size * stride, f"{size} windows of {nbytes} bytes")
    try:
        mapping = Mapping.private(size * stride)
    except OSError as error:
        raise Unavailable(f"{size} windows of {nbytes} bytes: {error}") from error
    return WindowMemory("local", nbytes, [(mapping, rank * stride) for rank in range(size)])


def _open_on_gpu(group: Group, nbytes: int) -> WindowMemory:
    """Plain zeros of torch's allocator, one tensor for all ranks."""
    refuse_capture()
    try:
        zeros = torch.zeros(group.size * nbytes, dtype=torch.uint8, device=group.device)
    except (RuntimeError, AssertionError) as error:  # the latter: a torch without CUDA
        raise Unavailable(f"{group.size} windows of {nbytes} bytes on {group.device}: {error}") from error
    return WindowMemory("gpu", nbytes, [(_TensorMapping(zeros), rank * nbytes) for rank in range(group.size)])


class _TensorMapping:
    """A tensor's memory. Its allocator may hand it on once the last view is gone: the owner waits for the GPU first."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.address = tensor.data_ptr()

    def view(self, offset: int, nbytes: int) -> torch.Tensor:
        return self._tensor[offset : offset + nbytes]


class SharedReserver(Reserver):
    """Host memory that CPU processes of one host share."""

    name = "shm"

    def introduce(self) -> Hello:
        check_size(self.nbytes)
        everybody = f"{self.ranks} windows of {self.nbytes} bytes on this host"
        require_free(self.ranks * self.nbytes, self.nbytes, everybody)
        return {}

    def check(self, hellos: Sequence[Hello], elsewhere: str) -> None:
        """Whoever can be sent a descriptor can map it."""
        if elsewhere:
            raise Unavailable(f"shared memory does not reach every rank: {elsewhere}; use backend='alltoall'")

    def reserve(self) -> tuple[int, Mapping]:
        fd = reserve_memfd(self.nbytes, self.ranks)
        try:
            return fd, Mapping.shared(fd, self.nbytes)
        except BaseException:
            os.close(fd)
            raise

    def map(self, handle: int | bytes, peer: int, hello: Hello) -> Mapping:
        assert isinstance(handle, int)
        return Mapping.shared(handle, self.nbytes)
