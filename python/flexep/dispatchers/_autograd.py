"""Dispatch and combine as autograd functions over one tensor per hosted rank. Each one's backward is the
other's verb.

Numerics are those of docs/numerics.md: forward and backward round in the same places whatever the back end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from flexep.config import DispatcherConfig
from flexep.dispatchers.backend import Backend
from flexep.indexing import take, take_rows
from flexep.ops.rows import dot_rows, gather_rows, reduce_rows
from flexep.types import Route

Tensors = Sequence[torch.Tensor]


@dataclass(frozen=True)
class Context:
    """What a call needs beside tensors; autograd keeps it for the backward."""

    backend: Backend
    config: DispatcherConfig
    routes: Sequence[Route]
    flat: bool  # the layout of the rows at the experts' side of this call

    def arrive(self, buffer: torch.Tensor, route: Route, weights: torch.Tensor | None = None) -> torch.Tensor:
        """Rows of the delivered buffer in this call's layout, times `weights` (expert-major rows only)."""
        if not self.flat:
            return gather_rows(buffer, route.row_buffer, weights)
        return buffer if route.flat_buffer is None else gather_rows(buffer, route.flat_buffer)

    def partial(
        self, rows: torch.Tensor, route: Route, part_weights: torch.Tensor | None, dtype: torch.dtype
    ) -> torch.Tensor:
        """Rows in this call's layout -> one partial row per received token, rounded to `dtype`."""
        if not self.flat:
            return reduce_rows(rows, route.part_rows, part_weights, dtype, True)
        parts = rows if route.part_flat is None else gather_rows(rows, route.part_flat)
        return parts.to(dtype)

    def slots_from_rows(self, values: torch.Tensor, route: Route) -> torch.Tensor:
        """Per-row values of this call's layout ([rows] or flat [N, K]) -> [P, K] beside the partial rows."""
        if values.dim() == 1:
            return take(values, route.part_rows, 0.0)
        return values if route.part_flat is None else take_rows(values, route.part_flat, 0.0)

    def rows_from_slots(self, values: torch.Tensor, route: Route) -> torch.Tensor:
        """[P, K] -> per-row values of this call's layout."""
        if not self.flat:
            return take(values.flatten(), route.row_src, 0.0)
        return values if route.flat_part is None else take_rows(values, route.flat_part, 0.0)


class DispatchRows(torch.autograd.Function):
    """(part_weights, *x, *topk_weights) -> (*rows, *row weights).

    `part_weights` [P, K] have travelled already; `topk_weights` are passed so that their gradients go home.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Context, part_weights: Tensors | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n = len(call.routes)
        ctx.call, ctx.has_weights = call, part_weights is not None
        buffers = call.backend.deliver(call.routes, inputs[:n], "dispatch.rows")
        rows = [call.arrive(buffer, route) for buffer, route in zip(buffers, call.routes, strict=True)]
        if part_weights is None:
            return tuple(rows)
        weights = [call.rows_from_slots(w, route) for w, route in zip(part_weights, call.routes, strict=True)]
        return (*rows, *weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Context = ctx.call
        n, dtype = len(call.routes), call.config.dtype
        dx: list[torch.Tensor | None] = [None] * n
        dw: list[torch.Tensor | None] = [None] * (n if ctx.has_weights else 0)
        if any(ctx.needs_input_grad[2 : 2 + n]):
            partials = [call.partial(g, r, None, dtype) for g, r in zip(grads[:n], call.routes, strict=True)]
            dx = [*call.backend.collect(call.routes, partials, dtype, dtype, "dispatch_backward.rows")]
        if ctx.has_weights and any(ctx.needs_input_grad[2 + n :]):
            slots = [
                torch.where(r.part_rows >= 0, call.slots_from_rows(g, r), 0.0)
                for g, r in zip(grads[n:], call.routes, strict=True)
            ]
            dw = [*call.backend.collect_slots(call.routes, slots, "dispatch_backward.weights")]
        return (None, None, *dx, *dw)


class CombineRows(torch.autograd.Function):
    """(*y, *weights) -> (*z). `weights` are in the layout of `weights_flat`; flat y takes none."""

    @staticmethod
    def forward(
        ctx: Any, call: Context, has_weights: bool, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n, config = len(call.routes), call.config
        ctx.call, ctx.has_weights = call, has_weights
        # y is needed for the gradient of the weights alone: weights applied inside the experts keep no expert
        # output.
        ctx.keeps_y = has_weights and any(ctx.needs_input_grad[2 + n :])
        ctx.save_for_backward(*(inputs if ctx.keeps_y else inputs[n:]))
        slots = (
            [call.slots_from_rows(w, r) for w, r in zip(inputs[n:], call.routes, strict=True)]
            if has_weights
            else [None] * n
        )
        wire = config.combine_dtype
        partials = [
            call.partial(y, r, w, wire) for y, r, w in zip(inputs[:n], call.routes, slots, strict=True)
        ]
        return tuple(call.backend.collect(call.routes, partials, wire, config.dtype, "combine.rows"))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Context = ctx.call
        n = len(call.routes)
        ys, weights = ctx.saved_tensors[: n * ctx.keeps_y], ctx.saved_tensors[n * ctx.keeps_y :]
        buffers = call.backend.deliver(call.routes, [g.contiguous() for g in grads], "combine_backward.rows")
        dy: list[torch.Tensor | None] = [None] * n
        dw: list[torch.Tensor | None] = [None] * len(weights)
        for i, (buffer, route) in enumerate(zip(buffers, call.routes, strict=True)):
            if ctx.needs_input_grad[2 + i]:
                row_weights = None
                if ctx.has_weights:
                    row_weights = take(call.slots_from_rows(weights[i], route).flatten(), route.row_src, 0.0)
                dy[i] = call.arrive(buffer, route, row_weights)
            if ctx.has_weights and ctx.needs_input_grad[2 + n + i]:
                dots = dot_rows(ys[i], buffer, route.row_buffer)
                dw[i] = dots if weights[i].dim() == 1 else _flat_slots(dots, route)
        return (None, None, *dy, *dw)


def _flat_slots(dots: torch.Tensor, route: Route) -> torch.Tensor:
    """Per expert-major row -> per (flat row, slot)."""
    slots = take(dots, route.part_rows, 0.0)
    return slots if route.flat_part is None else take_rows(slots, route.flat_part, 0.0)
