"""What must have crossed between ranks: rows by message, from the oracle's plan."""

from __future__ import annotations

import flexep
from flexep.testing.case import Case
from flexep.testing.inputs import rank_tokens
from flexep.testing.oracle import Oracle

Counted = dict[str, tuple[int, int]]  # message -> (remote rows, remote bytes)


def snapshot(ep: flexep.Dispatcher) -> Counted:
    """The dispatcher's counters now."""
    return {op: (t.remote_rows, t.remote_bytes) for op, t in ep.traffic.items()}


def expected_rows(case: Case, oracle: Oracle, step: int, ranks: list[int]) -> Counted:
    """Remote rows and bytes of rows that `ranks` send in one use of a plan: forward, and the two backwards
    alike.

    alltoall: one crossing per (token, destination rank) in exact mode, fixed splits with a capacity.
    allgather: every token (padded to the most on any rank) to every peer, partial rows likewise.
    """
    world, plan = oracle.world, oracle.plan(step)
    peers, out, home = case.ranks - 1, 0, 0
    if case.dispatcher == "allgather":
        most = world.max_tokens if world.capacity_rows is not None else max(rank_tokens(case))
        block = max(p.num_recv for p in plan.ranks) if world.flat_rows is None else world.flat_rows
        out, home = len(ranks) * most * peers, len(ranks) * block * peers
    elif world.capacity_rows is not None:
        out = home = len(ranks) * min(world.max_tokens, world.capacity_rows) * peers
    else:
        crossing = [(plan.token_row[s] >= 0).sum(0).tolist() for s in range(case.ranks)]
        out = sum(crossing[s][r] for s in ranks for r in range(case.ranks) if r != s)
        home = sum(crossing[s][r] for r in ranks for s in range(case.ranks) if r != s)
    row, partial = world.hidden * world.dtype.itemsize, world.hidden * world.wire.itemsize
    return {
        "dispatch.rows": (out, out * row),
        "combine.rows": (home, home * partial),
        "combine_backward.rows": (out, out * row),
        "dispatch_backward.rows": (home, home * row),
    }


def wrong_traffic(before: Counted, after: Counted, want: Counted) -> str | None:
    """How the counters' growth differs from `want`; None when it does not."""
    wrong = []
    for op, expected in want.items():
        start, end = before.get(op, (0, 0)), after.get(op, (0, 0))
        got = (end[0] - start[0], end[1] - start[1])
        if got != expected:
            wrong.append(f"{op}: (rows, bytes) sent to other ranks {got}, want {expected}")
    return "; ".join(wrong) or None
