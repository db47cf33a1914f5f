"""Window budgets of a case: the bytes that the rings of one-sided dispatchers need, worked out apart from them."""

from __future__ import annotations

from flexep.ref import World
from flexep.testing.case import Case

SLOTS = 2  # chunks of a ring


def window_bytes(case: Case, world: World) -> int | None:
    """`window_bytes` of the case's dispatcher; None is its default."""
    if case.window == "default":
        return None
    pull, push = ring_bytes_of_a_token(case, world)
    least = 2 * max(pull, push)  # half of a budget is for either kind of ring
    return least if case.window == "least" else max(least, worst_case(case, world) // 10)


def sends_ahead(case: Case) -> bool:
    """Whether every row goes to every peer: not over relays, which have none of those windows."""
    over_relays = case.dispatcher == "hybridep" and case.domain_size not in (None, case.ranks)
    return case.window == "ahead" and case.dispatcher in ("deepep", "hybridep") and not over_relays


def worst_case(case: Case, world: World) -> int:
    """Bytes of rings that hold all of `max_tokens` in one chunk."""
    return max(1, world.max_tokens) * sum(ring_bytes_of_a_token(case, world))


def ring_bytes_of_a_token(case: Case, world: World) -> tuple[int, int]:
    """(pull, push): bytes of all rings of a kind for one token a chunk.

    Rows are pulled out of one ring of a rank's own, and one for each domain that it relays for. Partial sums are
    pushed into one ring for each rank, and one for each domain that relays.
    """
    domains = 1
    if case.dispatcher == "hybridep" and case.domain_size is not None:
        domains = case.ranks // case.domain_size
    relayed = domains if domains > 1 else 0
    row = world.hidden * world.dtype.itemsize
    partial = world.hidden * max(world.dtype.itemsize, world.wire.itemsize)
    return SLOTS * (1 + relayed) * row, SLOTS * (case.ranks + relayed) * partial
