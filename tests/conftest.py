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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests that were asked for and cannot run here say which hardware they miss."""
    gpus = torch.cuda.device_count()
    for item in items:
        for marker, needed in (("gpu", 1), ("multigpu", 2)):
            if item.get_closest_marker(marker) and gpus < needed:
                item.add_marker(pytest.mark.skip(reason=f"needs {needed} CUDA GPU(s), torch sees {gpus}"))
