"""A CUDA driver of memory alone, for machines that have none: `cuda.bindings.driver` over memfds.

It is as strict as the real one where `flexep.transport` could go wrong: memory comes dirty, cannot be touched before
access was set, must be unmapped before its addresses are freed, and calls that need a context refuse without one.
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import mmap
import os
import sys
import threading
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from flexep.group import Group
from flexep.transport._memory import _Bytes, _libc
from flexep.transport.gpu_memory import GpuMapping

GRANULARITY = 2 << 20
DIRT = 0xAB
_FIXED = 0x10  # MAP_FIXED
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class CUresult(enum.IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_CONTEXT = 201
    CUDA_ERROR_NOT_PERMITTED = 800
    CUDA_ERROR_NOT_SUPPORTED = 801


OK = CUresult.CUDA_SUCCESS
INVALID = CUresult.CUDA_ERROR_INVALID_VALUE


class CUmemAllocationHandleType(enum.IntEnum):
    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR = 1
    CU_MEM_HANDLE_TYPE_FABRIC = 8


FABRIC = CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_FABRIC


class CUmemAllocationType(enum.IntEnum):
    CU_MEM_ALLOCATION_TYPE_PINNED = 1


class CUmemLocationType(enum.IntEnum):
    CU_MEM_LOCATION_TYPE_DEVICE = 1


class CUmemAllocationGranularity_flags(enum.IntEnum):
    CU_MEM_ALLOC_GRANULARITY_RECOMMENDED = 1


class CUmemAccess_flags(enum.IntEnum):
    CU_MEM_ACCESS_FLAGS_PROT_READWRITE = 3


class CUmemLocation:
    type = id = None


class CUmemAccessDesc:
    location = flags = None


class CUmemAllocationProp:
    type = requestedHandleTypes = location = None


class FakeDriver(types.ModuleType):
    """The module. `refuse` maps names of functions to what they return instead of working.

    Attributes: `blind` (pairs of GPUs that do not reach each other), `fabric` (whether fabric handles are permitted),
    `live` (handles, reserved ranges and mappings that nobody has let go of), `syncs` (waits for the GPU).
    """

    def __init__(self, gpus: int = 2, blind: Sequence[tuple[int, int]] = ()) -> None:
        super().__init__("cuda.bindings.driver")
        for kind in (
            CUmemAllocationHandleType, CUmemAllocationType, CUmemLocationType, CUmemAllocationGranularity_flags,
            CUmemAccess_flags, CUmemLocation, CUmemAccessDesc, CUmemAllocationProp,
        ):  # fmt: skip
            setattr(self, kind.__name__, kind)
        self.gpus = gpus
        self.blind = set(blind)
        self.fabric = False
        self.refuse: dict[str, CUresult] = {}
        self.syncs = 0
        self.free = 1 << 30
        self._handles: dict[int, int] = {}  # -> memfd
        self._reserved: dict[int, int] = {}  # address -> bytes
        self._mapped: dict[int, int] = {}  # address -> handle
        self._thread = threading.local()
        self._retained = 0
        self._numbers = itertools.count(1)

    def __getattribute__(self, name: str) -> Any:
        if name.startswith("cu") and name in object.__getattribute__(self, "refuse"):
            return lambda *_: (self.refuse[name], None)
        return super().__getattribute__(name)

    @property
    def contexts(self) -> list[int]:
        """Current ones of this thread, innermost last."""
        if not hasattr(self._thread, "contexts"):
            self._thread.contexts = []
        return self._thread.contexts

    @property
    def live(self) -> tuple[int, int, int]:
        return len(self._handles), len(self._reserved), len(self._mapped)

    # -- devices and contexts

    def cuInit(self, flags: int) -> tuple:
        return (OK,) if self.gpus else (CUresult.CUDA_ERROR_NO_DEVICE,)

    def cuDeviceGetCount(self) -> tuple:
        return OK, self.gpus

    def cuDeviceGet(self, ordinal: int) -> tuple:
        return (OK, ordinal) if 0 <= ordinal < self.gpus else (INVALID, None)

    def cuDeviceGetUuid(self, device: int) -> tuple:
        return OK, types.SimpleNamespace(bytes=bytes([device]) * 16)

    def cuDeviceCanAccessPeer(self, device: int, peer: int) -> tuple:
        return OK, int((device, peer) not in self.blind)

    def cuDevicePrimaryCtxRetain(self, device: int) -> tuple:
        self._retained += 1
        return OK, 1000 + device

    def cuDevicePrimaryCtxRelease(self, device: int) -> tuple:
        self._retained -= 1
        return (OK,)

    def cuCtxPushCurrent(self, context: int) -> tuple:
        self.contexts.append(context)
        return (OK,)

    def cuCtxPopCurrent(self) -> tuple:
        return OK, self.contexts.pop()

    def cuCtxSynchronize(self) -> tuple:
        self.syncs += 1
        return (OK,) if self.contexts else (CUresult.CUDA_ERROR_INVALID_CONTEXT,)

    # -- memory

    def cuMemGetInfo(self) -> tuple:
        return OK, self.free, 1 << 30

    def cuMemGetAllocationGranularity(self, properties: CUmemAllocationProp, which: int) -> tuple:
        return OK, GRANULARITY

    def cuMemCreate(self, nbytes: int, properties: CUmemAllocationProp, flags: int) -> tuple:
        if nbytes % GRANULARITY or properties.location is None or properties.type != 1:
            return INVALID, None
        if properties.requestedHandleTypes == FABRIC and not self.fabric:
            return CUresult.CUDA_ERROR_NOT_PERMITTED, None
        if nbytes > self.free:
            return CUresult.CUDA_ERROR_OUT_OF_MEMORY, None
        fd = os.memfd_create("flexep-window")
        os.truncate(fd, nbytes)
        with mmap.mmap(fd, nbytes) as dirty:
            ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(dirty)), DIRT, nbytes)
        return OK, self._new_handle(fd)

    def _new_handle(self, fd: int) -> int:
        handle = next(self._numbers)
        self._handles[handle] = fd
        return handle

    def cuMemRelease(self, handle: int) -> tuple:
        os.close(self._handles.pop(handle))
        return (OK,)

    def cuMemExportToShareableHandle(self, handle: int, kind: int, flags: int) -> tuple:
        if kind == FABRIC:  # 64 bytes, by which other processes find the memory
            path = f"/proc/{os.getpid()}/fd/{self._handles[handle]}"
            return OK, types.SimpleNamespace(data=path.encode().ljust(64, b"\0"))
        return OK, os.dup(self._handles[handle])

    def cuMemImportFromShareableHandle(self, handle: int | bytes, kind: int) -> tuple:
        if kind == FABRIC:
            return OK, self._new_handle(os.open(handle.rstrip(b"\0"), os.O_RDWR))
        return OK, self._new_handle(os.dup(handle))

    def cuMemAlloc(self, nbytes: int) -> tuple:
        return OK, self._new_handle(os.memfd_create("flexep-window"))

    def cuIpcGetMemHandle(self, address: int) -> tuple:
        return OK, self._handles[address]

    def cuMemFree(self, address: int) -> tuple:
        return self.cuMemRelease(address)

    def cuMemAddressReserve(self, nbytes: int, alignment: int, address: int, flags: int) -> tuple:
        at = _libc.mmap(None, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
        self._reserved[at] = nbytes
        return OK, at

    def cuMemAddressFree(self, address: int, nbytes: int) -> tuple:
        if self._reserved.get(address) != nbytes or address in self._mapped:
            return (INVALID,)
        del self._reserved[address]
        _libc.munmap(address, nbytes)
        return (OK,)

    def cuMemMap(self, address: int, nbytes: int, offset: int, handle: int, flags: int) -> tuple:
        fd = self._handles[handle]
        if self._reserved.get(address) != nbytes or os.fstat(fd).st_size != nbytes:
            return (INVALID,)
        _libc.mmap(address, nbytes, 0, mmap.MAP_SHARED | _FIXED, fd, 0)
        self._mapped[address] = handle
        return (OK,)

    def cuMemSetAccess(self, address: int, nbytes: int, descriptors: list, count: int) -> tuple:
        if address not in self._mapped or count != len(descriptors) or descriptors[0].flags != 3:
            return (INVALID,)
        _libc.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE)
        return (OK,)

    def cuMemUnmap(self, address: int, nbytes: int) -> tuple:
        if address not in self._mapped:
            return (INVALID,)
        del self._mapped[address]
        _libc.mmap(address, nbytes, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED, -1, 0)
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, nbytes: int) -> tuple:
        return self._copy(lambda: ctypes.memset(address, value, nbytes))

    def cuMemcpyDtoH(self, to: int, address: int, nbytes: int) -> tuple:
        return self._copy(lambda: ctypes.memmove(to, address, nbytes))

    def cuMemcpyHtoD(self, address: int, source: int, nbytes: int) -> tuple:
        return self._copy(lambda: ctypes.memmove(address, source, nbytes))

    def _copy(self, act: Any) -> tuple:
        if not self.contexts:
            return (CUresult.CUDA_ERROR_INVALID_CONTEXT,)
        act()
        return (OK,)


def install(driver: FakeDriver) -> None:
    """From now on this process imports `driver` as cuda.bindings.driver, and has switched windows between GPU
    processes on. Views of its memory are arrays, because torch may have no CUDA here."""
    package, bindings = types.ModuleType("cuda"), types.ModuleType("cuda.bindings")
    bindings.driver = driver
    sys.modules.update({"cuda": package, "cuda.bindings": bindings, "cuda.bindings.driver": driver})
    GpuMapping.view = lambda self, offset, nbytes: np.asarray(_Bytes(self, offset, nbytes))
    os.environ["FLEXEP_PEER"] = "1"


class OnGpu(Group):
    """The ranks of a group of CPU processes, as if each had a GPU."""

    def __init__(self, group: Group, ordinal: int = 0) -> None:
        super().__init__(group.rank, group.size, torch.device("cuda", ordinal), group.hosted)
        self._group = group

    def all_gather(self, payload: bytes, timeout: float = 20.0) -> list[bytes]:
        return self._group.all_gather(payload, timeout)

    def close(self) -> None:
        """The group belongs to whoever made it."""


_drivers: dict[int, FakeDriver] = {}  # of this process, which keeps what is live between tests


def own_driver() -> FakeDriver:
    return _drivers.setdefault(os.getpid(), FakeDriver())


def reached_by(transport: str, group: Group) -> Group:
    """The group's ranks as windows open over `transport`: "shm" or, with a fake driver and two GPUs, "peer"."""
    if transport == "shm":
        return group
    install(own_driver())
    return OnGpu(group, group.rank % 2)
