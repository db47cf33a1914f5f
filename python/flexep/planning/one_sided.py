"""The traffic patterns of one-sided dispatchers, whose movers expand, reduce and cast while rows move."""

from __future__ import annotations

import torch

from flexep._native.plan import HEADER_INTS
from flexep.dispatchers._record_sizes import metadata_bytes
from flexep.dispatchers._window_shape import window_shape
from flexep.planning.crossings import Crossings, by_rail, direct, to_everyone
from flexep.planning.movement import Buffer, Movement, Pass, Pattern, Scene


def deepep(scene: Scene) -> Pattern:
    """Straight to each destination rank: one crossing per (token, destination rank)."""
    again = scene.load.dropped > 0  # ranks tell what they kept
    rows = direct(scene.topology, scene.load.crossing_RR)
    metadata = _published(scene, 0, again).plus(rows.times(scene.slot_meta))
    out = [_stage(scene), _place(scene)]
    back = [] if scene.flat else [scene.expert_reduce(scene.received_R)]
    handshakes = 3 + again  # header, counts of kept rows, metadata, rows
    dispatch = _dispatch(
        scene, rows, metadata, out, handshakes,
        "distinct (token, destination rank) pairs, own rank not counted",
        f"{_said(scene, again)}, and 4 (1 + 2K) B a row",
    )  # fmt: skip
    combine = _combine(scene, rows, [*back, scene.final_reduce()], 1)
    return Pattern(dispatch, combine, _memory(scene, scene.R))


def hybridep(scene: Scene) -> Pattern:
    """One rail crossing per (token, remote domain), then one link crossing per destination of that domain."""
    if scene.topology.domains == 1:
        return deepep(scene)
    rows = by_rail(scene.topology, scene.load.crossing_RR, scene.load.crossing_RD)
    rail_meta = 4 * (1 + 3 * scene.K)  # also the index in the domain of each slot
    metadata = _published(scene, scene.topology.domains, scene.static).plus(
        rows.times(scene.slot_meta, rail_meta)
    )
    forward = "write every row that came over the rail, read it to forward it"
    out = [Pass("relay", 2 * rows.rail_recv * scene.wire, forward), _stage(scene), _place(scene)]
    back = [] if scene.flat else [scene.expert_reduce(scene.received_R)]
    added = "read the partial sums of the domain for tokens of others, write one row a token"
    back.append(Pass("relay", (_relay_reads(scene) + rows.rail_recv) * scene.home, added))
    final = "(own domain's partial sums + one row a remote domain + T) x home row"
    back.append(Pass("final reduce", (_own_domain(scene) + rows.rail_send + scene.T_R) * scene.home, final))
    handshakes = 5 + scene.static  # header, counts of kept rows, two hops of metadata, two of rows
    dispatch = _dispatch(
        scene, rows, metadata, out, handshakes,
        "rail: distinct (token, remote domain) pairs; link: distinct (token, rank) pairs, from the relay",
        f"{_said(scene, scene.static)} and {'8' if scene.static else '4'} D B; a row 4 (1 + 2K) B on the link, "
        "4 (1 + 3K) B on the rail",
    )  # fmt: skip
    return Pattern(dispatch, _combine(scene, rows, back, 2), _memory(scene, scene.S))


def _published(scene: Scene, more: int, again: bool) -> Crossings:
    """Integers that every rank tells every other before rows move, in bytes: the header; `again` the kept rows for each
    rank; each time `more` for rails."""
    ints = HEADER_INTS + scene.E + scene.R + more + (scene.R + more if again else 0)
    return to_everyone(scene.topology, scene.every(4 * ints))


def _said(scene: Scene, again: bool) -> str:
    return f"to each peer 4 ({HEADER_INTS} + E + {'2R' if again else 'R'}) B"


def _stage(scene: Scene) -> Pass:
    return Pass(
        "staging", 2 * scene.T_R * scene.wire, "read x, write it into the window (zero copy saves both)"
    )


def _place(scene: Scene) -> Pass:
    """Received rows to where the experts want them."""
    if not scene.flat:
        return scene.expand(scene.received_R)
    return Pass(
        "expand", 2 * scene.received_R * scene.wire, "read and write every received row, own rank's included"
    )


def _dispatch(
    scene: Scene,
    rows: Crossings,
    metadata: Crossings,
    passes: list[Pass],
    handshakes: int,
    words: str,
    said: str,
) -> Movement:
    plan_R, plan_formula = scene.plan_of_own(scene.received_R)
    return Movement(
        rows,
        scene.wire,
        metadata,
        passes,
        handshakes,
        True,
        words,
        said,
        plan_R=plan_R,
        plan_formula=plan_formula,
    )


def _combine(scene: Scene, rows: Crossings, passes: list[Pass], hops: int) -> Movement:
    back = "the same rows on their way back"
    return Movement(rows.reversed(), scene.home, rows.times(0), passes, hops, True, back, "none")


def _memory(scene: Scene, hop_size: int) -> list[Buffer]:
    """One window, whatever the routing: its rings have a budget. Metadata as the dispatcher plans it."""
    config, R = scene.work.config, scene.R
    window = float(window_shape(config, hop_size).nbytes)
    if hop_size == R:
        here_R = (scene.sent_R + scene.received_R) * scene.slot_meta
    else:
        railed_R = scene.load.crossing_RD.sum(1) + _relayed(scene, scene.load.crossing_RD)
        handed_R = _relayed(scene, scene.load.crossing_RR.view(R, -1, scene.S).sum(2))
        here_R = railed_R * 4 * (1 + 3 * scene.K) + (handed_R + scene.received_R) * scene.slot_meta
    return [
        Buffer("window", "window", window, window),
        Buffer("metadata", "staging", float(here_R.max()), metadata_bytes(config, hop_size)),
        *scene.results(scene.flat_static if scene.static else R * config.max_tokens),
    ]


def _relayed(scene: Scene, count_RD: torch.Tensor) -> torch.Tensor:
    """Counts [R, D] of each source and destination domain, added up at the relays [R] of that domain."""
    return count_RD.view(scene.topology.domains, scene.S, -1).sum(0).T.reshape(-1)


def _relay_reads(scene: Scene) -> torch.Tensor:
    """Partial sums [R] that each relay adds for tokens of other domains, its own rank's included."""
    D, S = scene.topology.domains, scene.S
    by_domain = scene.load.crossing_RR.view(D, S, D, S).sum(3)  # [source domain, index, destination domain]
    own = by_domain.diagonal(dim1=0, dim2=2).T  # tokens of the domain itself go straight home
    return (by_domain.sum(0).T - own).reshape(-1)


def _own_domain(scene: Scene) -> torch.Tensor:
    """Partial sums [R] that come home from the own domain, own rank included."""
    inside = direct(scene.topology, scene.load.crossing_RR).link_send
    return inside + scene.load.crossing_RR.diagonal()
