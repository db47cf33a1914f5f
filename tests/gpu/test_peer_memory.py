"""Windows in real GPU memory: zeroed, reached by every rank in both directions, and given back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from flexep.errors import Unavailable
from flexep.testing.pool import PEER, RankPool
from flexep.testing.worker import RankContext
from flexep.transport.gpu_memory import GpuMapping
from flexep.transport.window_memory import WindowMemory, open_windows
from tests.transport.held import held

NBYTES = (5 << 20) + 256  # no whole number of 2 MiB
SECONDS = 60.0
PLACES = [
    pytest.param((3, 1), marks=pytest.mark.gpu, id="3on1"),
    pytest.param((4, 2), marks=pytest.mark.multigpu, id="4on2"),
]


@pytest.fixture(scope="module", params=PLACES)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Without MPS: nobody waits for a peer on the GPU here."""
    ranks, gpus = request.param
    with RankPool(ranks, "cuda", gpus=gpus, environment=PEER) as made:
        yield made


def mapping(opened: WindowMemory, rank: int) -> GpuMapping:
    found = opened._places[rank][0]
    assert isinstance(found, GpuMapping)
    return found


def every_rank_writes_everywhere(ctx: RankContext) -> tuple[str, bool, bool, list[bytes]]:
    opened = open_windows(ctx.group, NBYTES, SECONDS)
    own = opened.view(ctx.rank)
    assert own.device == ctx.device
    assert own.data_ptr() == opened.addresses[ctx.rank]
    zeroed = not own.any()
    aligned = all(address % (2 << 20) == 0 for address in opened.addresses)
    ctx.group.barrier()
    for rank in range(ctx.size):
        mapping(opened, rank).write(8 * ctx.rank, bytes([ctx.rank, rank] * 4))
    torch.cuda.synchronize()
    ctx.group.barrier()
    seen = [mapping(opened, rank).read(0, 8 * ctx.size) for rank in range(ctx.size)]
    assert bytes(own[: 8 * ctx.size].tolist()) == seen[ctx.rank]
    return opened.name, zeroed, aligned, seen


def test_every_rank_reaches_every_window(pool: RankPool) -> None:
    ranks = range(pool.size)
    want = [b"".join(bytes([writer, rank] * 4) for writer in ranks) for rank in ranks]
    assert pool.run(every_rank_writes_everywhere) == [("peer", True, True, want)] * pool.size


def reads_after_peers_closed(ctx: RankContext) -> int:
    opened = open_windows(ctx.group, NBYTES, SECONDS)
    opened.view(ctx.rank).fill_(ctx.rank + 1)
    torch.cuda.synchronize()
    ctx.group.barrier()
    left = mapping(opened, (ctx.rank + 1) % ctx.size)
    opened.close()
    ctx.group.barrier()
    return sum(left.read(0, NBYTES))


def test_a_peer_that_closes_takes_no_memory_away(pool: RankPool) -> None:
    assert pool.run(reads_after_peers_closed) == [
        ((r + 1) % pool.size + 1) * NBYTES for r in range(pool.size)
    ]


def opens_many_times(ctx: RankContext, times: int) -> tuple[int, int, int, int]:
    """Bytes of the GPU free and descriptors open, before and after."""

    def after(count: int) -> tuple[int, int]:
        for _ in range(count):
            opened = open_windows(ctx.group, NBYTES, SECONDS)
            opened.view(ctx.rank).fill_(1)
            opened.close()
        ctx.group.barrier()
        return torch.cuda.mem_get_info(ctx.device)[0], held().descriptors

    return *after(20), *after(times)


def test_opening_and_closing_leaks_nothing(pool: RankPool) -> None:
    for free, descriptors, free_after, descriptors_after in pool.run(opens_many_times, 300):
        assert free - free_after < 32 << 20, "one leaked window a turn would be 1.8 GB"
        assert descriptors_after == descriptors


def opens_too_much(ctx: RankContext) -> str:
    with pytest.raises(Unavailable) as caught:
        open_windows(ctx.group, 1 << 42, SECONDS)
    return str(caught.value)


def test_more_than_the_gpu_has_is_refused(pool: RankPool) -> None:
    for said in pool.run(opens_too_much):
        assert f"cannot reserve a window of {1 << 42} bytes" in said
        assert "CUDA_ERROR_OUT_OF_MEMORY" in said
    assert pool.run(every_rank_writes_everywhere)
