"""The traffic patterns of the dispatchers over collectives, and the table of all patterns. Rows, bytes and memory are
tested against the counters and plans of the dispatchers."""

from __future__ import annotations

from collections.abc import Callable

from flexep._native.plan import HEADER_INTS
from flexep.planning.crossings import direct, to_everyone
from flexep.planning.movement import Buffer, Movement, Pass, Pattern, Scene
from flexep.planning.one_sided import deepep, hybridep


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
        metadata_formula=f"to each peer {HEADER_INTS} ints, then most x (K expert ids + K weights) x 4 B",
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
        metadata_formula=f"to each peer 4 ({HEADER_INTS} + E + R) B, and 4 (1 + 2K) B a row",
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


PATTERNS: dict[str, Callable[[Scene], Pattern]] = {
    "allgather": allgather,
    "alltoall": alltoall,
    "deepep": deepep,
    "hybridep": hybridep,
}
