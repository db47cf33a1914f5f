"""Predicted rows, bytes, metadata and memory are exactly what real dispatchers count and plan for that routing."""

from __future__ import annotations

import itertools

import pytest
import torch

import flexep
from flexep.config import WINDOWED
from flexep.planning import Topology, counted, draw, make_workload
from flexep.planning.movement import Scene
from flexep.planning.patterns import PATTERNS
from flexep.planning.terms import price

TOKENS, HIDDEN, TOP_K = 40, 16, 3
SHAPES = [(1, 1, 4), (3, 3, 2), (4, 4, 10), (6, 6, 12)]
DOMAINS = [(2, 1, 5), (4, 2, 10), (6, 2, 12), (6, 3, 4)]  # 2x1, 2x2, 3x2, 2x3
CASES = [
    (name, shape, *how)
    for names, shapes in ((flexep.BACKENDS, SHAPES), (("deepep", "hybridep"), DOMAINS))
    for name, shape, how in itertools.product(
        names,
        shapes,
        [
            (None, "expert_major", "uniform"),
            (None, "flat", "zipf"),
            (None, "expert_major", "W4"),
            (None, "expert_major", "W5"),
            (1.25, "expert_major", "hot"),
            (0.75, "flat", "W2"),
        ],
    )
]


@pytest.mark.parametrize(("name", "shape", "capacity", "layout", "routing"), CASES)
def test_counters(
    name: str, shape: tuple[int, int, int], capacity: float | None, layout: str, routing: str
) -> None:
    ranks, size, experts = shape
    work = make_workload(
        ranks=ranks,
        domain_size=size,
        tokens=TOKENS,
        hidden=HIDDEN,
        experts=experts,
        top_k=TOP_K,
        capacity=capacity,
        layout=layout,
        alignment=4,
        routing=routing,
        seed=ranks,
    )
    topology, sample = Topology(ranks=ranks, domain_size=size), draw(work, 10**6)
    assert sample.exact
    load = counted(work, topology, sample)
    pattern = PATTERNS[name](Scene(work, topology, load))

    ep = flexep.Dispatcher(
        flexep.Group.local(ranks),
        num_experts=experts,
        hidden=HIDDEN,
        top_k=TOP_K,
        max_tokens=TOKENS,
        backend=name,
        capacity=capacity,
        layout=layout,
        alignment=4,
        overflow="drop",
        placement=work.config.placement,
        domain_size=work.config.domain_size,
    )
    x = [torch.randn(len(idx), HIDDEN).bfloat16() for idx in sample.topk_idx]
    weights = [torch.rand(len(idx), TOP_K) for idx in sample.topk_idx]
    received = ep.dispatch(x, sample.topk_idx, weights)
    ep.combine([r.x for r in received], [r.handle for r in received])

    dispatch, combine = price(pattern.dispatch, topology), price(pattern.combine, topology)
    count = ep.traffic
    for operation, op in ((dispatch, "dispatch.rows"), (combine, "combine.rows")):
        assert (operation.remote_rows, operation.rows.total) == (
            count[op].remote_rows,
            count[op].remote_bytes,
        )
    said = sum(traffic.remote_bytes for op, traffic in count.items() if not op.endswith(".rows"))
    assert dispatch.metadata.total == said
    assert combine.metadata.total == 0
    if name == "hybridep":  # deepep knows no rails: it reaches every rank in one hop
        for move, op in ((pattern.dispatch, "dispatch.rows"), (pattern.combine, "combine.rows")):
            assert float(move.rows.rail_send.sum()) == count[op].rail_rows
            assert move.row_bytes * count[op].rail_rows == count[op].rail_bytes
        others = sum(traffic.rail_bytes for op, traffic in count.items() if not op.endswith(".rows"))
        assert float(pattern.dispatch.metadata.rail_send.sum()) == others
    everything = sum(traffic.remote_bytes for traffic in count.values())
    assert dispatch.remote.total + combine.remote.total == everything

    assert load.rows_R.tolist() == [r.handle.num_rows for r in received]
    assert load.slots_R.tolist() == [int(r.counts.sum()) for r in received]
    assert load.dropped == sum(int(r.dropped.sum()) for r in received)
    staging = {b.name: b.worst for b in pattern.memory if b.kind == "staging"}
    assert staging == ep.memory_plan().staging_bytes
    (window,) = [b.worst for b in pattern.memory if b.kind == "window"] or [0]
    assert window == ep.memory_plan().window_bytes
    assert (window > 0) == (name in WINDOWED)
    assert all(b.here <= b.worst for b in pattern.memory)
    largest = max(r.x.numel() * r.x.element_size() for r in received)
    assert next(b.here for b in pattern.memory if b.name == "received rows (r.x)") == largest


@pytest.mark.parametrize("name", list(flexep.BACKENDS))
def test_closed_form_is_near_the_counters(name: str) -> None:
    """Within the sampling error of uniform routing: 5 standard deviations of a binomial count."""
    ranks, experts, tokens, top_k = 8, 64, 512, 6
    work = make_workload(
        ranks=ranks, domain_size=ranks, tokens=tokens, hidden=8, experts=experts, top_k=top_k
    )
    topology, sample = Topology(ranks=ranks, domain_size=ranks), draw(work, 10**6)
    ep = flexep.Dispatcher(
        flexep.Group.local(ranks),
        num_experts=experts,
        hidden=8,
        top_k=top_k,
        max_tokens=tokens,
        backend=name,
    )
    ep.dispatch([torch.zeros(tokens, 8, dtype=torch.bfloat16)] * ranks, sample.topk_idx)
    from flexep.planning import closed_form

    pattern = PATTERNS[name](Scene(work, topology, closed_form(work, topology)))
    predicted = price(pattern.dispatch, topology).remote_rows
    error = 5 * (ranks * ranks * tokens) ** 0.5 / 2
    assert predicted == pytest.approx(ep.traffic["dispatch.rows"].remote_rows, abs=error)
    assert error < 0.03 * predicted
