"""The plan's kernels write what the host writes, whatever the shape of the launch; nothing waits that need not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

from flexep._native.arrivals import count_peers, receive_rows, relay_records
from flexep._native.maps import transposed_map
from flexep._native.plan import (
    HEADER_INTS,
    Counted,
    PlanTable,
    assign_rows,
    compact_rows,
    count_slots,
    invert_rows,
    plan_permutation,
    resolve,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poison")]


def routing(T: int, K: int, E: int, seed: int, low: int = -1, high: int = 0) -> torch.Tensor:
    """Ids in [low, E + high), some experts far more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    idx = torch.randint(low, E + high, (T, K), generator=generator)
    return torch.where(torch.rand(T, K, generator=generator) < 0.3, min(1, E - 1), idx)


def same(got: tuple[torch.Tensor, ...], want: tuple[torch.Tensor, ...]) -> None:
    for number, (g, w) in enumerate(zip(got, want, strict=True)):
        assert g.is_cuda
        assert torch.equal(g.cpu(), w), f"result {number}"


SHAPES = [
    (0, 8, 64), (1, 1, 1), (5, 3, 7), (64, 8, 256), (300, 6, 64), (130, 32, 40), (4096, 8, 256), (8192, 8, 256),
    (30000, 8, 256), (1000, 4, 1024), (700, 8, 5000), (300, 2, 60000),
]  # fmt: skip


@pytest.mark.parametrize(("T", "K", "E"), SHAPES)
def test_permutation(T: int, K: int, E: int) -> None:
    idx = routing(T, K, E, seed=T, low=-3, high=3)
    for alignment in (1, 16, 128):
        for num_rows in (None, E * alignment, E * alignment + T * K // 3, T * K + E * alignment + 100):
            for given in (idx, idx.int()):
                ids, outside = torch.empty(T, K, dtype=torch.int32), torch.empty(1, dtype=torch.int32)
                want = plan_permutation(given, E, alignment, num_rows, ids_TK=ids, outside=outside)
                ids_cuda, outside_cuda = (
                    torch.empty_like(ids, device="cuda"),
                    torch.empty_like(outside, device="cuda"),
                )
                got = plan_permutation(
                    given.cuda(), E, alignment, num_rows, ids_TK=ids_cuda, outside=outside_cuda
                )
                same((*got, ids_cuda, outside_cuda), (*want, ids, outside))


def test_ids_far_outside_are_empty_slots() -> None:
    idx = torch.tensor([[2**62, 0], [-(2**62), 1], [2**31, -1], [2**32, 2**32 + 1]])
    outside = torch.empty(1, dtype=torch.int32, device="cuda")
    row_map, row_src, counts, *_ = plan_permutation(idx.cuda(), 2, 4, 8, outside=outside)
    assert row_map.tolist() == [[-1, 0], [-1, 4], [-1, -1], [-1, -1]]
    assert row_src.tolist() == [1, -1, -1, -1, 3, -1, -1, -1]
    assert (counts.tolist(), int(outside)) == ([1, 1], 5)


@pytest.mark.parametrize("lanes", [32, 128, 512])
@pytest.mark.parametrize("blocks", [1, 2, 3, 17, 64, 128])
def test_any_launch_writes_the_same(blocks: int, lanes: int) -> None:
    idx = routing(3000, 6, 100, seed=5)
    for num_rows in (None, 9000):
        want = plan_permutation(idx, 100, 16, num_rows)
        same(plan_permutation(idx.cuda(), 100, 16, num_rows, blocks=blocks, lanes=lanes), want)


def world(
    idx: list[torch.Tensor], table: PlanTable, alignment: int, capacity: int | None
) -> dict[str, torch.Tensor]:
    """Everything that the plan of many ranks writes for the last of them as source."""
    source, (T, K), E, R = len(idx) - 1, idx[-1].shape, table.num_experts, table.num_ranks
    weights = torch.arange(T * K, device=idx[-1].device).view(T, K).float()
    weights.view(-1)[::5] = float("nan")
    counted = [count_slots(each, table, stamp=(1, 2, 3, 4)) for each in idx[:-1]]
    counted.append(count_slots(idx[-1], table, weights_TK=weights, stamp=(1, 2, 3, 4)))
    said = torch.stack([each.said for each in counted])
    resolved = resolve(said[:, HEADER_INTS : HEADER_INTS + E], table, alignment, capacity)
    out = {"said": said}
    out |= {f.name: getattr(resolved, f.name) for f in fields(resolved)}
    for split, num_send in ((T, R * T), (None, int(said[-1, HEADER_INTS + E :].sum()) + 5)):
        for given in (None, weights):
            assigned = assign_rows(
                counted[-1], source, resolved, table, num_send=num_send, split=split, records=True,
                weights_TK=given,
            )  # fmt: skip
            out |= {f"{f.name} {split} {given is None}": getattr(assigned, f.name) for f in fields(assigned)}
        begin = (R - 1) * T if split else 0  # of those to the last rank: rows of several would meet
        for flat, num_rows in ((False, T * K + 77), (True, T * K + 77)) if split else ((True, 0),):
            received = receive_rows(assigned.meta[begin:], K, num_rows, flat_weights=flat)
            out |= {f"{f.name} {split} {flat}": getattr(received, f.name) for f in fields(received)}
    peers = count_peers(said[:, HEADER_INTS + E :], said[:, 2], 0, source)
    out |= {f"peers {f.name}": getattr(peers, f.name) for f in fields(peers)}
    compact = compact_rows(assigned.slot_row, T, rows_rank_MK=assigned.slot_rank, rank=R - 1)
    out |= {"source": compact[0], "compact": compact[1]}
    out["short"] = compact_rows(assigned.slot_row, T // 2)[0]
    out["inverse"] = invert_rows(compact[1], T * K + 77)
    return out


def hops(
    idx: list[torch.Tensor], table: PlanTable, alignment: int, capacity: int | None, domains: int
) -> dict[str, torch.Tensor]:
    """Everything that the plan over domains writes on the last rank, which relays what it sends itself."""
    source, (T, K), E, R = len(idx) - 1, idx[-1].shape, table.num_experts, table.num_ranks
    counted = [count_slots(each, table, domains=domains) for each in idx]
    said = torch.stack([each.said for each in counted])
    resolved = resolve(said[:, HEADER_INTS : HEADER_INTS + E], table, alignment, capacity)
    weights = torch.arange(T * K, device=idx[-1].device).view(T, K).float()
    a = assign_rows(
        counted[-1], source, resolved, table, num_send=T * min(K, domains), records=True, weights_TK=weights
    )
    peers = count_peers(said[:, HEADER_INTS + E :], said[:, 2], domains, source)
    assert peers.hops is not None
    relayed = relay_records(a.meta, K, peers.hops.relay_base[-1:], R // domains, T * K)
    received = receive_rows(relayed.meta, K, 0, peers=peers)
    out = {"said": said, **{f.name: getattr(a, f.name) for f in fields(a)}}
    out |= {f"peers {f.name}": getattr(peers, f.name) for f in fields(peers) if f.name != "hops"}
    out |= {f"peers {f.name}": getattr(peers.hops, f.name) for f in fields(peers.hops)}
    out |= {f"relayed {f.name}": getattr(relayed, f.name) for f in fields(relayed)}
    return out | {f"received {f.name}": getattr(received, f.name) for f in fields(received)}


@pytest.mark.parametrize(
    ("R", "E", "K", "T"),
    [(1, 64, 8, 4096), (2, 256, 8, 8192), (3, 10, 5, 333), (8, 256, 8, 4096), (8, 61, 9, 100), (72, 288, 8, 1024),
     (100, 50, 3, 257), (4, 3000, 2, 999), (5, 7, 32, 66)],
)  # fmt: skip
@pytest.mark.parametrize("capacity", [None, 0, 3])
def test_steps_of_many_ranks(R: int, E: int, K: int, T: int, capacity: int | None) -> None:
    generator = torch.Generator().manual_seed(R)
    placement = torch.randint(0, R, (E,), generator=generator).tolist() if R % 2 else None
    table = PlanTable(E, R, placement)
    idx = [routing(T if s == R - 1 else s * 7 % 50, K, E, seed=s, low=-2, high=2).int() for s in range(R)]
    rows = None if capacity is None else E * 8 + capacity * T * K // (4 * R)
    on_gpu = [each.cuda() for each in idx]
    compare(world(idx, table, 8, rows), world(on_gpu, table, 8, rows))
    for domains in {R // size for size in (1, 2, 4) if R % size == 0 and size < R}:
        compare(hops(idx, table, 8, rows, domains), hops(on_gpu, table, 8, rows, domains))


def compare(host: dict[str, torch.Tensor | None], device: dict[str, torch.Tensor | None]) -> None:
    for name, value in host.items():
        got = device[name]
        if value is None:
            assert got is None, name
        else:  # bits, of which some are no numbers
            assert torch.equal(value.view(torch.int32), got.cpu().view(torch.int32)), name


def test_twenty_runs_on_two_streams_are_equal() -> None:
    idx = [routing(8192, 8, 256, seed=s).cuda() for s in range(2)]
    want = [plan_permutation(each, 256, 16, 70000) for each in idx]
    torch.cuda.synchronize()
    streams, found = [torch.cuda.Stream() for _ in idx], []
    for _ in range(20):
        for each, stream, wanted in zip(idx, streams, want, strict=True):
            with torch.cuda.stream(stream):
                found.append((plan_permutation(each, 256, 16, 70000), wanted))
    torch.cuda.synchronize()
    for got, wanted in found:
        for g, w in zip(got, wanted, strict=True):
            assert torch.equal(g, w)


def counts_of(counted: Counted, ranks: int) -> torch.Tensor:
    """[R, 256]: as if every rank had counted the same."""
    return counted.said[HEADER_INTS : HEADER_INTS + 256].expand(ranks, 256)


def test_a_graph_plans_what_its_input_holds() -> None:
    torch.use_deterministic_algorithms(False)  # its fills would be captured too
    idx = routing(4096, 8, 256, seed=0).cuda()
    table = PlanTable(256, 8)
    plan_permutation(idx, 256, 128, 60000)
    count_slots(idx, table)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        one = plan_permutation(idx, 256, 128, 60000)
        counted = count_slots(idx, table)
        resolved = resolve(counts_of(counted, 8), table, 16, 9000)
        assigned = assign_rows(counted, 3, resolved, table, num_send=8 * 4096, split=4096)
    for seed in (1, 2, 3):
        fresh = routing(4096, 8, 256, seed=seed)
        idx.copy_(fresh)
        graph.replay()
        same(one, plan_permutation(fresh, 256, 128, 60000))
        want = count_slots(fresh, table)
        same((counted.said,), (want.said,))
        rows = resolve(counts_of(want, 8), table, 16, 9000)
        whole = assign_rows(want, 3, rows, table, num_send=8 * 4096, split=4096)
        for field in fields(whole)[:-1]:  # no records
            assert torch.equal(getattr(assigned, field.name).cpu(), getattr(whole, field.name)), field.name


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Afterwards, what torch said of each time that the host waited for the device."""
    waits: list[str] = []
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield waits
        finally:
            torch.cuda.set_sync_debug_mode("default")
    waits += [str(each.message) for each in found if "called a synchronizing" in str(each.message)]


def test_static_sizes_wait_for_nothing_and_exact_ones_once() -> None:
    torch.use_deterministic_algorithms(False)
    idx = routing(4096, 8, 256, seed=0).cuda()
    table = PlanTable(256, 4)
    for num_rows, waits in ((60000, 0), (None, 1)):
        plan_permutation(idx, 256, 16, num_rows)
        with host_waits() as found:
            plan_permutation(idx, 256, 16, num_rows)
        assert len(found) == waits, found
    count_slots(idx, table)
    with host_waits() as found:
        counted = count_slots(idx, table)
        resolved = resolve(counts_of(counted, 4), table, 16, None)
        assigned = assign_rows(counted, 0, resolved, table, num_send=4 * 4096, split=4096, records=True)
        receive_rows(assigned.meta, 8, 50000)
    assert not found


def test_the_row_map_is_a_tenth_of_a_map_over_experts() -> None:
    T, K, E = 4096, 8, 256
    row_map = plan_permutation(routing(T, K, E, seed=0).cuda(), E, 16, 40000)[0]
    assert row_map.element_size() * row_map.numel() <= T * (2 * E + 1) * 4 / 10


def test_transposed_maps() -> None:
    for outer, inner, size in ((1, 1, 1), (72, 4, 100), (8, 32, 257), (3, 5, 0)):
        rows = outer * inner * size
        want = torch.arange(rows).view(outer, inner, size).transpose(0, 1).reshape(-1).int()
        assert torch.equal(transposed_map(rows, outer, inner, torch.device("cpu")), want)
        same((transposed_map(rows, outer, inner, torch.device("cuda")),), (want,))
