"""What torch does in a dispatch and a combine over windows: on a GPU each op that computes would be a kernel of its
own, microseconds beside those of the plan. Views and allocations launch nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import flexep

LAUNCH_NOTHING = {
    "aten::alias", "aten::detach", "aten::empty.memory_format", "aten::new_empty", "aten::select.int",
    "aten::slice.Tensor", "aten::split_with_sizes", "aten::unsqueeze", "aten::view", "aten::view.dtype",
}  # fmt: skip
COUNTS = {"aten::_local_scalar_dense"}  # a CPU's windows count what a rank gave itself
T, E, K, H, R = 12, 8, 3, 64, 2


class Launches(TorchDispatchMode):
    """Ops that would launch a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= {func.name()} - LAUNCH_NOTHING - COUNTS
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("overflow", ["error", "drop"])
@pytest.mark.parametrize("layout", ["flat", "expert_major"])
def test_torch_launches_nothing(
    layout: str, overflow: str, weighted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ep = flexep.Dispatcher(
        flexep.Group.local(R), num_experts=E, hidden=H, top_k=K, max_tokens=T, backend="deepep", layout=layout,
        capacity=4.0, overflow=overflow,
    )  # fmt: skip
    x = [torch.randn(T, H).bfloat16() for _ in range(R)]
    idx = [torch.randint(-1, E, (T, K)) for _ in range(R)]
    weights = [torch.rand(T, K) for _ in range(R)] if weighted else None
    monkeypatch.setattr(ep, "check", lambda: None)  # a GPU's is the caller's
    with Launches() as launches:
        received = ep.dispatch(x, idx, weights)
        again = ep.dispatch(x, handle=[r.handle for r in received])
        ep.combine([r.x for r in again], [r.handle for r in received])
        maps = [r.row_map for r in (*received, *again)]
    assert launches.seen == set()
    assert all((row_map is not None) == (layout == "flat") for row_map in maps)
    ep.destroy()


def test_a_launch_would_be_noticed() -> None:
    with Launches() as launches:
        torch.zeros(2).cumsum(0)
    assert "aten::cumsum" in launches.seen
