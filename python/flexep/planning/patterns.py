"""The traffic patterns of the dispatchers. What a dispatcher of this build does is tested against its counters;
the others are predicted patterns, no more than that."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flexep.dispatchers._agree import HEADER_INTS
from flexep.planning.crossings import Crossings, by_rail, direct, to_everyone
from flexep.planning.movement import Buffer, Movement, Pass, Pattern, Scene


def allgather(scene: Scene) -> Pattern:
    """Every token to every peer; every partial sum to every peer."""
    R, K, T = scene.R, scene.K, scene.work.config.max_tokens
    most = float(T) if scene.static else float(scene.T_R.max())
    received_R = scene.every(scene.flat_static) if scene.static else scene.received_R
    block = float(received_R.max())
    tokens, parts = scene.every(most), scene.every(block)
    keep = Pass("expand", 2 * received_R * scene.wire, "read and write the flat rows that are this rank's")
    # Each rank plans for every source, and nothing but expert ids and weights travels.
    ints = R * most * K * 9 + 2 * R * scene.E + received_R * (2 * K + 1) + scene.load.rows_R
    dispatch = Movement(
        rows=to_everyone(scene.topology, tokens),
        row_bytes=scene.wire,
        metadata=to_everyone(scene.topology, scene.every(4 * HEADER_INTS) + tokens * 8 * K),
        passes=[
            *scene.cast(),
            Pass("staging", 2 * tokens * scene.wire, "read and write the own block of the gathered tokens"),
            keep if scene.flat else scene.expand(received_R),
        ],
        hand_shakes=4,
        fused=False,
        rows_formula="most tokens of any rank, to each of R - 1 peers",
        metadata_formula="to each peer 4 ints, then most x (K expert ids + K weights) x 4 B",
        plan_R=4 * ints,
        plan_formula="4 B x (9 R most K + 2 RE + received (2K + 1) + expert-major rows): plans every source",
    )
    combine = Movement(
        rows=to_everyone(scene.topology, parts),
        row_bytes=scene.home,
        metadata=to_everyone(scene.topology, scene.every(0)),
        passes=[
            *([] if scene.flat else [scene.expert_reduce(received_R)]),
            Pass("staging", 2 * parts * scene.home, "read and write the own block of gathered partial sums"),
            scene.final_reduce(),
        ],
        hand_shakes=1,
        fused=False,
        rows_formula="most partial sums of any rank (distinct received tokens), to each of R - 1 peers",
        metadata_formula="none",
    )
    parts_worst = R * (R * T if not scene.static else scene.flat_static)
    memory = [
        Buffer("gathered tokens", "staging", R * most * scene.wire, R * T * scene.wire),
        Buffer("gathered partial rows", "staging", R * block * scene.home, parts_worst * scene.home),
        Buffer("metadata", "staging", R * most * 8 * K, R * T * 8 * K),
        *scene.results(scene.flat_static if scene.static else R * T),
    ]
    return Pattern(dispatch, combine, memory)


def alltoall(scene: Scene) -> Pattern:
    """One crossing per (token, destination rank); with a capacity, fixed splits to every peer."""
    R, T = scene.R, scene.work.config.max_tokens
    split = min(T, scene.capacity) if scene.capacity is not None else None
    if split is None:
        rows, sent_R, received_R = (
            direct(scene.topology, scene.load.crossing_RR),
            scene.sent_R,
            scene.received_R,
        )
        said = "distinct (token, destination rank) pairs, own rank not counted"
    else:
        rows, sent_R = to_everyone(scene.topology, scene.every(split)), scene.every(R * split)
        received_R, said = sent_R, "fixed split of min(max_tokens, capacity rows) to each of R - 1 peers"
    header = to_everyone(scene.topology, scene.every(4 * (HEADER_INTS + scene.E + R)))
    plan_R, plan_formula = scene.plan_of_own(received_R)
    moved: list[Pass] = []
    if not scene.flat:
        moved = [scene.expand(received_R)]
    elif split is not None:
        both = 2 * scene.every(scene.flat_static)
        moved = [Pass("expand", both * scene.wire, "read and write the flat rows: gaps of the splits closed")]
    dispatch = Movement(
        rows=rows,
        row_bytes=scene.wire,
        metadata=header.plus(rows.times(scene.slot_meta)),
        passes=[
            *scene.cast(),
            Pass("staging", 2 * sent_R * scene.wire, "read and write every sent row, own rank's included"),
            *moved,
        ],
        hand_shakes=3,
        fused=False,
        rows_formula=said,
        metadata_formula="to each peer 4 (4 + E + R) B, and 4 (1 + 2K) B a row",
        plan_R=plan_R,
        plan_formula=plan_formula,
    )
    home: list[Pass] = []
    if not scene.flat:
        home = [scene.expert_reduce(received_R)]
    elif split is not None:
        both = (scene.every(scene.flat_static) + received_R) * scene.home
        home = [Pass("expert reduce", both, "read the flat rows, write them with the gaps of the splits")]
    combine = Movement(
        rows=rows.reversed(),
        row_bytes=scene.home,
        metadata=rows.times(0),
        passes=[*home, scene.final_reduce()],
        hand_shakes=1,
        fused=False,
        rows_formula="the same rows on their way back",
        metadata_formula="none",
    )
    worst, wide = R * (T if split is None else split), max(scene.wire, scene.home)
    memory = [
        Buffer("send rows", "staging", float(sent_R.max()) * wide, worst * wide),
        Buffer("received rows", "staging", float(received_R.max()) * wide, worst * wide),
        Buffer(
            "metadata",
            "staging",
            float((sent_R + received_R).max()) * scene.slot_meta,
            2 * worst * scene.slot_meta,
        ),
        *scene.results(scene.flat_static if scene.static else R * T),
    ]
    return Pattern(dispatch, combine, memory)


def deepep(scene: Scene) -> Pattern:
    """One-sided, straight to each destination rank: one crossing per (token, destination rank)."""
    rows = direct(scene.topology, scene.load.crossing_RR)
    ints = scene.every(4 * (scene.E + scene.R))
    metadata = to_everyone(scene.topology, ints).plus(rows.times(scene.slot_meta))
    said = "to each peer 4 (E + R) B, and 4 (1 + 2K) B a row"
    return _one_sided(scene, rows, metadata, ("distinct (token, destination rank) pairs", said), 0, None)


def hybridep(scene: Scene) -> Pattern:
    """One rail crossing per (token, remote domain), then one link crossing per destination of that domain."""
    if scene.topology.domains == 1:
        return deepep(scene)
    rows = by_rail(scene.topology, scene.load.crossing_RR, scene.load.crossing_RD)
    ints = scene.every(4 * (scene.E + scene.R + scene.topology.domains))
    rail_meta = 4 * (1 + 3 * scene.K)  # also the destination rank of each slot
    metadata = to_everyone(scene.topology, ints).plus(rows.times(scene.slot_meta, rail_meta))
    said = "to each peer 4 (E + R + D) B; a row 4 (1 + 2K) B on the link, 4 (1 + 3K) B on the rail"
    words = "rail: distinct (token, remote domain) pairs; link: distinct (token, rank) pairs, from the relay"
    relayed_R = scene.load.crossing_RR.view(scene.topology.domains, scene.S, -1)
    return _one_sided(scene, rows, metadata, (words, said), 1, _relay_reads(scene, relayed_R))


def _relay_reads(scene: Scene, rows_DSR: torch.Tensor) -> torch.Tensor:
    """Partial sums [R] that each relay adds for tokens of other domains, its own rank's included."""
    D, S = scene.topology.domains, scene.S
    by_domain = rows_DSR.view(D, S, D, S).sum(3)  # [source domain, index, destination domain]
    own = by_domain.diagonal(dim1=0, dim2=2).T  # tokens of the domain itself go straight home
    return (by_domain.sum(0).T - own).reshape(-1)


def _one_sided(
    scene: Scene,
    rows: Crossings,
    metadata: Crossings,
    words: tuple[str, str],
    hops: int,
    relay_R: torch.Tensor | None,
) -> Pattern:
    """Movers that expand, reduce and cast on the way, so that passes and wires overlap."""
    wire, home, T = scene.wire, scene.home, scene.work.config.max_tokens
    plan_R, plan_formula = scene.plan_of_own(scene.received_R)
    place = "read every sent row, write every received row, own rank's included"
    out = [
        Pass("staging", (scene.sent_R + scene.received_R) * wire, place)
        if scene.flat
        else scene.expand(scene.received_R)
    ]
    back = [] if scene.flat else [scene.expert_reduce(scene.received_R)]
    final = scene.final_reduce()
    window = [Buffer("x to pull from", "window", float(scene.T_R.max()) * wire, T * wire)]
    most, worst = float(scene.received_R.max()), scene.R * T
    window.append(Buffer("partial sums to pull from", "window", most * home, worst * home))
    if relay_R is not None:
        forward = "write every row that came over the rail, read it to forward it"
        out.insert(0, Pass("relay", 2 * rows.rail_recv * wire, forward))
        added = "read the partial sums of the domain for tokens of others, write one row a token"
        back.append(Pass("relay", (relay_R + rows.rail_recv) * home, added))
        read_R = _own_domain(scene) + rows.rail_send + scene.T_R
        said = "(own domain's partial sums + one row a remote domain + T) x home row"
        final = Pass("final reduce", read_R * home, said)
        relayed = float(rows.rail_recv.max())
        bound = (scene.topology.domains - 1) * T
        window.append(Buffer("relayed rows", "window", relayed * wire, bound * wire))
        window.append(Buffer("domain sums", "window", relayed * home, bound * home))
    dispatch = Movement(
        rows, wire, metadata, out, 2 + hops, True, *words, plan_R=plan_R, plan_formula=plan_formula
    )
    combine = Movement(
        rows.reversed(), home, rows.times(0), [*back, final], 1 + hops, True,
        "the same rows on their way back", "none",
    )  # fmt: skip
    return Pattern(dispatch, combine, [*window, *scene.results(scene.flat_static if scene.static else worst)])


def _own_domain(scene: Scene) -> torch.Tensor:
    """Partial sums [R] that come home from the own domain, own rank included."""
    inside = direct(scene.topology, scene.load.crossing_RR).link_send
    return inside + scene.load.crossing_RR.diagonal()


PATTERNS: dict[str, Callable[[Scene], Pattern]] = {
    "allgather": allgather,
    "alltoall": alltoall,
    "deepep": deepep,
    "hybridep": hybridep,
}
