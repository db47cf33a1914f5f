"""What all tests share: reproducible random cases, and few threads because rank pools start processes."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import settings

# The same examples on every run and on every machine; a slow shared machine is no failure.
settings.register_profile("flexep", derandomize=True, deadline=None)
settings.load_profile("flexep")

torch.set_num_threads(min(2, os.cpu_count() or 1))


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
