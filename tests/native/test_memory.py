"""The pool of large outputs: blocks come back, sizes share, no more is kept than was in use at once."""

from __future__ import annotations

import gc
import os
import threading

import pytest
import torch

from flexep._native.memory import POOLED_BYTES, BlockPool, empty

MIB = 1 << 20


def test_a_block_serves_again_after_its_last_tensor_died() -> None:
    pool = BlockPool()
    first = pool.take(8 * MIB)
    address, view = first.data_ptr(), first[5:].view(-1)
    del first
    second = pool.take(8 * MIB)
    assert second.data_ptr() != address  # a view still holds the block
    del view
    assert pool.take(8 * MIB).data_ptr() == address


def test_a_smaller_output_takes_a_larger_block_but_not_a_much_larger_one() -> None:
    pool = BlockPool()
    address = pool.take(16 * MIB).data_ptr()
    assert pool.take(9 * MIB).data_ptr() == address
    tensors = [pool.take(16 * MIB)]
    assert tensors[0].data_ptr() == address
    del tensors[0]
    small = pool.take(5 * MIB)
    assert small.data_ptr() != address


def test_no_more_is_kept_than_was_in_use_at_once() -> None:
    pool, peak = BlockPool(), 0
    for size in (8, 40, 5, 100, 17, 33, 64, 8) * 3:
        tensors = [pool.take(size * MIB), pool.take(size * MIB // 2)]
        peak = max(peak, sum(t.numel() for t in tensors))
        # Sizes are rounded up by an eighth at most, or to huge pages, and are one of those longer.
        assert pool.kept_bytes <= peak * 9 // 8 + 8 * MIB
        del tensors
    assert pool.kept_bytes > 0


def test_release_keeps_nothing() -> None:
    pool = BlockPool()
    pool.take(8 * MIB)
    held = pool.take(64 * MIB)
    pool.release()
    assert pool.kept_bytes == 0
    held.fill_(1)


def test_blocks_do_not_alias_across_threads() -> None:
    pool, wrong = BlockPool(), []

    def work(value: int) -> None:
        for _ in range(50):
            tensor = pool.take(POOLED_BYTES)
            tensor[::4096] = value
            gc.collect(0)
            if not (tensor[::4096] == value).all():
                wrong.append(value)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_large_outputs_are_ordinary_tensors() -> None:
    rows = empty(1024, 4096, torch.bfloat16)
    assert rows.shape == (1024, 4096)
    assert rows.is_contiguous()
    assert rows.data_ptr() % (2 * MIB) == 0
    rows.fill_(3.0)
    assert rows.clone().sum(dtype=torch.float64) == 3.0 * rows.numel()
    assert empty(4, 8, torch.float32).shape == (4, 8)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_a_forked_child_has_its_own_memory() -> None:
    pool = BlockPool()
    tensor = pool.take(8 * MIB).fill_(1)
    child = os.fork()
    if child == 0:
        tensor[:16] = 2  # few enough that torch starts no threads, which a forked child may not
        os._exit(0 if pool.take(8 * MIB).numel() == 8 * MIB else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert tensor.eq(1).all()
