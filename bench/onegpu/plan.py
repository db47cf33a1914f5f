"""The plan and the routing maps on one GPU: `python -m bench.onegpu.plan [--sweep]` prints one JSON line a measurement.

Times are of graph replays, without a host wait: sizes are static, `num_rows` the most that the routing can need.
`bytes` counts ids read and maps and counts written, once each; `ratio_to_copy` is the time of a device-to-device copy
of as many bytes over the median, and small, because a plan is latency. Beside ours, the same results by torch
operations that know no capacity: a stable sort for the plan, scatters and sorts for the maps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from bench.onegpu.timing import copy_us, emit, median_us
from flexep._native.arrivals import receive_rows
from flexep._native.plan import (
    HEADER_INTS,
    Assigned,
    Counted,
    PlanTable,
    Resolved,
    assign_rows,
    compact_rows,
    count_slots,
    invert_rows,
    plan_permutation,
    resolve,
)
from flexep.ops import indices_to_multihot, multihot_to_indices, pad_routing_map

E, K = 256, 8
SETS = 8
Call = Callable[[], object]


def routings(tokens: int, experts: int, top_k: int, dtype: torch.dtype = torch.int64) -> list[torch.Tensor]:
    """Sets of distinct experts a token, uniform, as a router's topk leaves them."""
    generator = torch.Generator(device="cuda").manual_seed(0)
    return [
        torch.rand(tokens, experts, device="cuda", generator=generator).topk(top_k, dim=1).indices.to(dtype)
        for _ in range(SETS)
    ]


def timed(
    op: str,
    tokens: int,
    alignment: int,
    nbytes: int,
    calls: list[Call],
    library: str = "flexep",
    **more: object,
) -> None:
    took = median_us(calls)
    emit(
        op=op, tokens=tokens, hidden=0, alignment=alignment, median_us=took, ratio_to_copy=copy_us(nbytes) / took,
        library=library, bytes=nbytes, **more,
    )  # fmt: skip


def most_rows(tokens: int, alignment: int) -> int:
    return tokens * K + E * (alignment - 1)


def sorted_plan(idx: torch.Tensor, alignment: int, rows: int) -> tuple[torch.Tensor, ...]:
    """The one-rank plan by torch: what plan_permutation returns where every row fits."""
    flat = idx.flatten()
    order = flat.argsort(stable=True)
    counts = torch.zeros(E, dtype=torch.int64, device=idx.device).scatter_add_(0, flat, torch.ones_like(flat))
    padded = (counts + alignment - 1) // alignment * alignment
    shift = (padded.cumsum(0) - padded) - (counts.cumsum(0) - counts)
    row = torch.arange(flat.shape[0], device=idx.device) + shift[flat[order]]
    row_map = torch.empty_like(flat, dtype=torch.int32).scatter_(0, order, row.int()).view(idx.shape)
    row_src = torch.full((rows,), -1, dtype=torch.int32, device=idx.device).scatter_(0, row, order.int())
    return row_map, row_src, counts.int(), padded.int()


def one_rank(tokens: int, alignment: int) -> None:
    rows = most_rows(tokens, alignment)
    for dtype in (torch.int64, torch.int32):
        sets = routings(tokens, E, K, dtype)
        nbytes = tokens * K * (sets[0].element_size() + 4) + 4 * rows + 12 * E
        timed(
            "plan", tokens, alignment, nbytes,
            [lambda idx=idx: plan_permutation(idx, E, alignment, rows) for idx in sets],
            ids=str(dtype), map_bytes=4 * tokens * K, map_of_experts_bytes=4 * tokens * (2 * E + 1),
        )  # fmt: skip
    short = tokens * K * 3 // 4
    calls: list[Call] = [lambda idx=idx: plan_permutation(idx, E, alignment, short) for idx in sets]
    timed("plan, a quarter dropped", tokens, alignment, nbytes, calls)
    wide = routings(tokens, E, K)
    for got, want in zip(
        plan_permutation(wide[0], E, alignment, rows), sorted_plan(wide[0], alignment, rows), strict=False
    ):
        assert torch.equal(got, want)
    calls = [lambda idx=idx: sorted_plan(idx, alignment, rows) for idx in wide]
    timed("plan", tokens, alignment, nbytes, calls, "torch sort")


def many_ranks(ranks: int, experts: int, tokens: int, alignment: int) -> None:
    """The steps of a dispatcher's plan on one of R ranks, static sizes; and all of them in a row."""
    table, sets = PlanTable(experts, ranks), routings(tokens, experts, K, torch.int32)
    counted = [count_slots(idx, table) for idx in sets]
    said = torch.stack([counted[s % SETS].said for s in range(ranks)])
    everybody = said[:, HEADER_INTS : HEADER_INTS + experts]
    laid_out = resolve(everybody, table, alignment, None)
    weights = torch.rand(tokens, K, device="cuda")
    rows = int(laid_out.rows_R.max())

    def assign(one: Counted, resolved: Resolved = laid_out, records: bool = False) -> Assigned:
        return assign_rows(
            one, 0, resolved, table, num_send=ranks * tokens, split=tokens, records=records,
            weights_TK=weights if records else None,
        )  # fmt: skip

    def whole(idx: torch.Tensor) -> object:
        return assign(count_slots(idx, table), resolve(everybody, table, alignment, rows), True)

    assigned = [assign(one, records=True) for one in counted]

    slots, send = 4 * tokens * K, 4 * ranks * tokens
    for op, nbytes, calls in (
        ("count_slots", slots, [lambda idx=idx: count_slots(idx, table) for idx in sets]),
        ("resolve", 8 * ranks * experts, [lambda: resolve(everybody, table, alignment, rows)]),
        ("assign_rows", 8 * slots + send, [lambda c=c: assign(c) for c in counted]),
        (
            "assign_rows, records", 9 * slots + send * (2 + 2 * K),
            [lambda c=c: assign(c, records=True) for c in counted],
        ),
        ("count, resolve, assign", 11 * slots + send * (2 + 2 * K), [lambda idx=idx: whole(idx) for idx in sets]),
        (
            "receive_rows", send * (2 + 3 * K),
            [lambda a=a: receive_rows(a.meta, K, 2 * tokens * K) for a in assigned],
        ),
        ("compact_rows", 2 * slots, [lambda a=a: compact_rows(a.slot_row, tokens) for a in assigned]),
        ("invert_rows", 2 * slots, [lambda a=a: invert_rows(a.slot_row, 2 * tokens * K) for a in assigned]),
    ):  # fmt: skip
        timed(op, tokens, alignment, nbytes, calls, ranks=ranks, experts=experts)


def maps(tokens: int) -> None:
    sets, alignment = routings(tokens, E, K), 128
    weights = torch.rand(tokens, K, device="cuda")
    both = [indices_to_multihot(idx, weights, num_experts=E) for idx in sets]
    cells, slots = tokens * E, tokens * K

    def scatter(idx: torch.Tensor) -> object:
        mask = torch.zeros(tokens, E, dtype=torch.bool, device="cuda").scatter_(1, idx, True)
        return mask, torch.zeros(tokens, E, device="cuda").scatter_(1, idx, weights)

    def pad_by_scan(mask: torch.Tensor) -> object:
        return mask | ((~mask).cumsum(0) <= -mask.sum(0) % alignment)

    for op, nbytes, ours, torch_s in (
        (
            "indices_to_multihot", 12 * slots + 5 * cells,
            lambda i: indices_to_multihot(sets[i], weights, num_experts=E), lambda i: scatter(sets[i]),
        ),
        (
            "multihot_to_indices", cells + 12 * slots,
            lambda i: multihot_to_indices(both[i][0], both[i][1], top_k=K),
            lambda i: both[i][0].to(torch.int8).argsort(dim=1, descending=True, stable=True)[:, :K],
        ),
        (
            "pad_routing_map", 2 * cells,
            lambda i: pad_routing_map(both[i][0], alignment), lambda i: pad_by_scan(both[i][0]),
        ),
    ):  # fmt: skip
        for library, call in (("flexep", ours), ("torch", torch_s)):
            timed(
                op, tokens, alignment, nbytes, [lambda i=i, call=call: call(i) for i in range(SETS)], library
            )


def sweep() -> None:
    """What the launch's shape is worth, and how the plan grows."""
    for tokens in (4096, 8192):
        sets = routings(tokens, E, K)
        rows = most_rows(tokens, 16)
        for lanes in (128, 256, 512):
            for blocks in (8, 16, 32, 64, 96, 128):
                shape = {"blocks": blocks, "lanes": lanes}
                calls: list[Call] = [
                    lambda idx=idx, rows=rows, shape=shape: plan_permutation(idx, E, 16, rows, **shape)
                    for idx in sets
                ]
                emit(op="plan sweep", tokens=tokens, **shape, median_us=median_us(calls))
    for tokens in (1, 64, 512, 2048, 16384, 65536):
        sets, rows = routings(tokens, E, K), most_rows(tokens, 16)
        calls = [lambda idx=idx, n=rows: plan_permutation(idx, E, 16, n) for idx in sets]
        emit(op="plan sweep", tokens=tokens, median_us=median_us(calls))


if __name__ == "__main__":
    for some_tokens in (4096, 8192):
        for some_alignment in (16, 128):
            one_rank(some_tokens, some_alignment)
        for some_ranks, some_experts in ((8, 256), (72, 288)):
            many_ranks(some_ranks, some_experts, some_tokens, 16)
        maps(some_tokens)
    if "--sweep" in sys.argv[1:]:
        sweep()
