"""Memory that windows lie in: reserved with a named error, mapped without a descriptor left open, unmapped with the
last view of it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from flexep.errors import Unavailable

PIECE_BYTES = 16 << 20  # reserved between two looks at what is left
MFD_NOEXEC_SEAL = 8  # Linux 6.3; hardened hosts refuse a memfd without it
CGROUPS = Path("/sys/fs/cgroup")

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_MAP_FAILED = ctypes.c_void_p(-1).value


class Mapping:
    """Mapped memory, page aligned. Unmapped when neither this object nor a view of it is left.

    Python's own mmap object keeps a duplicate of the descriptor open as long as it lives. At interpreter exit the
    memory stays until the process is gone: a view or a thread that outlives the statics may still touch it.
    """

    def __init__(self, nbytes: int, flags: int, fd: int = -1) -> None:
        """Raises OSError when the address space or the number of mappings does not suffice."""
        address = _libc.mmap(None, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, fd, 0)
        if address == _MAP_FAILED:
            number = ctypes.get_errno()
            raise OSError(number, f"cannot map {nbytes} bytes: {os.strerror(number)}")
        self.address: int = address
        self.nbytes = nbytes
        weakref.finalize(self, _libc.munmap, address, nbytes).atexit = False
        _libc.madvise(address, nbytes, mmap.MADV_HUGEPAGE)  # where the kernel has none, small pages do

    @staticmethod
    def private(nbytes: int) -> Mapping:
        """Zeroed memory of this process alone."""
        return Mapping(nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    @staticmethod
    def shared(fd: int, nbytes: int) -> Mapping:
        """Memory behind a descriptor, which may be closed afterwards."""
        return Mapping(nbytes, mmap.MAP_SHARED, fd)

    def view(self, offset: int, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """uint8 [nbytes] at `offset`, without a copy."""
        return np.asarray(_Bytes(self, offset, nbytes))


class _Bytes:
    """What numpy reads; the array refers to it, and it to the mapping."""

    def __init__(self, mapping: Mapping, offset: int, nbytes: int) -> None:
        self.mapping = mapping
        self.__array_interface__ = array_interface(mapping.address + offset, nbytes)


def array_interface(address: int, nbytes: int) -> dict[str, Any]:
    """Writable bytes at an address, as numpy and torch describe them."""
    return {"version": 3, "typestr": "|u1", "shape": (nbytes,), "data": (address, False)}


def reserve_memfd(nbytes: int, ranks: int) -> int:
    """Descriptor of zeroed memory that has no name, belongs to whoever holds it, and can neither shrink nor grow.

    All of it is reserved here, so that no access can meet a shortage, which would be a SIGBUS. `ranks` ranks may be
    reserving at once: that many pieces stay free.

    Raises Unavailable naming nbytes and what is left.
    """
    fd = _create_memfd()
    try:
        os.ftruncate(fd, nbytes)
        for offset in range(0, nbytes, PIECE_BYTES):
            piece = min(PIECE_BYTES, nbytes - offset)
            # The kernel ends some process when memory runs out, rather than refuse: look before.
            require_free(
                piece * ranks, piece * ranks, f"a window of {nbytes} bytes, {offset} of them reserved"
            )
            os.posix_fallocate(fd, offset, piece)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    except OSError as error:
        os.close(fd)
        left = ", ".join(f"{free} bytes in {name}" for name, free in _free_bytes())
        raise Unavailable(f"cannot reserve a window of {nbytes} bytes: {error}; free: {left}") from error
    except BaseException:
        os.close(fd)
        raise
    return fd


def _create_memfd() -> int:
    flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
    try:
        return os.memfd_create("flexep-window", flags | MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:  # an older kernel does not know the flag
            raise
        return os.memfd_create("flexep-window", flags)


def require_free(on_host: int, in_group: int, purpose: str) -> None:
    """Raises Unavailable unless the host has `on_host` bytes free and this process's memory limit `in_group`."""
    for name, free in _free_bytes():
        needed = on_host if name == HOST else in_group
        if needed > free:
            raise Unavailable(
                f"{purpose}: {needed} bytes are needed and {name} has {free} free; lower max_tokens or the budget "
                "of the window, raise the limit, or use backend='alltoall'"
            )


HOST = "the host"


def _free_bytes() -> Iterator[tuple[str, int]]:
    """(whose limit, bytes left) of everything that bounds this process's memory; page cache counts as free."""
    with contextlib.suppress(OSError, KeyError):
        yield HOST, _fields(Path("/proc/meminfo"))["MemAvailable"] * 1024
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                yield from _free_in_cgroup(CGROUPS, path, ("memory.max", "memory.current", "inactive_file"))
            elif "memory" in controllers.split(","):
                files = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
                yield from _free_in_cgroup(CGROUPS / "memory", path, files)


def _free_in_cgroup(root: Path, path: str, files: tuple[str, str, str]) -> Iterator[tuple[str, int]]:
    """A control group and all above it. In a container its path may not exist; its root is the container's own."""
    limit, used, cache = files
    here = root / path.lstrip("/")
    for folder in (here, *here.parents):
        with contextlib.suppress(OSError, KeyError, ValueError):  # no such folder, or "max": no limit
            most = int((folder / limit).read_text())
            now = int((folder / used).read_text()) - _fields(folder / "memory.stat")[cache]
            yield f"the memory limit in {folder}", max(0, most - now)
        if folder == root:
            return


def _fields(path: Path) -> dict[str, int]:
    """First number after each name."""
    words = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {name: int(value) for name, value, *_ in words}
