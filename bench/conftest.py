"""`pytest bench`: the columns of `flexep bench` as pytest-benchmark tests, small unless --shape says otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.suite import Suite, case_of


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--shape", default="ranks=2,tokens=256,hidden=256,experts=16,top_k=4",
        help="fields of flexep.benchmark.case.BenchCase, for example ranks=4,tokens=2048,hidden=1024",
    )  # fmt: skip


@pytest.fixture(scope="session")
def suite(request: pytest.FixtureRequest) -> Iterator[Suite]:
    """All columns, open on one pool of ranks."""
    with Suite(case_of(request.config.getoption("--shape"))) as opened:
        yield opened
