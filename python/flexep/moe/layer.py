"""The MoE layer: route, dispatch, run the experts, combine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from flexep._native.plan import invert_rows
from flexep.dispatchers import Dispatcher
from flexep.errors import ArgumentError
from flexep.moe.experts import Experts
from flexep.moe.router import Router
from flexep.ops.permute_rows import permute_rows, permute_weights

WEIGHTS_AT = ("expert", "combine")


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer over any Dispatcher; hidden, E, K and the layout come from it.

    `weights_at="expert"` applies the routing weights before an expert's second linear, so that no expert output
    is kept for their gradient; `"combine"` applies them to the output rows. The router is replicated; each rank
    owns the experts that the dispatcher places on it. In a local group one module owns the experts of all ranks
    and takes and returns lists of R tensors.

    Every rank must call the layer, with any number of tokens, 0 included. There is no host wait here beyond
    the dispatcher's own, except with `implementation="sequential"` (for debugging).
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        inner: int,
        renormalize: bool = True,
        weights_at: str = "expert",
        implementation: str = "grouped",
        seed: int = 0,
        name: str = "moe",
    ) -> None:
        super().__init__()
        if weights_at not in WEIGHTS_AT:
            raise ArgumentError("weights_at", weights_at, f"one of {', '.join(WEIGHTS_AT)}")
        config, table, group = dispatcher.config, dispatcher.table, dispatcher.group
        self.dispatcher = dispatcher
        self.weights_at = weights_at
        self.router = Router(
            hidden=config.hidden, num_experts=config.num_experts, top_k=config.top_k, renormalize=renormalize,
            seed=seed, name=f"{name}.router",
        ).to(group.device)  # fmt: skip
        self.experts = nn.ModuleList(
            Experts(
                table.expert_of_place[table.places(rank)].tolist(), hidden=config.hidden, inner=inner,
                implementation=implementation, seed=seed, name=f"{name}.experts",
            )
            for rank in group.hosted
        ).to(group.device)  # fmt: skip

    def forward(self, x: Tensor | Sequence[Tensor]) -> Any:
        """x [T, H] in the dispatcher's dtype -> [T, H]. In a local group a list of R of them -> a list."""
        if not self.dispatcher.group.is_local:
            topk_idx, topk_weights = self._route(x)
            received = self.dispatcher.dispatch(x, topk_idx, topk_weights)
            y = self._run_experts(self.experts[0], received)
            return self._combine(y, received.handle, received.weights)
        routed = [self._route(x_TH) for x_TH in x]
        received = self.dispatcher.dispatch(
            list(x), [idx for idx, _ in routed], [weights for _, weights in routed]
        )
        y_R = [self._run_experts(experts, each) for experts, each in zip(self.experts, received, strict=True)]
        return self._combine(y_R, [each.handle for each in received], [each.weights for each in received])

    def _route(self, x: Any) -> tuple[Tensor, Tensor]:
        config = self.dispatcher.config
        if x.dim() != 2 or x.shape[1] != config.hidden:
            # Dispatch refuses such an x, and tells the other ranks so; no routing is needed for that.
            return torch.zeros(0, config.top_k, dtype=torch.int32), torch.zeros(0, config.top_k)
        return self.router(x)

    def _run_experts(self, experts: nn.Module, received: Any) -> Tensor:
        """The rows one rank received, in either layout, through its experts: expert-major [rows, H]."""
        rows, weights, handle = received.x, received.weights, received.handle
        if self.dispatcher.config.layout == "flat":
            row_src = invert_rows(handle.recv_rows, handle.num_rows)
            rows = permute_rows(rows, handle.recv_rows, row_src)
            weights = (
                permute_weights(weights, handle.recv_rows, row_src) if self.weights_at == "expert" else None
            )
        return experts(rows, handle.padded_counts, weights if self.weights_at == "expert" else None)

    def _combine(self, y: Any, handle: Any, weights: Any) -> Any:
        return self.dispatcher.combine(
            y, handle, weights=weights if self.weights_at == "combine" else None, y_layout="expert_major"
        )
