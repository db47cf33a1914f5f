"""The oracle against loops over single numbers, in random tiny worlds."""

from __future__ import annotations

import importlib
import random
from dataclasses import replace

import pytest
import torch

from flexep import ref
from tests.ref import brute

H = 3
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tiny_world(seed: int) -> tuple[ref.World, list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """(world, topk_idx, x, weights); every axis small, every axis random."""
    rng, gen = random.Random(seed), torch.Generator().manual_seed(seed)
    ranks, experts, top_k = rng.randint(1, 4), rng.randint(1, 6), rng.randint(1, 4)
    tokens = [rng.choice([0, 1, 2, 5]) for _ in range(ranks)]
    placement = None if rng.random() < 0.5 else tuple(rng.randrange(ranks) for _ in range(experts))
    world = ref.World(
        ranks,
        experts,
        H,
        top_k,
        max(1, *tokens),
        rng.choice(DTYPES),
        rng.choice([None, *DTYPES]),
        rng.choice([None, *(s for s in range(1, ranks + 1) if ranks % s == 0)]),
        rng.choice(["expert_major", "flat"]),
        rng.choice([1, 2, 3, 4]),
        None,
        placement,
    )
    least = world.alignment * max(len(world.experts_of(r)) for r in range(ranks))
    capacity = rng.choice([None, least + rng.randint(0, 8), float(least + 1)])
    world = replace(world, capacity=capacity)
    topk_idx = [torch.randint(-1, experts, (t, top_k), generator=gen) for t in tokens]
    x = [torch.randn(t, H, generator=gen).to(world.dtype) for t in tokens]
    weights = [torch.randn(t, top_k, generator=gen) for t in tokens]
    return world, topk_idx, x, weights


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Same dtype, shape and bits."""
    bits = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
    )


@pytest.mark.parametrize("seed", range(150))
def test_dispatch(seed: int) -> None:
    world, topk_idx, x, weights = tiny_world(seed)
    received = ref.dispatch(ref.make_plan(world, topk_idx), x, weights)
    kept = brute.kept_slots(world, topk_idx)
    every = brute.kept_slots(replace(world, capacity=None), topk_idx)
    for r, got in enumerate(received):
        experts = world.experts_of(r)
        rows, flat = brute.rows_of(world, kept, r), brute.flat_of(world, kept, r)
        assert got.counts.tolist() == [len(kept[e]) for e in experts]
        assert got.dropped.tolist() == [len(every[e]) - len(kept[e]) for e in experts]
        assert got.padded_counts.tolist() == [
            -(-len(kept[e]) // world.alignment) * world.alignment for e in experts
        ]
        assert got.row_map.tolist() == [-1 if slot is None else flat.index(slot[:2]) for slot in rows]
        if world.layout == "expert_major":
            assert len(got.x) == len(rows)
            for i, slot in enumerate(rows):
                expected = torch.zeros(H, dtype=world.dtype) if slot is None else x[slot[0]][slot[1]]
                assert equal(got.x[i], expected)
                assert got.weights[i] == (0 if slot is None else weights[slot[0]][slot[1], slot[2]])
            continue
        size = (
            len(flat)
            if world.capacity_rows is None
            else min(world.num_ranks * world.max_tokens, world.capacity_rows)
        )
        assert len(got.x) == len(got.weights) == len(got.expert_idx) == size
        assert not got.x[len(flat) :].any()
        assert not got.weights[len(flat) :].any()
        assert (got.expert_idx[len(flat) :] == -1).all()
        for n, (s, t) in enumerate(flat):
            assert equal(got.x[n], x[s][t])
            for k in range(world.top_k):
                e = brute.expert_of(kept, (s, t, k))
                mine = e >= 0 and world.rank_of_expert[e] == r
                assert got.expert_idx[n, k] == (experts.index(e) if mine else -1)
                assert got.weights[n, k] == (weights[s][t, k] if mine else 0)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("seed", range(60))
def test_combine_and_both_backwards(seed: int, weighted: bool) -> None:
    world, topk_idx, x, weights = tiny_world(1000 + seed)
    plan, kept = ref.make_plan(world, topk_idx), brute.kept_slots(world, topk_idx)
    tokens = [len(t) for t in x]
    gen = torch.Generator().manual_seed(seed)
    received = ref.dispatch(plan, x, weights)
    rows = [brute.rows_of(world, kept, r) for r in range(world.num_ranks)]
    ys = [torch.randn(len(r), H, generator=gen).to(world.dtype) for r in rows]
    dzs = [torch.randn(t, H, generator=gen).to(world.dtype) for t in tokens]
    of_slot = {
        (s, t, k): float(w[t, k])
        for s, w in enumerate(weights)
        for t in range(len(w))
        for k in range(w.shape[1])
    }
    carried = [r.weights for r in received] if weighted else None

    expected = brute.combine(world, kept, tokens, ys, of_slot if weighted else None, world.wire)
    for got, want in zip(ref.combine(plan, ys, carried, "expert_major"), expected, strict=True):
        assert equal(got, want)

    dys, dws = ref.combine_backward(plan, dzs, ys, carried, "expert_major")
    flat = [brute.flat_of(world, kept, r) for r in range(world.num_ranks)]
    for r in range(world.num_ranks):
        for i, slot in enumerate(rows[r]):
            if slot is None:
                assert not dys[r][i].any()
                continue
            dz = dzs[slot[0]][slot[1]]
            assert equal(dys[r][i], (of_slot[slot] * dz.float()).to(world.dtype) if weighted else dz)
            if weighted:
                where = i if world.layout == "expert_major" else (flat[r].index(slot[:2]), slot[2])
                assert float(dws[r][where]) == pytest.approx(
                    float((ys[r][i].double() * dz.double()).sum()), abs=1e-4
                )
    if weighted:
        _, home = ref.dispatch_backward(plan, [r.x for r in received], dws)
        for s, t, k in of_slot:
            e = brute.expert_of(kept, (s, t, k))
            r = world.rank_of_expert[e] if e >= 0 else -1
            if e < 0:
                assert home[s][t, k] == 0
            else:
                i = rows[r].index((s, t, k))
                assert (
                    home[s][t, k]
                    == dws[r][i if world.layout == "expert_major" else (flat[r].index((s, t)), k)]
                )

    # dx follows the recipe of combine with x.dtype on the wire
    dxs = [torch.randn(r.x.shape, generator=gen).to(world.dtype) for r in received]
    dx, _ = ref.dispatch_backward(plan, dxs)
    if world.layout == "flat":
        expected = brute.combine_flat(world, kept, tokens, dxs, world.dtype)
    else:
        expected = brute.combine(world, kept, tokens, dxs, None, world.dtype)
    for got, want in zip(dx, expected, strict=True):
        assert equal(got, want)


@pytest.mark.parametrize("seed", range(40))
def test_flat_partial_sums(seed: int) -> None:
    world, topk_idx, x, _ = tiny_world(2000 + seed)
    plan, kept = ref.make_plan(world, topk_idx), brute.kept_slots(world, topk_idx)
    gen = torch.Generator().manual_seed(seed)
    sizes = [len(p.flat_rank) for p in plan.ranks]
    ys = [torch.randn(n, H, generator=gen).to(world.dtype) for n in sizes]
    expected = brute.combine_flat(world, kept, [len(t) for t in x], ys, world.wire)
    for got, want in zip(ref.combine(plan, ys, y_layout="flat"), expected, strict=True):
        assert equal(got, want)


def plant(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    """Breaks the oracle on purpose."""
    # flexep.ref.combine names both a function and its module
    combine_module, plan_module = map(importlib.import_module, ("flexep.ref.combine", "flexep.ref.plan"))
    if bug == "kept set one too small":
        kept_rows = plan_module.kept_rows
        monkeypatch.setattr(plan_module, "kept_rows", lambda w, c: [max(0, n - 1) for n in kept_rows(w, c)])
    elif bug == "padding not aligned":
        monkeypatch.setattr(ref.World, "align", lambda self, rows: rows)
    elif bug == "sums not rounded to the wire":
        real = combine_module._sum_ranks
        monkeypatch.setattr(
            combine_module,
            "_sum_ranks",
            lambda plan, p, n, wire, out, exact: real(plan, p, n, torch.float32, out, exact),
        )
    elif bug == "experts in the wrong order":
        monkeypatch.setattr(
            ref.World,
            "experts_of",
            lambda self, rank: [e for e, r in enumerate(self.rank_of_expert) if r == rank][::-1],
        )


@pytest.mark.parametrize(
    "bug",
    [
        "kept set one too small",
        "padding not aligned",
        "sums not rounded to the wire",
        "experts in the wrong order",
    ],
)
def test_a_broken_oracle_is_noticed(monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    plant(monkeypatch, bug)
    noticed = 0
    for seed in range(60):
        for check in (lambda s: test_dispatch(s), lambda s: test_combine_and_both_backwards(s, True)):
            try:
                check(seed)
            except (AssertionError, ValueError, IndexError, RuntimeError):
                noticed += 1
    assert noticed
