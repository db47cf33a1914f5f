"""One conformance case among ranks on one GPU, small enough for compute-sanitizer: `tools/sanitize_gpu.sh` runs it."""

from __future__ import annotations

import sys

import flexep
from flexep.config import WINDOWED
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers

CASES = (
    Case(
        ranks=4,
        experts=6,
        hidden=16,
        top_k=3,
        tokens=9,
        seed=3,
        spread="ragged",
        domain_size=2,
        transport="local",
    ),
    Case(
        ranks=3, experts=5, hidden=8, top_k=2, tokens=7, capacity="one_over", layout="flat", transport="local"
    ),
    Case(
        ranks=2, experts=4, hidden=24, top_k=2, tokens=5, weights="inside", window="least", transport="local"
    ),
    Case(ranks=3, experts=6, hidden=16, top_k=3, tokens=9, cached=1, window="ahead", transport="local"),
    # The kernels of a single rank on its GPU, with a capacity in one launch.
    Case(ranks=1, experts=5, hidden=16, top_k=2, tokens=70, capacity="one_over", transport="local"),
    Case(ranks=1, experts=5, hidden=16, top_k=2, tokens=7, layout="flat", transport="local"),
)

if __name__ == "__main__":
    found = [
        m
        for case in CASES
        for m in check_dispatchers(case, flexep.Group.local(case.ranks, "cuda"), list(WINDOWED))
    ]
    print(*found, sep="\n")
    sys.exit(1 if found else 0)
