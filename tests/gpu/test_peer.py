"""Ranks that are processes with GPUs, over windows in each other's memory: the contract, graphs, soaks, failures.

`gpu`: several ranks share one GPU under MPS. `multigpu`: a GPU a rank, and eight ranks on two. A placement is named by
ranks and GPUs: `pytest -m multigpu tests/gpu/test_peer.py -k 2on2`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

import flexep
from flexep.testing.axes import random_cases
from flexep.testing.pool import PEER, RankPool, peer_pool
from flexep.testing.worker import RankContext
from tests.gpu import rounds
from tests.gpu.peers import failures, shaped

PLACES = [
    pytest.param((2, 1), marks=pytest.mark.gpu, id="2on1"),
    pytest.param((4, 1), marks=pytest.mark.gpu, id="4on1"),
    pytest.param((2, 2), marks=pytest.mark.multigpu, id="2on2"),
    pytest.param((8, 2), marks=pytest.mark.multigpu, id="8on2"),
]


@pytest.fixture(scope="module", params=PLACES)
def pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """The ranks of one placement; a test that breaks them costs the rest of its placement."""
    with peer_pool(*request.param) as made:
        yield made


def domain_sizes(pool: RankPool) -> list[int | None]:
    """8 ranks: flat, as 1x8, 2x4 and 4x2."""
    return [None, *(size for size in range(2, pool.size + 1) if pool.size % size == 0)]


def multiprocessors(ctx: RankContext) -> int:
    return torch.cuda.get_device_properties(ctx.device).multi_processor_count


def test_ranks_that_share_a_gpu_each_see_their_part_of_it(
    pool: RankPool, request: pytest.FixtureRequest
) -> None:
    """Otherwise the launch of one could take what another waits for."""
    _, gpus = request.node.callspec.params["pool"]
    whole = torch.cuda.get_device_properties(0).multi_processor_count
    assert sum(pool.run(multiprocessors)) <= gpus * whole


# -- the contract


@pytest.mark.timeout(600)
def test_contract_over_domains(pool: RankPool) -> None:
    found = failures(pool, [case for size in domain_sizes(pool) for case in shaped(pool.size, size)])
    assert not found, "\n".join(found[:4])


@pytest.mark.timeout(600)
def test_contract_of_random_cases(pool: RankPool) -> None:
    found = failures(pool, random_cases(pool.size, 40, seed=12))
    assert not found, "\n".join(found[:4])


@pytest.mark.multigpu
def test_contract_in_a_group_that_nccl_made() -> None:
    with RankPool(2, "cuda", environment=PEER) as pool:
        found = failures(pool, shaped(2, None))
    assert not found, "\n".join(found[:4])


# -- many rounds


@pytest.mark.timeout(900)
def test_soak(pool: RankPool, soak_rounds: int) -> None:
    """Changing routing, random delays of host and device, changing streams, inputs that are overwritten and freed at
    once."""
    domain_size = None if pool.size == 2 else pool.size // 2
    backend = "deepep" if domain_size is None else "hybridep"
    wrong = pool.run(rounds.soak, backend, domain_size, soak_rounds, 5, timeout=880.0)
    assert wrong == [0] * pool.size


@pytest.mark.timeout(600)
@pytest.mark.parametrize("ahead", [False, True], ids=["pulled", "ahead"])
def test_two_graphs_in_any_order_follow_changing_routing(pool: RankPool, ahead: bool) -> None:
    """Captured once each, a thousand replays, eager rounds of the same dispatcher between them."""
    assert pool.run(rounds.interleaved_graphs, "deepep", 1000, 6, ahead) == [0] * pool.size


# -- what goes wrong


@contextmanager
def dispatcher(
    ctx: RankContext, timeout: float, static: bool = False, ahead: bool = False
) -> Iterator[flexep.Dispatcher]:
    """With `static` nothing waits for the device, so that all of a round is there before any of it has failed."""
    ep = flexep.Dispatcher(
        ctx.group, num_experts=9, hidden=64, top_k=3, max_tokens=40, backend="deepep", timeout=timeout,
        capacity=ctx.size * 40 * 3 + 16 * 9 if static else None, send_ahead=ahead,
    )  # fmt: skip
    try:
        yield ep
    finally:
        ep.destroy()


def one_round(ctx: RankContext, ep: flexep.Dispatcher) -> bool:
    x = torch.full((5, 64), 1.0 + ctx.rank, dtype=torch.bfloat16, device=ctx.device)
    idx = torch.arange(15, device=ctx.device).view(5, 3) % 9
    r = ep.dispatch(x, idx)
    return bool((ep.combine(r.x, r.handle) == 3 * x).all())


def last_rank_does_not_come(ctx: RankContext, static: bool, ahead: bool) -> tuple[Exception | None, bool]:
    with dispatcher(ctx, timeout=1.0, static=static, ahead=ahead) as ep:
        ctx.group.barrier()
        error = None
        try:
            if ctx.rank < ctx.size - 1:
                one_round(ctx, ep)
                ep.check()
        except flexep.FlexEPError as raised:
            error = raised
        ctx.group.barrier()
    with dispatcher(ctx, timeout=60.0, static=static, ahead=ahead) as ep:
        return error, one_round(ctx, ep)


@pytest.mark.parametrize("ahead", [False, True], ids=["pulled", "ahead"])
@pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
def test_a_rank_that_does_not_come_is_named_and_a_new_dispatcher_works(
    pool: RankPool, static: bool, ahead: bool
) -> None:
    *others, (absent, again) = pool.run(last_rank_does_not_come, static, ahead)
    assert absent is None
    assert again
    for error, works in others:
        assert isinstance(error, flexep.Timeout), error
        assert error.op == "header"
        assert error.seconds == 1.0
        assert works
    assert (pool.size - 1,) in [error.awaited_ranks for error, _ in others]


def last_rank_refuses(ctx: RankContext) -> tuple[list[Exception], int]:
    """Every other round, when the others' rows are on their way; what it raised, and how many rounds were wrong."""
    raised, wrong = [], 0
    with dispatcher(ctx, timeout=60.0, ahead=True) as ep:
        for number in range(6):
            x = torch.full((40, 64), 1.0 + number + ctx.rank, dtype=torch.bfloat16, device=ctx.device)
            idx = torch.arange(120, device=ctx.device).view(40, 3) % 9
            try:
                r = ep.dispatch(x[:, :8] if number % 2 == 0 and ctx.rank == ctx.size - 1 else x, idx)
                wrong += int((ep.combine(r.x, r.handle) != 3 * x).any())
            except flexep.FlexEPError as error:
                raised.append(error)
    return raised, wrong


def test_rows_sent_ahead_of_a_refused_dispatch_are_nobodys(pool: RankPool) -> None:
    *others, (refused, wrong) = pool.run(last_rank_refuses)
    assert [type(error) for error in refused] == [flexep.ArgumentError] * 3
    assert wrong == 0
    for raised, wrong in others:
        assert [type(error) for error in raised] == [flexep.PeerRefused] * 3
        assert wrong == 0


def last_rank_leaves(ctx: RankContext) -> tuple[Exception | None, float]:
    """What a round came to without the last rank, which has destroyed its dispatcher, and how long it took."""
    ep = flexep.Dispatcher(
        ctx.group, num_experts=9, hidden=64, top_k=3, max_tokens=40, backend="deepep", timeout=100.0
    )
    one_round(ctx, ep)
    if ctx.rank == ctx.size - 1:
        ep.destroy()
    ctx.group.barrier()
    began, error = time.monotonic(), None
    try:
        if ctx.rank < ctx.size - 1:
            one_round(ctx, ep)
    except flexep.FlexEPError as raised:
        error = raised
    ctx.group.barrier()
    ep.destroy()
    return error, time.monotonic() - began


def test_a_rank_that_has_left_is_not_waited_for(pool: RankPool) -> None:
    for error, seconds in pool.run(last_rank_leaves)[:-1]:
        assert isinstance(error, flexep.PeerLost), error
        assert f"waits for rank {pool.size - 1}" in str(error)
        assert seconds < 50


def first_made_in_a_capture(ctx: RankContext) -> Exception | None:
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph()), dispatcher(ctx, timeout=60.0):
            return None
    except flexep.FlexEPError as raised:
        return raised


def test_a_dispatcher_first_made_in_a_capture_is_refused(pool: RankPool) -> None:
    for error in pool.run(first_made_in_a_capture):
        assert isinstance(error, flexep.Unavailable), error
        assert "before the capture" in str(error)


def auto(ctx: RankContext) -> str:
    with flexep.Dispatcher(ctx.group, num_experts=4, hidden=64, top_k=2, max_tokens=4) as ep:
        return ep.config.backend


def test_auto_is_deepep(pool: RankPool) -> None:
    assert pool.run(auto) == ["deepep"] * pool.size


def rebuilds(ctx: RankContext, times: int) -> tuple[int, int, bool]:
    """Bytes of the GPU free before and after, when everybody has let go; whether all rounds were right."""

    def free() -> int:
        torch.cuda.synchronize()
        ctx.group.barrier()
        return torch.cuda.mem_get_info(ctx.device)[0]

    right = True

    def build(count: int) -> int:
        nonlocal right
        for _ in range(count):
            with dispatcher(ctx, timeout=60.0) as ep:
                right &= one_round(ctx, ep)
        return free()

    return build(20), build(times), right


@pytest.mark.timeout(600)
def test_a_thousand_dispatchers_leave_nothing_on_the_gpu(pool: RankPool) -> None:
    times = 2000 // pool.size
    for before, after, right in pool.run(rebuilds, times, timeout=580.0):
        assert right
        assert before - after < times << 20, "a window that stays takes 2 MiB at least"
