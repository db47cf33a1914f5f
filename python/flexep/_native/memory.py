"""Memory for large CPU outputs, taken again instead of mapped again.

The C library maps a large block afresh for every tensor and unmaps it after; touching fresh pages costs many
times the copy that fills them. Blocks that outputs gave back are therefore kept for later outputs, no more
bytes of them than were ever in use at once.
"""

from __future__ import annotations

import math
import mmap
import threading
import weakref
from collections import deque

import numpy as np
import torch

POOLED_BYTES = 4 << 20  # smaller blocks stay in the C library's own heap


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
        """A uint8 tensor of nbytes >= 1, its contents undefined, page aligned."""
        with self._lock:
            self._collect()
            # A block of up to twice the size serves: two sizes that alternate share one block.
            fits = [block for block in self._kept if nbytes <= len(block) <= 2 * nbytes]
            block = min(fits, key=len, default=None)
            if block is None:
                block = mmap.mmap(-1, _rounded(nbytes))
            else:
                self._kept = [other for other in self._kept if other is not block]
            self._used += len(block)
            self._peak = max(self._peak, self._used)
            while self.kept_bytes > self._peak:
                self._kept.pop(0)
        array = np.frombuffer(block, dtype=np.uint8, count=nbytes)
        weakref.finalize(array, self._returned.append, block).atexit = False
        return torch.from_numpy(array)

    def release(self) -> None:
        """Gives all kept blocks back to the system, and forgets the peak."""
        with self._lock:
            self._collect()
            self._kept.clear()
            self._peak = self._used

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
    """Up to an eighth of a power of two, so that row counts that differ a little from step to step share
    blocks."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return math.ceil(nbytes / step) * step


POOL = BlockPool()


def empty(rows: int, hidden: int, dtype: torch.dtype) -> torch.Tensor:
    """An uninitialised CPU tensor [rows, hidden] that every element of is about to be written."""
    nbytes = rows * hidden * dtype.itemsize
    if nbytes < POOLED_BYTES:
        return torch.empty(rows, hidden, dtype=dtype)
    return POOL.take(nbytes).view(dtype).view(rows, hidden)


def release_memory() -> None:
    """Gives the memory kept for large CPU outputs back to the system; tensors in use are not touched."""
    POOL.release()
