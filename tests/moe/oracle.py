"""The MoE layer in fp64 in one process: every expert sees every token and the routing picks from the results."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from flexep.moe.layer import MoELayer
from flexep.ref import router as ref
from tests.moe.draws import rule_of

EXPERT_PARTS = ("w13", "w2", "b13", "b2")


def _swiglu(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


Keep = Callable[[list[list[int]], Tensor], list[list[bool]]]


def keep_by_rank(layer: MoELayer, counts_R: Sequence[int]) -> Keep | None:
    """Which slots survive the capacity, of which every rank has its own; None without a capacity."""
    config = layer.router.config
    if config.capacity_factor is None:
        return None
    factor = config.capacity_factor

    def keep(chosen: list[list[int]], weights_TK: Tensor) -> list[list[bool]]:
        kept, start = [], 0
        for count in counts_R:
            part = slice(start, start := start + count)
            kept += ref.keep(chosen[part], weights_TK[part], config.num_experts, factor, config.drop_by)
        return kept

    return keep


def moe_oracle(
    x_TH: Tensor, parts: dict[str, Tensor], rule: ref.Rule, gone: Sequence[bool], keep: Keep | None
) -> Tensor:
    """z [T, H] of all tokens; `gone` marks padding, `keep` says which slots are not dropped. All fp64.

    parts: "router" [E, H]; "w13" [E, D, 2I] and "w2" [E, I, D] by global expert id, perhaps "b13", "b2"; perhaps
    "down" [D, H] and "up" [H, D]; perhaps "shared.w13", "shared.w2", "shared.gate".
    """
    zero_TH = torch.zeros_like(x_TH)
    gone_T1 = torch.tensor(list(gone), dtype=torch.bool)[:, None]
    x_TH = torch.where(gone_T1, zero_TH, x_TH)
    logits_TE = x_TH @ parts["router"].t()
    chosen = ref.choose(logits_TE, rule)
    weights_TK = ref.weights(logits_TE, chosen, rule)
    if keep is not None:
        slots = [[-1] * len(row) if padding else row for row, padding in zip(chosen, gone, strict=True)]
        weights_TK = weights_TK * torch.tensor(keep(slots, weights_TK)).view_as(weights_TK)
    rows_TD = x_TH @ parts["down"].t() if "down" in parts else x_TH
    gate_up = torch.einsum("td,edi->eti", rows_TD, parts["w13"])
    if "b13" in parts:
        gate_up = gate_up + parts["b13"][:, None]
    y_ETD = torch.einsum("eti,eid->etd", _swiglu(gate_up), parts["w2"])
    if "b2" in parts:
        y_ETD = y_ETD + parts["b2"][:, None]
    picks = torch.tensor(chosen, dtype=torch.int64).view(len(x_TH), rule.top_k)
    picked_TKD = y_ETD.transpose(0, 1).gather(1, picks[..., None].expand(-1, -1, y_ETD.shape[2]))
    z_TH = (picked_TKD * weights_TK[..., None]).sum(1)
    if "up" in parts:
        z_TH = z_TH @ parts["up"].t()
    if "shared.w13" in parts:
        shared_TH = _swiglu(x_TH @ parts["shared.w13"]) @ parts["shared.w2"]
        if "shared.gate" in parts:
            shared_TH = shared_TH / (1 + torch.exp(-x_TH @ parts["shared.gate"].t()))
        z_TH = z_TH + shared_TH
    return torch.where(gone_T1, zero_TH, z_TH)


def parts_of(layer: MoELayer, of_gradients: bool = False) -> dict[str, Tensor]:
    """The parameters of a layer on a local group (or their gradients), named as `moe_oracle` wants them."""

    def read(parameter: Tensor) -> Tensor:
        if of_gradients:
            assert parameter.grad is not None
            return parameter.grad
        return parameter.detach()

    order = torch.tensor([expert for experts in layer.experts for expert in experts.expert_ids]).argsort()
    found = {"router": read(layer.router.weight)}
    for name in EXPERT_PARTS:
        if getattr(layer.experts[0], name) is not None:
            found[name] = torch.cat([read(getattr(experts, name)) for experts in layer.experts])[order]
    for name in ("down", "up"):
        if getattr(layer, name) is not None:
            found[name] = read(getattr(layer, name))
    if layer.shared is not None:
        found |= {f"shared.{name}": read(getattr(layer.shared.feed_forward, name)) for name in ("w13", "w2")}
        if layer.shared.gate is not None:
            found["shared.gate"] = read(layer.shared.gate)
    return found


def expected(
    layer: MoELayer, counts_R: Sequence[int], x_TH: Tensor, grad_TH: Tensor, gone: Sequence[bool]
) -> dict[str, Tensor]:
    """{"z", "x": gradient, and the gradient of every part} in fp64, where z receives the gradient `grad`."""
    wide = {"x": x_TH, **parts_of(layer)}
    wide = {name: value.detach().double().requires_grad_() for name, value in wide.items()}
    parts = {name: value for name, value in wide.items() if name != "x"}
    keep = keep_by_rank(layer, counts_R)
    z_TH = moe_oracle(wide["x"], parts, rule_of(layer.router.config), gone, keep)
    z_TH.backward(grad_TH.double())
    return {"z": z_TH.detach()} | {name: value.grad for name, value in wide.items()}
