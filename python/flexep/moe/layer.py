"""The MoE layer: route, dispatch, run the experts, combine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flexep._native.plan import invert_rows
from flexep.dispatchers import Dispatcher
from flexep.dispatchers._checks import check_tensor
from flexep.errors import ArgumentError, FlexEPError
from flexep.group import Group
from flexep.moe.expert_rows import pad_evenly
from flexep.moe.experts import Experts
from flexep.moe.feed_forward import SharedExpert
from flexep.moe.init import keyed_normal
from flexep.moe.losses import mask_rows
from flexep.moe.router import Router, Routing
from flexep.moe.router_config import RouterConfig
from flexep.ops.permute_rows import permute_rows, permute_weights

WEIGHTS_AT = ("expert", "combine")


class MoELayer(nn.Module):
    """A mixture-of-experts feed-forward layer over any Dispatcher; E, K and the layout come from it.

    The router, the shared expert and the latent projections are replicated; each rank owns the experts that the
    dispatcher places on it. In a local group one module owns the experts of all ranks and takes and returns lists of
    R tensors. Gradients of experts are sums over the tokens of all ranks already; those of the rest are this rank's.

    Args:
        inner: width of an expert. hidden: H of the tokens; where it is not the dispatcher's, tokens are projected to
            the dispatcher's width before dispatch and back behind combine (LatentMoE); None: the same.
        router: what the router does; None: softmax over all experts, renormalised.
        router_group: ranks whose tokens are balanced together; None: those of the dispatcher.
        shared_inner: width of a shared expert that every token visits; None: there is none. shared_gate: it has a
            sigmoid gate.
        bias: experts have biases.
        weights_at: "expert" applies the routing weights before an expert's second linear, so that no expert output
            is kept for their gradient; "combine" applies them to the output rows.
        implementation: "grouped" GEMMs, or "sequential" ones for debugging.
        seed, name: what the initial values depend on.

    Every rank must call the layer, with any number of tokens, 0 included. There is no host wait here beyond
    the dispatcher's own, except with `implementation="sequential"`.
    """

    down: nn.Parameter | None
    up: nn.Parameter | None

    def __init__(
        self,
        dispatcher: Dispatcher,
        *,
        inner: int,
        hidden: int | None = None,
        router: RouterConfig | None = None,
        router_group: Group | None = None,
        shared_inner: int | None = None,
        shared_gate: bool = False,
        bias: bool = False,
        weights_at: str = "expert",
        implementation: str = "grouped",
        seed: int = 0,
        name: str = "moe",
    ) -> None:
        super().__init__()
        config, table, group = dispatcher.config, dispatcher.table, dispatcher.group
        for width, value in (("inner", inner), ("shared_inner", 1 if shared_inner is None else shared_inner)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(width, value, "an integer of at least 1")
        if router is not None and not isinstance(router, RouterConfig):
            raise ArgumentError("router", type(router).__name__, "a RouterConfig")
        if weights_at not in WEIGHTS_AT:
            raise ArgumentError("weights_at", weights_at, f"one of {', '.join(WEIGHTS_AT)}")
        if shared_gate and shared_inner is None:
            raise ArgumentError("shared_gate", True, "False without a shared_inner")
        if router is None:
            router = RouterConfig(num_experts=config.num_experts, top_k=config.top_k)
        for field in ("num_experts", "top_k"):
            if getattr(router, field) != getattr(config, field):
                raise ArgumentError(
                    f"router.{field}", getattr(router, field), f"the dispatcher's {getattr(config, field)}"
                )
        if router_group is not None and router_group.hosted != group.hosted and router_group.is_local:
            raise ArgumentError(
                "router_group", router_group.hosted, f"a group that hosts ranks {group.hosted}"
            )
        self.dispatcher = dispatcher
        self.weights_at = weights_at
        self.hidden = config.hidden if hidden is None else hidden
        self.router = Router(
            router, hidden=self.hidden, group=router_group or group, timeout=config.timeout,
            seed=seed, name=f"{name}.router",
        ).to(group.device)  # fmt: skip
        self.experts = nn.ModuleList(
            Experts(
                table.expert_of_place[table.places(rank)].tolist(), hidden=config.hidden, inner=inner,
                implementation=implementation, bias=bias, seed=seed, name=f"{name}.experts",
            )
            for rank in group.hosted
        ).to(group.device)  # fmt: skip
        self.shared: SharedExpert | None = None
        if shared_inner is not None:
            self.shared = SharedExpert(
                hidden=self.hidden, inner=shared_inner, gate=shared_gate, seed=seed, name=f"{name}.shared"
            ).to(group.device)
        down = up = None
        if self.hidden != config.hidden:
            wide, narrow = self.hidden, config.hidden
            down = keyed_normal((narrow, wide), wide**-0.5, seed, name, "down").to(group.device)
            up = keyed_normal((wide, narrow), narrow**-0.5, seed, name, "up").to(group.device)
        self.register_parameter("down", None if down is None else nn.Parameter(down))
        self.register_parameter("up", None if up is None else nn.Parameter(up))

    def forward(self, x: Any, padding_mask: Any = None, *, seq_len: int | None = None) -> Any:
        """x [T, H] in the dispatcher's dtype -> [T, H]. In a local group lists of R of them.

        Args:
            padding_mask: bool [T], True where a token is padding: it goes nowhere, its output is 0 and nothing that
                it holds reaches anything else.
            seq_len: tokens of a sequence, for the router's seq_aux_loss; x then holds whole sequences.
        Raises: ArgumentError for x, padding_mask and seq_len; whatever dispatch raises.
        """
        is_local = self.dispatcher.group.is_local
        error = _error_of(lambda: self._check(x, padding_mask, seq_len))
        if error is not None:
            self._refuse(error)
        xs, masks = (list(x), padding_mask) if is_local else ([x], [padding_mask])
        if padding_mask is None:
            masks = [None] * len(xs)
        xs = [x if mask is None else mask_rows(x, ~mask) for x, mask in zip(xs, masks, strict=True)]
        masking = None if padding_mask is None else self._pass(masks)
        routed = self.router(self._pass(xs), masking, seq_len=seq_len)
        z = self._mix(xs, routed if is_local else [routed])
        z = [self._add_shared(x_TH, z_TH) for x_TH, z_TH in zip(xs, z, strict=True)]
        return z if is_local else z[0]

    def _mix(self, xs: Sequence[Tensor], routed: Sequence[Routing]) -> list[Tensor]:
        """What the routed experts say of every rank's tokens."""
        rows = [x if self.down is None else F.linear(x, self.down.to(x.dtype)) for x in xs]
        received = self.dispatcher.dispatch(
            self._pass(rows), self._pass([r.idx for r in routed]), self._pass([r.weights for r in routed])
        )
        received = received if self.dispatcher.group.is_local else [received]
        y = [self._run_experts(experts, each) for experts, each in zip(self.experts, received, strict=True)]
        weights = self._pass([each.weights for each in received]) if self.weights_at == "combine" else None
        z = self.dispatcher.combine(
            self._pass(y), self._pass([r.handle for r in received]), weights, y_layout="expert_major"
        )
        z = z if self.dispatcher.group.is_local else [z]
        return z if self.up is None else [F.linear(z_TH, self.up.to(z_TH.dtype)) for z_TH in z]

    def _pass(self, per_rank: list[Any]) -> Any:
        """As the dispatcher takes it."""
        return per_rank if self.dispatcher.group.is_local else per_rank[0]

    def _run_experts(self, experts: nn.Module, received: Any) -> Tensor:
        """The rows one rank received, in either layout, through its experts: expert-major [rows, H]."""
        rows, handle = received.x, received.handle
        weights = received.weights if self.weights_at == "expert" else None
        if self.dispatcher.config.layout == "flat":
            row_src = invert_rows(handle.recv_rows, handle.num_rows)
            rows = permute_rows(rows, handle.recv_rows, row_src)
            weights = None if weights is None else permute_weights(weights, handle.recv_rows, row_src)
        if not self.router.config.pad_to_capacity:
            return experts(rows, handle.padded_counts, weights, handle.counts)
        padded = pad_evenly(rows, weights, handle.counts, handle.padded_counts, self.capacity_rows)
        return padded.undo(experts(padded.x, padded.padded_counts, padded.weights, handle.counts))

    @property
    def capacity_rows(self) -> int:
        """Rows of every expert under `pad_to_capacity`: what max_tokens tokens on every rank may send, aligned."""
        config = self.dispatcher.config
        most = config.num_ranks * self.router.config.capacity(config.max_tokens)
        return -(-most // config.alignment) * config.alignment

    def _add_shared(self, x_TH: Tensor, z_TH: Tensor) -> Tensor:
        return z_TH if self.shared is None else (z_TH.float() + self.shared(x_TH)).to(z_TH.dtype)

    def _check(self, x: Any, padding_mask: Any, seq_len: int | None) -> None:
        group, dtype = self.dispatcher.group, self.dispatcher.config.dtype
        for name, value in (("x", x), ("padding_mask", padding_mask)):
            is_list = isinstance(value, (list, tuple)) and len(value) == group.size
            if group.is_local and value is not None and not is_list:
                raise ArgumentError(name, type(value).__name__, f"a list of {group.size}, one for each rank")
        xs = x if group.is_local else [x]
        masks = padding_mask if group.is_local and padding_mask is not None else [padding_mask] * len(xs)
        if seq_len is not None and (not isinstance(seq_len, int) or isinstance(seq_len, bool)):
            raise ArgumentError("seq_len", seq_len, "an integer")
        for x_TH, mask in zip(xs, masks, strict=True):
            check_tensor("x", x_TH, (None, self.hidden), (dtype,), group.device)
            if mask is not None:
                check_tensor("padding_mask", mask, (x_TH.shape[0],), (torch.bool,), group.device)
            if seq_len is not None and (seq_len < 1 or x_TH.shape[0] % seq_len):
                raise ArgumentError("seq_len", seq_len, f"a divisor of the {x_TH.shape[0]} tokens")
        if seq_len is None and self.router.config.seq_aux_loss and self.router.counting:
            raise ArgumentError("seq_len", None, "the tokens of a sequence, for seq_aux_loss")

    def _refuse(self, error: FlexEPError) -> None:
        """Raises `error`, having taken part in what the other ranks wait for: they learn of it and raise too."""
        if not self.dispatcher.group.is_local:
            config, device = self.dispatcher.config, self.dispatcher.group.device
            idx_TK, weights_TK = self.router(torch.zeros(0, self.hidden, device=device), seq_len=1)
            try:
                self.dispatcher.dispatch(torch.zeros(1, config.hidden + 1), idx_TK, weights_TK)
            except ArgumentError:
                raise error from None
        raise error


def _error_of(check: Callable[[], None]) -> FlexEPError | None:
    try:
        check()
    except FlexEPError as error:
        return error
    return None
