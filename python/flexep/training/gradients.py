"""Gradients over ranks: copies are summed, experts are left alone, the norm counts each parameter once.

The loss of a rank is a sum over its tokens divided by the tokens of *all* ranks. So the gradients of a copied
parameter add up to the gradient of the global batch, and the gradient of an expert, to which the backward of
dispatch brings the rows of every rank, already is that sum: it is neither reduced nor scaled.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn


def sum_copies(copied: Sequence[nn.Parameter], loss: Tensor, process_group: dist.ProcessGroup) -> Tensor:
    """Replace the gradients of copied parameters by their sum over ranks (one all-reduce); return the summed
    loss.

    `loss` fp32 scalar rides in the same buffer. Every copied parameter must have a gradient.
    """
    grads = [_grad(p) for p in copied]
    bucket = torch.cat([g.flatten() for g in grads] + [loss.detach().reshape(1)])
    dist.all_reduce(bucket, group=process_group)
    for grad, reduced in zip(grads, bucket[:-1].split([g.numel() for g in grads]), strict=True):
        grad.copy_(reduced.view_as(grad))
    return bucket[-1]


def clip_by_global_norm(
    copied: Sequence[nn.Parameter],
    owned: Sequence[nn.Parameter],
    max_norm: float,
    process_group: dist.ProcessGroup,
) -> Tensor:
    """Scale all gradients by min(1, max_norm / norm), where norm covers every parameter of the model once.

    `owned` parameters (experts) are summed over ranks, `copied` ones are not. Returns the norm, a scalar
    equal on every rank, on the device: nothing waits for it.
    """
    square = _square(owned, like=copied[0])
    dist.all_reduce(square, group=process_group)
    norm = (square + _square(copied, like=copied[0])).sqrt().float()
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for parameter in (*copied, *owned):
        _grad(parameter).mul_(scale)
    return norm


def _square(parameters: Sequence[nn.Parameter], like: Tensor) -> Tensor:
    """fp64 scalar: the sum of the squares of all gradients."""
    norms = [torch.linalg.vector_norm(_grad(p), dtype=torch.float64) for p in parameters]
    return torch.stack(norms).square().sum() if norms else like.new_zeros((), dtype=torch.float64)


def _grad(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None, (
        "every parameter takes part in every backward, whatever its rank received"
    )
    return parameter.grad
