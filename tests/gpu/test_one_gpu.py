"""One CUDA GPU: the plan's kernels, the composed row functors, local groups, static mode without host waits."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import pytest
import torch

import flexep
from flexep._native.plan import (
    HEADER_INTS,
    PlanTable,
    assign_rows,
    compact_rows,
    count_slots,
    invert_rows,
    resolve,
)
from flexep.ops.rows import gather_rows, reduce_rows
from flexep.testing.axes import random_cases
from flexep.testing.check import check_dispatchers

pytestmark = pytest.mark.gpu
DISPATCHERS = list(flexep.BACKENDS)


def test_plan_steps_write_what_the_host_writes() -> None:
    generator = torch.Generator().manual_seed(3)
    for number in range(60):
        R, E, K = 1 + number % 8, 1 + number * 5 % 70, 1 + number % 9
        T, table = number * 37 % 700, PlanTable(1 + number * 5 % 70, 1 + number % 8)
        topk_idx = [torch.randint(-1, E, (T, K), dtype=torch.int32, generator=generator) for _ in range(R)]
        weights = torch.rand(T, K, generator=generator)
        capacity = None if number % 2 else E * 8 + 50
        host = plan_everything(topk_idx, weights, table, capacity)
        device = plan_everything([i.cuda() for i in topk_idx], weights.cuda(), table, capacity)
        for name, value in host.items():
            assert torch.equal(value, device[name].cpu()), f"world {number}: {name}"


def plan_everything(
    topk_idx: list[torch.Tensor], weights: torch.Tensor, table: PlanTable, capacity: int | None
) -> dict[str, torch.Tensor]:
    counted = [count_slots(idx, table) for idx in topk_idx]
    said, T = torch.stack([one.said for one in counted]), topk_idx[0].shape[0]
    resolved = resolve(said[:, HEADER_INTS : HEADER_INTS + table.num_experts], table, 8, capacity)
    out = {"said": said}
    out |= {f.name: getattr(resolved, f.name) for f in fields(resolved)}
    assigned = assign_rows(
        counted[0],
        0,
        resolved,
        table,
        num_send=table.num_ranks * T,
        split=T,
        records=True,
        weights_TK=weights,
    )
    out |= {f.name: getattr(assigned, f.name) for f in fields(assigned)}
    out["source"], out["compact"] = compact_rows(
        assigned.slot_row, T, rows_rank_MK=assigned.slot_rank, rank=table.num_ranks - 1
    )
    out["inverse"] = invert_rows(out["compact"], 4096)
    return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_row_functors_give_the_bits_of_the_cpu(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(5)
    src = torch.randn(300, 264, generator=generator).to(dtype)
    idx = torch.randint(-1, 300, (500, 6), dtype=torch.int32, generator=generator)
    weights = torch.randn(500, 6, generator=generator)
    groups = (torch.arange(6, dtype=torch.int32) // 2).expand(500, 6).contiguous()
    for sort, some_groups in ((True, None), (False, None), (False, groups)):
        for some_weights in (None, weights):
            args = (src, idx, some_weights, dtype, sort, some_groups, None if some_groups is None else dtype)
            on_device = [a.cuda() if isinstance(a, torch.Tensor) else a for a in args]
            assert torch.equal(reduce_rows(*args), reduce_rows(*on_device).cpu())
    one, weight = idx[:, 0].contiguous(), weights[:, 0].contiguous()
    assert torch.equal(
        gather_rows(src, one, weight), gather_rows(src.cuda(), one.cuda(), weight.cuda()).cpu()
    )


def all_kinds_of_numbers(dtype: torch.dtype, hidden: int) -> torch.Tensor:
    """Rows of every bit pattern of 16 bits; of 32 bits, random mantissas under every sign and exponent."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype).view(-1, hidden)
    generator = torch.Generator().manual_seed(7)
    patterns = torch.randint(2**23, (2**16,), dtype=torch.int32, generator=generator)
    patterns += (torch.arange(2**16, dtype=torch.int32) % 512 - 256) * 2**23
    return patterns.view(dtype).view(-1, hidden)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_nan_becomes_the_promised_one(dtype: torch.dtype) -> None:
    """The bits of the CPU, those of NaN too, from rows that are weighted, reduced and combined."""
    src = all_kinds_of_numbers(dtype, 64)
    rows, ints = len(src), {2: torch.int16, 4: torch.int32}[dtype.itemsize]

    def both(device: str) -> Iterator[torch.Tensor]:
        x = src.to(device)
        idx = torch.arange(rows, dtype=torch.int32, device=device)
        halves = torch.full((rows,), -0.5, device=device)
        yield gather_rows(x, idx, halves)
        for others in (idx[:, None], torch.stack([idx, idx.flip(0), idx.roll(9)], dim=1)):
            yield reduce_rows(x, others.contiguous(), None, dtype, True, None, None)
        group = flexep.Group.local(2, device)
        for top_k in (1, 3):
            ep = flexep.Dispatcher(
                group, num_experts=8, hidden=64, top_k=top_k, max_tokens=rows, backend="deepep", dtype=dtype
            )
            slots = (idx[:, None] * 5 + 3 * torch.arange(top_k, device=device)) % 8
            weights = torch.full((rows, top_k), 0.75, device=device)
            received = ep.dispatch([x, x.flip(0)], [slots, slots], [weights, weights])
            handles = [r.handle for r in received]
            for given in (None, [r.weights for r in received]):
                yield from ep.combine([r.x for r in received], handles, weights=given)

    for got, want in zip(both("cuda"), both("cpu"), strict=True):
        assert torch.equal(got.cpu().view(ints), want.view(ints))


@pytest.mark.parametrize("ranks", [1, 3, 8, 72])
def test_contract_in_a_local_group_on_one_gpu(ranks: int) -> None:
    group = flexep.Group.local(ranks, "cuda")
    for case in random_cases(ranks, 6, seed=40 + ranks, limit=2**20):
        found = check_dispatchers(case, group, DISPATCHERS)
        assert not found, "\n".join(map(str, found[:4]))


@contextmanager
def no_host_wait() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")


class StaticStep:
    """dispatch -> a different scale for each expert -> combine -> backward, in static mode with drops."""

    def __init__(self, backend: str, ranks: int) -> None:
        self.group = flexep.Group.local(ranks, "cuda")
        self.ep = flexep.Dispatcher(
            self.group, num_experts=6, hidden=64, top_k=3, max_tokens=40, backend=backend, alignment=4,
            capacity=64, overflow="drop",
        )  # fmt: skip
        self.x = [torch.zeros(40, 64, dtype=torch.bfloat16, device="cuda") for _ in range(ranks)]
        self.weights = [torch.zeros(40, 3, device="cuda") for _ in range(ranks)]
        self.topk_idx = [torch.zeros(40, 3, dtype=torch.int64, device="cuda") for _ in range(ranks)]

    def refill(self, seed: int) -> None:
        generator = torch.Generator(device="cuda").manual_seed(seed)
        for x, weights, idx in zip(self.x, self.weights, self.topk_idx, strict=True):
            x.normal_(generator=generator)
            weights.uniform_(generator=generator)
            idx.random_(-1, 6, generator=generator)

    def __call__(self) -> list[torch.Tensor]:
        # Fresh leaves over the same memory: a leaf belongs to the stream, captured or not, that first used it.
        xs, weights = ([t.detach().requires_grad_() for t in ts] for ts in (self.x, self.weights))
        r = self.ep.dispatch(xs, self.topk_idx, weights)
        y = [(one.x.float() * one.weights[:, None]).to(torch.bfloat16) for one in r]
        z = self.ep.combine(y, [one.handle for one in r])
        grads = torch.autograd.grad(z, [*xs, *weights], [torch.ones_like(one) for one in z])
        return [*(t for one in r for t in (one.x, one.weights, one.counts, one.dropped)), *z, *grads]


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_static_mode_never_waits_for_the_device(backend: str) -> None:
    step = StaticStep(backend, 4)
    step.refill(0)
    step()
    with no_host_wait():
        step()


@pytest.mark.parametrize("backend", DISPATCHERS)
def test_a_graph_follows_changing_routing(backend: str) -> None:
    step = StaticStep(backend, 4)
    step.refill(0)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    dropped = 0
    for seed in range(50):
        step.refill(seed)
        graph.replay()
        eager = step()
        assert all(torch.equal(a, b) for a, b in zip(captured, eager, strict=True)), f"replay {seed}"
        dropped += sum(int(t.sum()) for t in captured[3:16:4])
    assert dropped > 0, "the capacity of this test must drop rows sometimes"
