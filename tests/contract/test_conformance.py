"""The contract: every dispatcher, on processes and in a local group, equals the oracle to the bit.

Cases are a covering array over all axes of the conformance list, world sizes, domains, window budgets and
transports included; every case runs on every dispatcher, and their results are compared with each other too.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch.distributed as dist

import flexep
from flexep.testing.axes import covering_cases, random_cases
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.testing.pool import RankPool
from flexep.testing.sweep import Failure, Sweep
from flexep.testing.worker import RankContext

DISPATCHERS = list(flexep.BACKENDS)
RANKS = (1, 2, 3, 4, 8)
SMALL = Case(ranks=2, experts=5, hidden=64, top_k=3, tokens=33, seed=3, spread="ragged", alignment=8)
# Ranks and ranks of a domain: 2x1, 2x2, 3x2, 1x8, 2x4 and 4x2 (domains x ranks).
SHAPES = ((2, 1), (4, 2), (6, 2), (8, 8), (8, 4), (8, 2))


def shaped(ranks: int, size: int | None, transport: str) -> list[Case]:
    """Cases of one shape of domains, with windows of every budget: more experts than ranks, a rank without one,
    dropped rows, every layout, a narrower partial sum."""
    case = replace(SMALL, ranks=ranks, experts=2 * ranks + 1, top_k=6, domain_size=size, transport=transport)
    return [
        replace(case, window="least", cached=1, combine_wire="fp16"),
        replace(case, window="tenth", layout="flat", weights="inside", capacity="far_over", placement="hole"),
        replace(case, layout="flat", y_layout="flat", weights="nowhere", empty=0.5, dtype="fp32"),
    ]


CASES = covering_cases(RANKS) + [
    case for shape in SHAPES for transport in ("process", "local") for case in shaped(*shape, transport)
]


def run(cases: list[Case]) -> list[Failure]:
    with Sweep(DISPATCHERS) as sweep:
        return [failure for _, failures in sweep.run(cases) for failure in failures]


def explain(failures: list[Failure]) -> str:
    """The first few failures with the command that shows each."""
    return "\n".join(
        "\n  ".join([f"flexep verify --case '{f.case.to_json()}'", *f.messages[:4]]) for f in failures[:5]
    )


@pytest.mark.parametrize("ranks", sorted({case.ranks for case in CASES}))
def test_on_processes(ranks: int) -> None:
    cases = [case for case in CASES if case.ranks == ranks and case.transport == "process"]
    assert cases
    failures = run(cases)
    assert not failures, explain(failures)


def test_in_a_local_group() -> None:
    failures = run([case for case in CASES if case.transport == "local"])
    assert not failures, explain(failures)


@pytest.mark.parametrize(("ranks", "count"), [(5, 8), (6, 8), (7, 8), (12, 8), (16, 8)])
def test_other_world_sizes_in_a_local_group(ranks: int, count: int) -> None:
    cases = [replace(case, transport="local") for case in random_cases(ranks, count, seed=ranks, limit=2**18)]
    failures = run(cases)
    assert not failures, explain(failures)


@pytest.mark.parametrize("size", [72, 8], ids=["1x72", "9x8"])
def test_72_ranks_in_one_process(size: int) -> None:
    failures = run([replace(case, tokens=9, cached=0) for case in shaped(72, size, "local")])
    assert not failures, explain(failures)


@pytest.mark.parametrize("transport", ["process", "local"])
def test_one_handle_a_hundred_times_and_twenty_runs(transport: str) -> None:
    failures = run(
        [
            replace(SMALL, cached=99, transport=transport),
            replace(SMALL, repeats=19, transport=transport),
            replace(
                SMALL, cached=20, layout="flat", capacity="one_over", weights="inside", transport=transport
            ),
        ]
    )
    assert not failures, explain(failures)


def from_a_store(ctx: RankContext, path: str) -> list[str]:
    group = flexep.Group.from_store(dist.FileStore(path, ctx.size), ctx.rank, ctx.size, generation=3)
    cases = [
        SMALL,
        replace(SMALL, capacity="far_over"),
        replace(SMALL, layout="flat", y_layout="flat", weights="inside"),
    ]
    found = [str(m) for case in cases for m in check_dispatchers(case, group, DISPATCHERS)]
    group.close()
    return found


def test_a_group_from_a_store(tmp_path) -> None:
    with RankPool(2) as pool:
        assert pool.run(from_a_store, str(tmp_path / "store")) == [[], []]


@pytest.mark.large
@pytest.mark.parametrize("seed", range(4))
def test_large(seed: int) -> None:
    cases = [case for case in covering_cases((2, 4), limit=2**29, seed=seed) if case.elements > 2**24]
    failures = run(cases)
    assert not failures, explain(failures)
