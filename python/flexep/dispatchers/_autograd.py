"""Dispatch and combine as autograd functions over one tensor per hosted rank. Each one's backward is the
other's verb.

Numerics are those of docs/numerics.md: forward and backward round in the same places whatever the back end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from flexep._native import rows as native
from flexep.config import DispatcherConfig
from flexep.dispatchers._checks import dense
from flexep.dispatchers.backend import Backend
from flexep.indexing import take_rows
from flexep.types import Route

Tensors = Sequence[torch.Tensor]


class Context(NamedTuple):
    """What a call needs beside tensors; autograd keeps it for the backward."""

    backend: Backend
    config: DispatcherConfig
    routes: Sequence[Route]
    flat: bool  # the layout of the rows at the experts' side of this call
    in_window: Sequence[bool] | None = None  # ranks whose x is in their window
    sent_ahead: bool = False  # whether a dispatch has begun to move x before its plan

    def slots_from_rows(self, values: torch.Tensor, route: Route) -> torch.Tensor:
        """Per-row values of this call's layout ([rows] or flat [N, K]) -> [P, K] beside the partial rows."""
        if values.dim() == 1:
            return native.take(values, route.part_rows)
        return values if route.part_flat is None else take_rows(values, route.part_flat, 0.0)

    def rows_from_slots(self, values: torch.Tensor, route: Route) -> torch.Tensor:
        """[P, K] -> per-row values of this call's layout."""
        if not self.flat:
            return native.take(values, route.row_src)
        return values if route.flat_part is None else take_rows(values, route.flat_part, 0.0)


class DispatchRows(torch.autograd.Function):
    """(row_weights, *x, *topk_weights) -> (*rows, *row_weights).

    `row_weights` have travelled already; `topk_weights` are passed so that their gradients go home.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Context, row_weights: Tensors | None, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n = len(call.routes)
        ctx.call, ctx.has_weights = call, row_weights is not None
        return _deliver_tokens(call, row_weights, inputs[:n])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Context = ctx.call
        n, dtype = len(call.routes), call.config.dtype
        dx: list[torch.Tensor | None] = [None] * n
        dw: list[torch.Tensor | None] = [None] * (n if ctx.has_weights else 0)
        with call.backend.one_at_a_time("dispatch backward"):
            if any(ctx.needs_input_grad[2 : 2 + n]):
                dx = [
                    *call.backend.collect(
                        call.routes,
                        [dense(g) for g in grads[:n]],
                        "dispatch_backward.rows",
                        flat=call.flat,
                        part_weights=None,
                        group_dtype=dtype,
                        out_dtype=dtype,
                    )
                ]
            if ctx.has_weights and any(ctx.needs_input_grad[2 + n :]):
                slots = [
                    torch.where(r.part_rows >= 0, call.slots_from_rows(g, r), 0.0)
                    for g, r in zip(grads[n:], call.routes, strict=True)
                ]
                dw = [*call.backend.collect_slots(call.routes, slots, "dispatch_backward.weights")]
        return (None, None, *dx, *dw)


def dispatch_rows(
    call: Context, row_weights: Tensors | None, xs: Tensors, weights: Tensors
) -> Sequence[torch.Tensor]:
    """(*rows, *row_weights), through autograd if somebody asks for gradients."""
    if _is_differentiable(xs, weights):
        return DispatchRows.apply(call, row_weights, *xs, *weights)
    return _deliver_tokens(call, row_weights, xs)


def _deliver_tokens(call: Context, row_weights: Tensors | None, xs: Tensors) -> tuple[torch.Tensor, ...]:
    delivered = call.backend.deliver(
        call.routes, xs, "dispatch.rows", flat=call.flat, registered=call.in_window,
        sent_ahead=call.sent_ahead,
    )  # fmt: skip
    return (*delivered.rows, *(row_weights or ()))


def _is_differentiable(*inputs: Tensors) -> bool:
    return torch.is_grad_enabled() and any(one.requires_grad for tensors in inputs for one in tensors)


class CombineRows(torch.autograd.Function):
    """(*y, *weights) -> (*z). `weights` are in the layout of `weights_flat`; flat y takes none."""

    @staticmethod
    def forward(
        ctx: Any, call: Context, has_weights: bool, *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        n = len(call.routes)
        ctx.call, ctx.has_weights = call, has_weights
        # y is needed for the gradient of the weights alone: weights applied inside the experts keep no expert
        # output.
        ctx.keeps_y = has_weights and any(ctx.needs_input_grad[2 + n :])
        ctx.save_for_backward(*(inputs if ctx.keeps_y else inputs[n:]))
        return tuple(_collect_rows(call, inputs[:n], inputs[n:] if has_weights else None))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: Context = ctx.call
        n = len(call.routes)
        ys, weights = ctx.saved_tensors[: n * ctx.keeps_y], ctx.saved_tensors[n * ctx.keeps_y :]
        row_weights = None
        if ctx.has_weights:
            slots = _each(call.slots_from_rows, weights, call.routes)
            row_weights = _each(call.rows_from_slots, slots, call.routes)
        with call.backend.one_at_a_time("combine backward"):
            delivered = call.backend.deliver(
                call.routes,
                [dense(g) for g in grads],
                "combine_backward.rows",
                flat=call.flat,
                row_weights=row_weights,
                dot_with=ys if ctx.keeps_y else None,
            )
        needs = ctx.needs_input_grad[2:]
        dy = [d if need else None for d, need in zip(delivered.rows, needs[:n], strict=True)]
        dw: list[torch.Tensor | None] = [None] * len(weights)
        if delivered.dots is not None:
            for i, (dots, route) in enumerate(zip(delivered.dots, call.routes, strict=True)):
                if needs[n + i]:
                    dw[i] = dots if weights[i].dim() == 1 else _flat_slots(dots, route)
        return (None, None, *dy, *dw)


def combine_rows(call: Context, ys: Tensors, weights: Tensors | None) -> Sequence[torch.Tensor]:
    """z of each rank, through autograd if somebody asks for gradients."""
    if _is_differentiable(ys, weights or ()):
        return CombineRows.apply(call, weights is not None, *ys, *(weights or ()))
    return _collect_rows(call, ys, weights)


def _collect_rows(call: Context, ys: Tensors, weights: Tensors | None) -> list[torch.Tensor]:
    return call.backend.collect(
        call.routes,
        ys,
        "combine.rows",
        flat=call.flat,
        part_weights=None if weights is None else _each(call.slots_from_rows, weights, call.routes),
        group_dtype=call.config.combine_dtype,
        out_dtype=call.config.dtype,
    )


def _each(
    of: Callable[[torch.Tensor, Route], torch.Tensor], values: Tensors, routes: Sequence[Route]
) -> list[torch.Tensor]:
    """`of` each hosted rank's values and route."""
    return [of(value, route) for value, route in zip(values, routes, strict=True)]


def _flat_slots(dots: torch.Tensor, route: Route) -> torch.Tensor:
    """Per expert-major row -> per (flat row, slot)."""
    slots = native.take(dots, route.part_rows)
    return slots if route.flat_part is None else take_rows(slots, route.flat_part, 0.0)
