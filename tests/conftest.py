"""What all tests share: reproducible random cases, and few threads because rank pools start processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from flexep.transport.gpu_memory import GpuMapping
from tests.transport.fake_driver import FakeDriver, install

# The same examples on every run and on every machine; a slow shared machine is no failure.
settings.register_profile("flexep", derandomize=True, deadline=None)
settings.load_profile("flexep")

torch.set_num_threads(min(2, os.cpu_count() or 1))


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--soak-rounds", type=int, default=2000, help="rounds of each soak between GPU processes"
    )


@pytest.fixture
def poison() -> Iterator[None]:
    """Fresh tensors hold NaN or the largest int, so that an element that nobody writes is a difference."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def soak_rounds(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--soak-rounds")


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """A CUDA driver of memory alone, in the test's own process and for the length of the test."""
    for name in ("cuda", "cuda.bindings", "cuda.bindings.driver"):
        monkeypatch.setitem(sys.modules, name, None)  # type: ignore[arg-type]
    monkeypatch.setattr(GpuMapping, "view", GpuMapping.view)
    monkeypatch.setenv("FLEXEP_PEER", "0")
    fake = FakeDriver()
    install(fake)
    yield fake
    assert not fake.contexts, "a context was left current"


@pytest.hookimpl(trylast=True)  # after -m has chosen
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests that were chosen must run. Without any GPU that is an error; with one, those that need two are skipped,
    because nothing of them can be shown on one, and pytest's closing lines name them."""
    gpus = torch.cuda.device_count()
    for item in items:
        two = item.get_closest_marker("multigpu") is not None
        if gpus == 0 and (two or item.get_closest_marker("gpu")):
            raise pytest.UsageError(f"{item.nodeid} needs a CUDA GPU, and torch sees none")
        if two and gpus < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs, and torch sees {gpus}"))
