"""A fake driver in the test's own process."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from flexep.transport._gpu_memory import GpuMapping
from tests.transport.fake_driver import FakeDriver, install


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setattr(GpuMapping, "view", GpuMapping.view)
    monkeypatch.setenv("FLEXEP_PEER", "0")
    fake = FakeDriver()
    install(fake)
    yield fake
    assert not fake.contexts, "a context was left current"
