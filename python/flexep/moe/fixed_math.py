"""exp, log1p and sums whose every rounding is fixed, in plain torch: the arithmetic of csrc/ops/route_math.h.

Each line is one IEEE operation a value (a torch kernel each), so that a CPU and a GPU give the same bits, and the
router composed of these chooses what the fused one chooses. All values are fp32. Sums run over the last dimension.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

LANES = 32
TAIL = -16.0  # below, sqrt(softplus(x)) is exp(x / 2) to fp32 precision, and its gradient cannot be 0 * inf
ROUND = 12582912.0  # adding and subtracting 1.5 * 2**23 rounds to an integer
EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
ATANH = ("0x1.f1aee8p-4", "0x1.b6d6a2p-4", "0x1.250972p-3", "0x1.9996a8p-3", "0x1.555558p-2")


def exp(x: Tensor) -> Tensor:
    """e**x, within 1 unit in the last place, subnormals included. Not differentiable."""
    # Outside these the result is inf or 0; NaN becomes a number on the way.
    inner = torch.where(x > 88.8, 88.8, torch.where(x > -105.0, x, -105.0))
    n = (inner * 1.44269504 + ROUND) - ROUND
    r = (inner - n * 0.693359375) - n * -2.12194440e-4
    y = (_polynomial(r, EXP) * (r * r) + r) + 1.0
    power = n.int()
    half = power >> 1
    return torch.where(x.isnan(), x, y * _power_of_two(half) * _power_of_two(power - half))


def log1p(t: Tensor) -> Tensor:
    """log(1 + t) for t in [0, 1], within 2 units in the last place: 2 atanh(t / (2 + t)). Not differentiable."""
    s = t / (t + 2.0)
    z = s * s
    twice = s + s
    return twice + twice * (z * _polynomial(z, [float.fromhex(c) for c in ATANH]))


def lane_sum(values: Tensor) -> Tensor:
    """[..., n] -> [..., 1]. Element i is added to lane i % 32; then lane i takes lane i + 16, + 8, + 4, + 2, + 1."""
    values = F.pad(values, (0, -values.shape[-1] % LANES)).unflatten(-1, (-1, LANES))
    lanes = values[..., 0, :]
    for row in range(1, values.shape[-2]):
        lanes = lanes + values[..., row, :]
    while lanes.shape[-1] > 1:
        low, high = lanes.chunk(2, dim=-1)
        lanes = low + high
    return lanes


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        parts = exp(x - x.amax(dim=-1, keepdim=True))
        out = parts / lane_sum(parts)
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return out * (grad - (grad * out).sum(dim=-1, keepdim=True))


class _Sigmoid(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = 1.0 / (1.0 + exp(-x))
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (out,) = ctx.saved_tensors
        return grad * (out * (1.0 - out))


class _SqrtSoftplus(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        body = x.clamp(min=0) + log1p(exp(-x.abs()))
        body = body.double().sqrt().float()  # rounded once, which torch's fp32 root on the CPU is not
        out = torch.where(x < TAIL, exp(x * 0.5), body)
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, out = ctx.saved_tensors
        slope = 1.0 / (1.0 + exp(-x)) * 0.5 / out
        return grad * torch.where(x < TAIL, out * 0.5, slope)


def softmax(x: Tensor) -> Tensor:
    """Over the last dimension, which is not empty. Differentiable."""
    return _Softmax.apply(x)


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)). Differentiable."""
    return _Sigmoid.apply(x)


def sqrt_softplus(x: Tensor) -> Tensor:
    """sqrt(log(1 + exp(x))), with values and gradients that stay right where softplus underflows. Differentiable."""
    return _SqrtSoftplus.apply(x)


def _polynomial(x: Tensor, coefficients: Any) -> Tensor:
    """Coefficients from the highest power down."""
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def _power_of_two(n: Tensor) -> Tensor:
    return ((n + 127) << 23).view(torch.float32)
