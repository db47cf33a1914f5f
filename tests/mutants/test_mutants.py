"""Every planted bug is noticed by the checker and makes `flexep verify` fail; the unchanged code passes
both."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import pytest
from typer.testing import CliRunner

import flexep
from flexep.cli.main import app
from flexep.testing import sweep
from flexep.testing.case import Case
from flexep.testing.check import check_dispatchers
from flexep.testing.pool import RankPool
from flexep.testing.worker import RankContext
from tests.mutants.plants import PLANTS, plant, planted

DISPATCHERS = list(flexep.BACKENDS)
BASE = Case(
    ranks=2, experts=5, hidden=32, top_k=3, tokens=21, seed=11, spread="ragged", alignment=8, cached=1
)
CASES = [
    BASE,
    Case(**{**vars(BASE), "weights": "nowhere", "layout": "flat", "capacity": "full"}),
    Case(**{**vars(BASE), "weights": "inside", "capacity": "far_over", "dtype": "fp32", "top_k": 6}),
    # Four ranks in two domains, in a local group alone.
    Case(**{**vars(BASE), "ranks": 4, "domain_size": 2, "weights": "nowhere", "transport": "local"}),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(2, timeout=120) as ranks:
        yield ranks


def check(ctx: RankContext, bug: str | None, transport: str) -> list[str]:
    """What the checker says with the bug planted in this rank (None: unchanged code); an exception counts as
    noticed."""
    # A bug of one dispatcher is that dispatcher's; the others are as they were.
    names = [name for name in DISPATCHERS if (bug or "").startswith(f"{name}:")] or DISPATCHERS
    cases = [case for case in CASES if transport == "local" or case.ranks == ctx.size]
    found: list[str] = []
    with nullcontext() if bug is None else planted(bug):
        for case in cases:
            group = flexep.Group.local(case.ranks) if transport == "local" else ctx.group
            try:
                found += [str(m) for m in check_dispatchers(case, group, names)]
            except flexep.FlexEPError as error:
                found.append(repr(error))
    return found


def test_unchanged_code_passes(pool: RankPool) -> None:
    assert pool.run(check, None, "process") == [[], []]
    assert pool.run(check, None, "local") == [[], []]


@pytest.mark.parametrize("bug", PLANTS)
def test_the_checker_notices(pool: RankPool, bug: str) -> None:
    found = pool.run(check, bug, "local")
    assert all(found), f"{bug}: nobody noticed"


@pytest.mark.parametrize(
    "bug",
    [
        None,
        *(f"{name}: dropped row" for name in DISPATCHERS),
        "hybridep: domain lost at home",
        "plan: wrong row",
    ],
)
def test_verify_fails_with_a_planted_bug_and_passes_without(
    monkeypatch: pytest.MonkeyPatch, tmp_path, bug: str | None
) -> None:
    setup = None if bug is None else partial(plant, bug)
    monkeypatch.setattr(sweep, "RankPool", partial(RankPool, setup=setup))
    path = tmp_path / "out.json"
    result = CliRunner().invoke(
        app, ["verify", "--ranks", "2", "--cases", "12", "--seed", "5", "--json", str(path)]
    )
    assert result.exit_code == (0 if bug is None else 1), result.output
    found = json.loads(path.read_text())
    assert bool(found["failures"]) == (bug is not None)
    for failure in found["failures"]:
        again = Case.from_json(failure["case"])
        assert failure["differs"]
        if bug is not None and bug.split(":")[0] in DISPATCHERS:
            assert again.dispatcher == bug.split(":")[0]
