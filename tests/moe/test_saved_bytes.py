"""What is counted as saved for backward, and what memory-efficient permutation saves of it in a layer."""

from __future__ import annotations

import pytest
import torch

from flexep.moe.saved_bytes import saved_bytes, saved_storages
from tests.moe.layers import HIDDEN, make_layer, tokens


def test_counts_a_storage_once_and_leaves_out_what_is_there_anyway() -> None:
    x = torch.zeros(10, requires_grad=True)

    def twice() -> torch.Tensor:
        y = x.exp()  # saved as its own result, and as both factors
        return (y[:5] * y[5:]).sum()

    assert saved_bytes(twice) == 10 * 4
    assert saved_bytes(lambda: (x * x).sum()) == 10 * 4
    assert saved_bytes(lambda: (x * x).sum(), beside=[x]) == 0
    assert saved_storages(lambda: x + 1) == {}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_inside_save_the_output_of_every_expert(dtype: torch.dtype) -> None:
    """N rows of H: with the weights at combine they stay for the weights' gradient."""
    held: dict[str, int] = {}
    rows: list[int] = []
    for weights_at in ("expert", "combine"):
        layer = make_layer(1, num_experts=4, dtype=dtype, weights_at=weights_at)
        x = tokens([64], dtype)
        layer.experts[0].register_forward_hook(lambda _m, args, _out: rows.append(args[0].shape[0]))
        held[weights_at] = saved_bytes(lambda layer=layer, x=x: layer(x)[0], beside=[*x, *layer.parameters()])
    assert rows[0] == rows[1] >= 128
    assert held["combine"] - held["expert"] == rows[0] * HIDDEN * dtype.itemsize
