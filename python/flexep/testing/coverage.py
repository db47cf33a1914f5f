"""Which rows of the conformance list a run of cases has covered, and which it has not, and why.

Two axes that the list does not number have rows of their own: domains and window."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from flexep.testing.case import Case


@dataclass(frozen=True)
class Requirement:
    """A row of the conformance list. `covers` says whether a case exercises it, `rest` what it leaves out."""

    title: str
    covers: Callable[[Case], bool]
    rest: str = ""


def _always(case: Case) -> bool:
    return True


def _never(case: Case) -> bool:
    return False


ROWS: dict[int | str, Requirement] = {
    1: Requirement("dispatch and combine bitwise equal to the oracle, within tolerance of fp64", _always,
                   "fp8 wires are not built yet"),
    2: Requirement("token counts, hidden sizes, top-k, experts, ranks", _always,
                   "of the ranks, only the number asked for"),
    3: Requirement("routings: uniform to W7", _always),
    4: Requirement("experts that cannot be confused", _always),
    5: Requirement("weights inside the expert, at combine, nowhere", lambda c: c.weights != "none"),
    6: Requirement("gradients of x and of the weights, empty ranks included", _always),
    7: Requirement("cached handle with new data, its tensors unchanged", lambda c: c.cached > 0,
                   "3 uses a handle here, 100 in the test suite"),
    8: Requirement("equal bits in repeated runs and on every dispatcher", _always,
                   "SM counts wait for kernels on the GPU"),
    9: Requirement("alignments, real and padded counts", lambda c: c.alignment > 1),
    10: Requirement("capacity full, one over, far over; guard bands; drop set; flag by name",
                    lambda c: c.capacity != "none"),
    11: Requirement("graph capture and replay", _never, "waits for the issue that builds it"),
    12: Requirement("streams, caching allocator", _never, "waits for the issue that builds it"),
    13: Requirement("two operations in flight", _never, "not here: the test suite overlaps them"),
    14: Requirement("late, dead and disagreeing ranks", _never,
                    "not here: the test suite refuses, delays and kills ranks"),
    15: Requirement("create and destroy", _never, "not here: the test suite rebuilds dispatchers"),
    16: Requirement("NaN and Inf stay with the tokens that chose them", lambda c: c.payload == "nonfinite"),
    17: Requirement("scale layouts of fp8", _never, "fp8 wires are not built yet"),
    18: Requirement("planted bugs make the check fail", _never,
                    "not here: it would break the installation; the test suite plants them"),
    19: Requirement("traffic counted in the transport: a crossing a (token, rank), over rails a (token, domain)",
                    lambda c: c.ranks > 1, "one rank has nobody to send to"),
    "domains": Requirement("sums nested by domain, and hybridep's two hops",
                           lambda c: c.domain_size is not None and c.domain_size < c.ranks,
                           "only shapes of the number of ranks asked for"),
    "window": Requirement("windows of a tenth of the worst case, of one token a chunk, of rows sent ahead",
                          lambda c: c.window != "default", "of deepep and hybridep alone"),
}  # fmt: skip


def coverage(cases: Iterable[Case]) -> dict[str, dict[str, Any]]:
    """{row: {title, cases, rest}} for every row; `rest` says what of the row these cases leave out, or why
    all."""
    done = list(cases)
    return {
        str(number): {"title": row.title, "cases": sum(map(row.covers, done)), "rest": row.rest}
        for number, row in ROWS.items()
    }
