"""Memory for large CPU outputs: huge pages, and taken again instead of mapped again.

The C library maps a large block afresh for every tensor and unmaps it after, and touching small fresh pages costs
many times the copy that fills them. Blocks that outputs gave back are therefore kept for later outputs, no more bytes
of them than were ever in use at once; and new ones ask for huge pages, which also make scattered rows cheaper to reach.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque

import numpy as np
import torch

POOLED_BYTES = 4 << 20  # smaller blocks stay in the C library's own heap
HUGE_BYTES = 2 << 20


class BlockPool:
    """Anonymous memory blocks behind tensors; a block comes back when the last tensor on it dies."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Finalizers run wherever the collector strikes, also inside take(): they only append, which needs no
        # lock.
        self._returned: deque[mmap.mmap] = deque()
        self._kept: list[mmap.mmap] = []  # oldest first
        self._used = 0
        self._peak = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """A uint8 tensor of nbytes >= 1, its contents undefined, aligned to a huge page."""
        with self._lock:
            self._collect()
            # A block of up to twice the size serves: two sizes that alternate share one block.
            fits = [
                block for block in self._kept if nbytes + HUGE_BYTES <= len(block) <= 2 * nbytes + HUGE_BYTES
            ]
            block = min(fits, key=len, default=None)
            if block is None:
                block = _map(_rounded(nbytes))
            else:
                self._kept = [other for other in self._kept if other is not block]
            self._used += len(block)
            self._peak = max(self._peak, self._used)
            while self.kept_bytes > self._peak:
                self._kept.pop(0)
        begin = -np.frombuffer(block, dtype=np.uint8, count=1).ctypes.data % HUGE_BYTES
        array = np.frombuffer(block, dtype=np.uint8, count=nbytes, offset=begin)
        weakref.finalize(array, self._returned.append, block).atexit = False
        return torch.from_numpy(array)

    def release(self) -> None:
        """Gives all kept blocks back to the system, and forgets the peak."""
        with self._lock:
            self._collect()
            self._kept.clear()
            self._peak = self._used

    def renew_lock(self) -> None:
        """For a forked child, where the thread that may have held the lock does not exist."""
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """Bytes held for later outputs."""
        return sum(map(len, self._kept))

    def _collect(self) -> None:
        while self._returned:
            block = self._returned.popleft()
            self._used -= len(block)
            self._kept.append(block)


def _rounded(nbytes: int) -> int:
    """Up to an eighth of a power of two, so that row counts that differ a little from step to step share blocks."""
    step = max(HUGE_BYTES, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _map(nbytes: int) -> mmap.mmap:
    """Fresh memory of this process alone, a huge page longer so that a tensor in it can begin on one."""
    block = mmap.mmap(-1, nbytes + HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # a kernel without transparent huge pages: small ones do
        block.madvise(mmap.MADV_HUGEPAGE)
    return block


POOL = BlockPool()
os.register_at_fork(after_in_child=POOL.renew_lock)


def empty(rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor [rows, hidden] that every element of is about to be written."""
    nbytes = rows * hidden * dtype.itemsize
    if nbytes < POOLED_BYTES:
        return torch.empty(rows, hidden, dtype=dtype)
    return POOL.take(nbytes).view(dtype).view(rows, hidden)


def release_memory() -> None:
    """Gives the memory kept for large CPU outputs back to the system; tensors in use are not touched."""
    POOL.release()
