"""Which kinds of handle the driver gives out for device memory, found by asking it for one of each.

Peer memory between processes needs one of them: a POSIX file descriptor (one host), a fabric handle (an
NVLink domain of several hosts) or a legacy IPC handle (one host, cudaMalloc memory). A device attribute only
says what the hardware could do; a fabric handle also needs a running service, so each kind is exported once.
The driver is loaded by name at run time; a machine without one gets the reason.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

from flexep.cli._probe import Finding, usable

# Values of cuda.h; they are part of the driver's ABI.
ALLOCATION_PINNED = 1
LOCATION_DEVICE = 1
GRANULARITY_MINIMUM = 0
POSIX_FD = 1
FABRIC = 8
HANDLE_BYTES = 64  # sizeof(CUmemFabricHandle) and sizeof(CUipcMemHandle)


class AllocationProperties(ctypes.Structure):
    """CUmemAllocationProp: type, handle kinds, location {type, id}, a Windows pointer, 8 bytes of flags."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_kinds", ctypes.c_int),
        ("location_type", ctypes.c_int),
        ("location_id", ctypes.c_int),
        ("windows", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class Driver:
    """The CUDA driver with the primary context of GPU 0 current.

    A call that fails raises RuntimeError with the driver's name for the error.
    """

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(f"no CUDA driver: {error}") from error
        self.call("cuInit", 0)
        context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, name)(*arguments)
        if status != 0:
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(status, ctypes.byref(text))
            raise RuntimeError(f"{name}: {text.value.decode() if text.value else status}")

    @contextmanager
    def memory(self, kind: int) -> Iterator[ctypes.c_uint64]:
        """The smallest allocation that can be exported as `kind`."""
        properties = AllocationProperties(ALLOCATION_PINNED, kind, LOCATION_DEVICE, 0)
        size = ctypes.c_size_t()
        handle = ctypes.c_uint64()
        self.call(
            "cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(properties), GRANULARITY_MINIMUM
        )
        self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), ctypes.c_uint64(0))
        try:
            yield handle
        finally:
            self.call("cuMemRelease", handle)


def handle_kinds() -> dict[str, Finding]:
    """{"posix_fd" | "fabric" | "legacy_ipc": usable and why_not}, for GPU 0."""
    try:
        driver = Driver()
    except RuntimeError as error:
        return {
            kind: {"usable": False, "why_not": str(error)} for kind in ("posix_fd", "fabric", "legacy_ipc")
        }
    return {
        "posix_fd": usable(lambda: _export_descriptor(driver)),
        "fabric": usable(lambda: _export_fabric(driver)),
        "legacy_ipc": usable(lambda: _export_legacy(driver)),
    }


def _export_descriptor(driver: Driver) -> None:
    descriptor = ctypes.c_int(-1)
    with driver.memory(POSIX_FD) as handle:
        driver.call(
            "cuMemExportToShareableHandle", ctypes.byref(descriptor), handle, POSIX_FD, ctypes.c_uint64(0)
        )
        os.close(descriptor.value)


def _export_fabric(driver: Driver) -> None:
    exported = ctypes.create_string_buffer(HANDLE_BYTES)
    with driver.memory(FABRIC) as handle:
        driver.call("cuMemExportToShareableHandle", exported, handle, FABRIC, ctypes.c_uint64(0))


def _export_legacy(driver: Driver) -> None:
    exported = ctypes.create_string_buffer(HANDLE_BYTES)
    address = ctypes.c_uint64()
    driver.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(1 << 21))
    try:
        driver.call("cuIpcGetMemHandle", exported, address)
    finally:
        driver.call("cuMemFree_v2", address)
