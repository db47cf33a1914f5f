"""Switches of the environment: their values, and that all ranks must share FLEXEP_DEBUG."""

from __future__ import annotations

import pytest
import torch

import flexep
from flexep.config import Environment
from flexep.errors import ArgumentError


@pytest.mark.parametrize(("value", "debug"), [(None, False), ("", False), ("0", False), ("1", True)])
def test_values(monkeypatch: pytest.MonkeyPatch, value: str | None, debug: bool) -> None:
    monkeypatch.delenv("FLEXEP_DEBUG", raising=False)
    if value is not None:
        monkeypatch.setenv("FLEXEP_DEBUG", value)
    assert Environment.read().debug is debug
    with flexep.Dispatcher(
        flexep.Group.local(2), num_experts=4, hidden=8, top_k=2, max_tokens=4, capacity=64
    ) as ep:
        assert ep.config.as_text()["debug"] == str(debug)  # what ranks compare when they are constructed
        x, idx = [torch.ones(3, 8, dtype=torch.bfloat16)] * 2, torch.tensor([[0, 1]] * 3)
        with pytest.raises(ArgumentError, match="topk_idx = 4"):
            ep.dispatch(x, [idx, idx + 3])
        ep.dispatch(x, [idx, idx])
        assert ep.masked_ids == 0


@pytest.mark.parametrize("variable", ["FLEXEP_DEBUG", "FLEXEP_PEER"])
def test_other_values_are_refused(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "yes")
    with pytest.raises(ArgumentError, match=f"{variable} = 'yes'"):
        Environment.read()
