"""Every column and operation of `flexep bench`, by pytest-benchmark: `pytest bench`, `pytest bench --shape ...`."""

from __future__ import annotations

from typing import Any

import pytest

import flexep
from bench.suite import Clock, Suite
from flexep.benchmark.library import Column
from flexep.benchmark.rank import OPS

CLOCK = Clock()
COLUMNS = [*(("flexep", name) for name in flexep.BACKENDS), ("torch", "all_to_all_single")]


@pytest.mark.benchmark(timer=CLOCK.read)
@pytest.mark.parametrize("column", COLUMNS, ids=lambda column: column[1])
@pytest.mark.parametrize("op", OPS)
def test_op(benchmark: Any, suite: Suite, column: Column, op: str) -> None:
    assert suite.open(column) == []
    benchmark.group = op
    benchmark.pedantic(lambda: CLOCK.advance(suite.time(column, op)), rounds=20, warmup_rounds=2)
    benchmark.extra_info.update(remote_bytes=suite.sent(column, op), ranks=suite.case.ranks)
    assert suite.check(column) == []
