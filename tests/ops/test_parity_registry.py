"""Every operation that takes CUDA tensors has a parity case, and no case is left of an operation that is gone."""

from __future__ import annotations

import pytest
import torch

import flexep.moe  # the operations of every room are registered by importing them
from tests.ops.parity import CASES, registered


def test_every_operation_has_a_parity_case() -> None:
    assert flexep.moe.__name__
    assert registered() == set(CASES)


@pytest.mark.parametrize("name", CASES)
def test_the_cases_run_and_are_not_all_empty(name: str) -> None:
    op = getattr(torch.ops.flexep, name)
    elements = 0
    for args in CASES[name]():
        results = op(*args)
        for result in results if isinstance(results, tuple) else (results,):
            elements += result.numel()
    assert elements > 100


def test_a_new_operation_would_be_missed() -> None:
    library = torch.library.Library("flexep", "FRAGMENT")
    library.define("without_a_case(Tensor x) -> Tensor")
    assert "without_a_case" not in registered()
    library.impl("without_a_case", lambda x: x.clone(), "CUDA")
    assert "without_a_case" in registered() - set(CASES)
    library._destroy()
    assert "without_a_case" not in registered()
