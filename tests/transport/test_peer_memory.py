"""Windows in GPU memory, over a fake driver: what is refused, by whom and by which name, and that nothing stays."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest

from flexep.config import WINDOWED
from flexep.errors import FlexEPError, PeerRefused, Unavailable
from flexep.group import Group
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from flexep.transport import _opening, _peer_memory, _window, gpu_memory
from flexep.transport.gpu_memory import Gpu, load_driver
from flexep.transport.window_memory import WindowMemory, open_windows
from tests.transport.fake_driver import GRANULARITY, CUresult, FakeDriver, own_driver, reached_by
from tests.transport.held import held, window_mappings

R = 3
NBYTES = 3 * 4096 + 128
TIMEOUT = 20.0
Outcome = tuple[Exception | None, int, tuple[int, int, int]]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(R, timeout=60) as ranks:
        yield ranks


def outcome(ctx: RankContext) -> Outcome:
    """What opening windows came to; descriptors gained; what is live in the driver."""
    group, driver = reached_by("peer", ctx.group), own_driver()
    ctx.group.barrier(TIMEOUT)
    before, error = held().descriptors, None
    try:
        open_windows(group, NBYTES, TIMEOUT)
    except FlexEPError as raised:
        error = raised
    return error, held().descriptors - before, driver.live


def opens_with(ctx: RankContext, odd: int, changes: dict[str, Any]) -> Outcome:
    """Opens windows while rank `odd` alone has a driver with these attributes."""
    driver = own_driver()
    usual = {name: getattr(driver, name) for name in changes}
    if ctx.rank == odd:
        vars(driver).update(changes)
    try:
        return outcome(ctx)
    finally:
        vars(driver).update(usual)


def assert_refused_by(results: list[Outcome], odd: int, text: str) -> None:
    """Rank `odd` says why, the others who it was, and nothing is left of it."""
    for rank, (error, descriptors, live) in enumerate(results):
        assert isinstance(error, Unavailable if rank == odd else PeerRefused), error
        assert text in str(error)
        assert rank == odd or list(error.refused) == [odd]
        assert (descriptors, live) == (0, (0, 0, 0))


def works(pool: RankPool) -> bool:
    return pool.run(opens_with, 0, {}) == [(None, 0, (0, 0, 0))] * R


@pytest.mark.parametrize(
    "step",
    [
        "cuDeviceGetUuid",
        "cuDevicePrimaryCtxRetain",
        "cuMemGetAllocationGranularity",
        "cuMemCreate",
        "cuMemAddressReserve",
        "cuMemMap",
        "cuMemSetAccess",
        "cuMemsetD8",
        "cuMemcpyHtoD",
        "cuMemExportToShareableHandle",
        "cuMemImportFromShareableHandle",
        "cuMemcpyDtoH",
    ],
)
def test_a_step_that_the_driver_refuses_is_named_on_all_ranks(pool: RankPool, step: str) -> None:
    refused = {"refuse": {step: CUresult.CUDA_ERROR_NOT_SUPPORTED}}
    assert_refused_by(pool.run(opens_with, 1, refused), 1, f"{step}: CUDA_ERROR_NOT_SUPPORTED")


def test_too_little_memory_on_one_gpu(pool: RankPool) -> None:
    results = pool.run(opens_with, 2, {"free": GRANULARITY - 1})
    want = f"cannot reserve a window of {NBYTES} bytes on GPU 0: cuMemCreate: CUDA_ERROR_OUT_OF_MEMORY"
    assert_refused_by(results, 2, f"{want}; {GRANULARITY - 1} bytes are free")
    assert works(pool)


def test_a_rank_that_sees_no_gpu(pool: RankPool) -> None:
    assert_refused_by(pool.run(opens_with, 0, {"gpus": 0}), 0, "no CUDA GPU: cuInit: CUDA_ERROR_NO_DEVICE")
    assert works(pool)


def test_gpus_out_of_each_others_reach_are_named_alike_on_every_rank(pool: RankPool) -> None:
    """Ranks 0 and 2 are on GPU 0, rank 1 on GPU 1, and GPU 1 does not reach GPU 0."""
    for error, descriptors, live in pool.run(opens_with, 1, {"blind": {(1, 0)}}):
        assert isinstance(error, Unavailable)
        assert "reach each other's memory: rank 1 not that of ranks [0, 2]; use" in str(error)
        assert (descriptors, live) == (0, (0, 0, 0))
    assert works(pool)


def test_a_gpu_that_a_process_does_not_see_is_tried(pool: RankPool) -> None:
    """Every process may see its own GPU alone; then no access can be asked for, and mapping tells."""
    assert pool.run(opens_with, 0, {"gpus": 1}) == [(None, 0, (0, 0, 0))] * R


def without_switch(ctx: RankContext, odd: int) -> Outcome:
    reached_by("peer", ctx.group)
    real = _peer_memory.Environment.read
    if ctx.rank == odd:
        _peer_memory.Environment.read = lambda: _peer_memory.Environment(debug=False, peer=False)
    try:
        return outcome(ctx)
    finally:
        _peer_memory.Environment.read = real


def test_without_the_switch_nobody_opens_windows(pool: RankPool) -> None:
    assert_refused_by(pool.run(without_switch, 1), 1, "switched off: set FLEXEP_PEER=1")
    assert works(pool)


def while_capturing(ctx: RankContext, odd: int) -> Outcome:
    real = _peer_memory.is_capturing
    if ctx.rank == odd:
        _peer_memory.is_capturing = lambda: True
    try:
        return outcome(ctx)
    finally:
        _peer_memory.is_capturing = real


def test_windows_first_opened_during_a_capture_are_refused(pool: RankPool) -> None:
    assert_refused_by(pool.run(while_capturing, 2), 2, "make the dispatcher before the capture")
    assert works(pool)


def maps_other_memory(ctx: RankContext, odd: int) -> Outcome:
    """Rank `odd` gets memory of its own for its peers' descriptors."""
    real = Gpu.open
    if ctx.rank == odd:
        Gpu.open = lambda self, handle, nbytes: self.create(nbytes, self.descriptor)
    try:
        return outcome(ctx)
    finally:
        Gpu.open = real


def test_memory_that_is_not_the_peers_is_found(pool: RankPool) -> None:
    assert_refused_by(pool.run(maps_other_memory, 0), 0, "the window of rank 1 on GPU 01010101")
    assert works(pool)


def opens_across_hosts(
    ctx: RankContext, permitted: bool
) -> tuple[Exception | None, list[int], tuple[int, int, int]]:
    """Rank 1 lives on another host. The error, or what every rank wrote into every window; what stays."""
    real, identity = _opening.host_identity, _opening.host_identity()
    identity[0] += " elsewhere"
    group, driver = reached_by("peer", ctx.group), own_driver()
    driver.fabric = permitted or ctx.rank != 2
    if ctx.rank == 1:
        _opening.host_identity = lambda: identity
    error, seen = None, []
    try:
        opened = open_windows(group, NBYTES, TIMEOUT)
        for rank in range(ctx.size):
            opened.view(rank)[ctx.rank] = 1 + ctx.rank
        ctx.group.barrier(TIMEOUT)
        seen = [int(opened.view(rank)[: ctx.size].sum()) for rank in range(ctx.size)]
        ctx.group.barrier(TIMEOUT)
        opened.close()
    except FlexEPError as raised:
        error = raised
    finally:
        _opening.host_identity = real
        driver.fabric = False
    return error, seen, driver.live


def test_fabric_handles_reach_other_hosts_where_all_ranks_may_have_them(pool: RankPool) -> None:
    assert pool.run(opens_across_hosts, True) == [(None, [6] * R, (0, 0, 0))] * R


def test_without_fabric_handles_other_hosts_are_named_with_the_reason(pool: RankPool) -> None:
    where = [
        "ranks [1] run on another host",
        "ranks [0, 2] run on another host",
        "ranks [1] run on another host",
    ]
    for (error, _, live), there in zip(pool.run(opens_across_hosts, False), where, strict=True):
        assert isinstance(error, Unavailable)
        assert f"does not reach every rank: {there}, and fabric handles" in str(error)
        assert "refused on rank 2: cuMemCreate: CUDA_ERROR_NOT_PERMITTED; use backend='alltoall'" in str(
            error
        )
        assert live == (0, 0, 0)
    assert works(pool)


def exchanges(ctx: RankContext) -> tuple[list[str], tuple[int, int, int]]:
    """What one-sided dispatchers of CPU ranks get wrong when their windows lie in such memory; what stays of it."""

    def open_in_gpus(group: Group, nbytes: int, timeout: float, layout: str) -> WindowMemory:
        return open_windows(reached_by("peer", group), nbytes, timeout, layout)

    case = Case(R, 7, 64, 3, 33, spread="ragged", capacity="one_over", window="tenth", cached=1)
    with mock.patch.object(_window, "open_windows", open_in_gpus):
        found = check_dispatchers(case, ctx.group, list(WINDOWED))
    return [str(one) for one in found], own_driver().live


def test_the_whole_exchange_works_in_such_memory(pool: RankPool) -> None:
    assert pool.run(exchanges) == [([], (0, 0, 0))] * R


# -- one process


def test_the_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)  # type: ignore[arg-type]
    with pytest.raises(Unavailable, match="needs the package cuda-bindings"):
        load_driver()


def test_the_missing_driver_is_named(driver: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    def not_found(flags: int) -> tuple:
        raise RuntimeError("libcuda.so.1 not found")

    monkeypatch.setattr(driver, "cuInit", not_found)
    with pytest.raises(Unavailable, match=r"no CUDA driver: libcuda\.so\.1 not found"):
        load_driver()


def test_created_memory_is_zeroed_before_anybody_has_its_descriptor(driver: FakeDriver) -> None:
    gpu = Gpu(0)
    mapping = gpu.create(GRANULARITY, gpu.descriptor)
    assert not mapping.view(0, GRANULARITY).any()
    mapping.write(8, b"here")
    fd = gpu.export(mapping, gpu.descriptor)
    again = gpu.open(fd, GRANULARITY)
    os.close(fd)
    assert again.read(7, 6) == b"\0here\0"


def test_memory_goes_with_its_last_view_after_the_gpu_is_done(driver: FakeDriver) -> None:
    gpu = Gpu(0)
    mapping = gpu.create(GRANULARITY, gpu.descriptor)
    view = mapping.view(0, 4)
    done, handle = driver.syncs, driver.live
    assert handle == (1, 1, 1)
    del mapping
    assert (driver.live, driver.syncs) == ((1, 1, 1), done)
    del view
    assert (driver.live, driver.syncs) == ((0, 0, 0), done + 1)
    assert window_mappings() == 0


def test_memory_that_goes_during_a_capture_waits_for_its_end(
    driver: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu(0)
    one, other = (gpu.create(GRANULARITY, gpu.descriptor) for _ in range(2))
    done = driver.syncs
    monkeypatch.setattr(gpu_memory, "is_capturing", lambda: True)
    del one
    assert (driver.live, driver.syncs) == ((2, 2, 2), done)
    monkeypatch.setattr(gpu_memory, "is_capturing", lambda: False)
    kept = gpu.create(GRANULARITY, gpu.descriptor)
    assert driver.live == (2, 2, 2)
    del other, kept
    assert driver.live == (0, 0, 0)


def test_memory_is_let_go_of_when_the_gpu_is_lost(driver: FakeDriver) -> None:
    gpu = Gpu(0)
    mapping = gpu.create(GRANULARITY, gpu.descriptor)
    driver.refuse = {"cuCtxPushCurrent": CUresult.CUDA_ERROR_INVALID_CONTEXT}
    del mapping
    driver.refuse = {}
    assert driver.live == (0, 0, 0)


def test_a_forked_child_leaves_the_driver_alone(driver: FakeDriver) -> None:
    mapping = Gpu(0).create(GRANULARITY, Gpu(0).descriptor)
    before = (driver.live, driver.syncs, driver._retained)
    child = os.fork()
    if child == 0:
        del mapping
        os._exit(0 if (driver.live, driver.syncs, driver._retained) == before else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert driver.live == (1, 1, 1)


def test_the_context_is_let_go_of_with_the_last_mapping(driver: FakeDriver) -> None:
    gpu = Gpu(1)
    mapping = gpu.create(GRANULARITY, gpu.descriptor)
    del gpu
    assert driver._retained == 1
    del mapping
    assert driver._retained == 0
