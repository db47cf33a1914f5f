"""The machine as the model sees it: ranks in domains, and four figures."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields
from typing import NamedTuple

from flexep.errors import ArgumentError


class Rate(NamedTuple):
    """A figure's default, its unit, and where the default comes from."""

    default: float
    unit: str
    source: str


RATES = {
    "link_gbs": Rate(
        370,
        "GB/s a rank, each direction",
        "measured on two H200s over NVLink: rows of 14,336 B pushed both ways by 64 to 132 SMs, 368 to 372",
    ),
    "rail_gbs": Rate(45, "GB/s a rank, each direction", "assumed: a 400 Gb/s network card a rank, at 90 %"),
    "hbm_gbs": Rate(
        4300, "GB/s, read and written together", "a little above the 4,200 measured for a copy on one H200"
    ),
    "latency_us": Rate(1.8, "us a hand-shake", "measured on two H200s: flag there and back over NVLink"),
}
PRESETS = {"nvl8": (8, 8), "nvl72": (72, 72)}  # name -> ranks, ranks a domain


@dataclass(frozen=True, kw_only=True)
class Topology:
    """R = `ranks` in domains of `domain_size` consecutive ranks; GB are 1e9 bytes.

    Raises ArgumentError: no rank, a domain size that does not divide them, a rate that is not positive.
    """

    ranks: int
    domain_size: int
    link_gbs: float = RATES["link_gbs"].default
    rail_gbs: float = RATES["rail_gbs"].default
    hbm_gbs: float = RATES["hbm_gbs"].default
    latency_us: float = RATES["latency_us"].default

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ArgumentError("ranks", self.ranks, "at least 1")
        if self.domain_size < 1 or self.ranks % self.domain_size:
            raise ArgumentError("domain_size", self.domain_size, f"a divisor of the {self.ranks} ranks")
        for name in RATES:
            if not 0 < getattr(self, name) < math.inf:
                raise ArgumentError(name, getattr(self, name), "a positive number")

    @property
    def domains(self) -> int:
        """D: domains."""
        return self.ranks // self.domain_size

    def source(self, rate: str) -> str:
        """The figure with its unit and where it comes from."""
        value = getattr(self, rate)
        origin = RATES[rate].source if value == RATES[rate].default else "given"
        return f"{rate} = {value:g} {RATES[rate].unit} ({origin})"

    def as_dict(self) -> dict[str, float]:
        """Every field, for JSON."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


def parse_topology(text: str) -> tuple[int, int]:
    """(ranks, ranks a domain) of a preset or of "AxB": A domains of B ranks. ArgumentError otherwise."""
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    match = re.fullmatch(r"(\d+)x(\d+)", text)
    if match is None or "0" in (match[1].lstrip("0") or "0", match[2].lstrip("0") or "0"):
        raise ArgumentError("topology", text, f"{', '.join(PRESETS)}, or AxB for A domains of B ranks")
    domains, size = int(match[1]), int(match[2])
    return domains * size, size
