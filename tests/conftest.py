"""What all tests share: reproducible random cases, and few threads because rank pools start processes."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# The same examples on every run and on every machine; a slow shared machine is no failure.
settings.register_profile("flexep", derandomize=True, deadline=None)
settings.load_profile("flexep")

torch.set_num_threads(min(2, os.cpu_count() or 1))
