"""Movements into microseconds, term by term; every term names its formula and its figure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from flexep.planning.movement import Movement
from flexep.planning.topology import Topology


@dataclass(frozen=True)
class Term:
    """A lower bound in microseconds on the rank that needs longest. `bytes`: there; None for latency."""

    name: str
    us: float
    bytes: float | None
    rank: int | None
    formula: str
    source: str


@dataclass(frozen=True)
class Remote:
    """Bytes that leave a rank, metadata included: the largest of any rank, the mean, and all ranks together."""

    max: float
    mean: float
    total: float


@dataclass(frozen=True)
class Operation:
    """One dispatch or combine. `total_us` adds `terms` as `rule` says."""

    remote: Remote
    link: Remote
    rail: Remote
    rows: Remote
    metadata: Remote
    remote_rows: float
    terms: list[Term]
    rule: str
    total_us: float

    def as_dict(self) -> dict[str, Any]:
        """For JSON: remote_bytes and time by term."""
        return {
            "remote_bytes": {name: asdict(getattr(self, name)) for name in REMOTES},
            "remote_rows_total": self.remote_rows,
            "terms": [asdict(term) for term in self.terms],
            "rule": self.rule,
            "total_us": self.total_us,
        }

    def us(self, name: str) -> float:
        """Microseconds of a term, 0 where the operation has none of that name."""
        return sum(term.us for term in self.terms if term.name == name)


REMOTES = ("remote", "link", "rail", "rows", "metadata")
ONE_AFTER_ANOTHER = "max(link, rail) + metadata + every pass + latency + plan: passes follow one another"
OVERLAPPED = "max(link, rail, each with its metadata; all passes) + latency + plan: wires and passes overlap"


def price(move: Movement, topology: Topology) -> Operation:
    """Time and bytes of one movement on a topology."""
    rows = move.rows.times(move.row_bytes)
    both = rows.plus(move.metadata)
    link, rail, hbm = topology.link_gbs, topology.rail_gbs, topology.hbm_gbs
    said = {name: topology.source(name) for name in ("link_gbs", "rail_gbs", "hbm_gbs", "latency_us")}
    busiest = " x row bytes / rate, busier of both directions"
    link_words, rail_words = f"rows inside a domain{busiest}", f"rows between domains{busiest}"
    terms = [
        _term("link", rows.link_busiest, link, f"{link_words}; rows: {move.rows_formula}", said["link_gbs"]),
        _term("rail", rows.rail_busiest, rail, f"{rail_words}; rows: {move.rows_formula}", said["rail_gbs"]),
    ]
    on_rail = move.metadata.rail_busiest.max() / rail > move.metadata.link_busiest.max() / link
    meta_bytes, meta_rate, meta_said = (
        (move.metadata.rail_busiest, rail, said["rail_gbs"])
        if on_rail
        else (move.metadata.link_busiest, link, said["link_gbs"])
    )
    terms.append(_term("metadata", meta_bytes, meta_rate, f"{move.metadata_formula} / rate", meta_said))
    terms += [_term(p.name, p.bytes_R, hbm, f"{p.formula} / rate", said["hbm_gbs"]) for p in move.passes]
    waits = f"messages that wait for each other ({move.hand_shakes}) x latency; launches and host not counted"
    terms.append(
        Term("latency", move.hand_shakes * topology.latency_us, None, None, waits, said["latency_us"])
    )
    if move.plan_R is not None:
        words = f"{move.plan_formula} / rate, every integer array once; launches and host not counted"
        terms.append(_term("plan", move.plan_R, hbm, words, said["hbm_gbs"]))
    us = {term.name: term.us for term in terms}
    passes = sum(us[p.name] for p in move.passes)
    if move.fused:
        wires = max(_us(both.link_busiest, link), _us(both.rail_busiest, rail))
        total = max(wires, passes)
    else:
        total = max(us["link"], us["rail"]) + us["metadata"] + passes
    return Operation(
        remote=_remote(both.sent),
        link=_remote(both.link_send),
        rail=_remote(both.rail_send),
        rows=_remote(rows.sent),
        metadata=_remote(move.metadata.sent),
        remote_rows=float(move.rows.sent.sum()),
        terms=terms,
        rule=OVERLAPPED if move.fused else ONE_AFTER_ANOTHER,
        total_us=total + us["latency"] + us.get("plan", 0.0),
    )


def term_names(operations: Sequence[Operation]) -> list[str]:
    """Names of all terms that take time, in the order in which they first appear."""
    return list(dict.fromkeys(t.name for op in operations for t in op.terms if t.us > 0))


def _term(name: str, bytes_R: torch.Tensor, gbs: float, formula: str, source: str) -> Term:
    rank = int(bytes_R.argmax())
    return Term(name, _us(bytes_R, gbs), float(bytes_R[rank]), rank, formula, source)


def _us(bytes_R: torch.Tensor, gbs: float) -> float:
    return float(bytes_R.max()) / (gbs * 1e3)


def _remote(bytes_R: torch.Tensor) -> Remote:
    return Remote(float(bytes_R.max()), float(bytes_R.mean()), float(bytes_R.sum()))
