"""What must have crossed between ranks: rows by message, from the oracle's plan."""

from __future__ import annotations

import torch

import flexep
from flexep.testing.case import Case
from flexep.testing.inputs import rank_tokens
from flexep.testing.oracle import Oracle
from flexep.testing.windows import sends_ahead

Counted = dict[str, tuple[int, int, int]]  # message -> (remote rows, remote bytes, rows over rails)


def snapshot(ep: flexep.Dispatcher) -> Counted:
    """The dispatcher's counters now."""
    return {op: (t.remote_rows, t.remote_bytes, t.rail_rows) for op, t in ep.traffic.items()}


def expected_rows(case: Case, oracle: Oracle, step: int, ranks: list[int]) -> Counted:
    """Remote rows and bytes of rows that `ranks` move in one use of a plan: forward, and the two backwards
    alike.

    deepep: one crossing per (token, destination rank), counted at the destination on the way out. Where rows are sent
    ahead every token goes to every peer, counted at its source.
    hybridep over domains: one rail crossing per (token, remote domain), and the hops inside domains.
    alltoall: one crossing per (token, destination rank) in exact mode, fixed splits with a capacity.
    allgather: every token (padded to the most on any rank) to every peer, partial rows likewise.
    """
    world, plan = oracle.world, oracle.plan(step)
    peers, out, home, rail = case.ranks - 1, 0, 0, 0
    holds = [plan.token_row[s] >= 0 for s in range(case.ranks)]  # [T, R]: kept rows of the token there
    if case.dispatcher == "allgather":
        most = world.max_tokens if world.capacity_rows is not None else max(rank_tokens(case))
        block = max(p.num_recv for p in plan.ranks) if world.flat_rows is None else world.flat_rows
        out, home = len(ranks) * most * peers, len(ranks) * block * peers
    elif case.dispatcher in ("deepep", "hybridep"):
        size = case.ranks
        if case.dispatcher == "hybridep" and case.domain_size is not None:
            size = case.domain_size
        out, rail = _moved(holds, size, ranks)
        home = out  # the same crossings, each made by the rank that made it on the way out
        if sends_ahead(case):
            out = sum(rank_tokens(case)[r] for r in ranks) * peers
    elif world.capacity_rows is not None:
        out = home = len(ranks) * min(world.max_tokens, world.capacity_rows) * peers
    else:
        crossing = [held.sum(0).tolist() for held in holds]
        out = sum(crossing[s][r] for s in ranks for r in range(case.ranks) if r != s)
        home = sum(crossing[s][r] for r in ranks for s in range(case.ranks) if r != s)
    row, partial = world.hidden * world.dtype.itemsize, world.hidden * world.wire.itemsize
    return {
        "dispatch.rows": (out, out * row, rail),
        "combine.rows": (home, home * partial, rail),
        "combine_backward.rows": (out, out * row, rail),
        "dispatch_backward.rows": (home, home * row, rail),
    }


def _moved(holds: list[torch.Tensor], size: int, ranks: list[int]) -> tuple[int, int]:
    """(rows, those over a rail) that `ranks` move between ranks one way, with hops of `size` ranks.

    A row of source s reaches a domain at its relay, the rank there with s's index: over the rail unless it is s itself.
    From there it reaches every other rank of the domain that holds a slot.
    """
    rows = rail = 0
    for r in ranks:
        domain = r // size
        for s, held in enumerate(holds):
            relay = domain * size + s % size
            if r == relay and r != s:
                crossed = int(held[:, domain * size : (domain + 1) * size].any(1).sum())
                rows, rail = rows + crossed, rail + (crossed if size < held.shape[1] else 0)
            if r != relay:
                rows += int(held[:, r].sum())
    return rows, rail


def wrong_traffic(before: Counted, after: Counted, want: Counted) -> str | None:
    """How the counters' growth differs from `want`; None when it does not."""
    wrong = []
    for op, expected in want.items():
        start, end = before.get(op, (0, 0, 0)), after.get(op, (0, 0, 0))
        got = tuple(e - s for s, e in zip(start, end, strict=True))
        if got != expected:
            wrong.append(f"{op}: (rows, bytes, rail rows) to other ranks {got}, want {expected}")
    return "; ".join(wrong) or None
