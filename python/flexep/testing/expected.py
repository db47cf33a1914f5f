"""What one rank must see in a case, from the oracle: as the place where rows arrive and as the home of its
tokens.

A row's expert output depends on its token alone, so the home view needs no other rank's rows: the oracle runs
the experts on (token, slot) pairs and one rank's part costs what the rank's real work costs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from flexep import ref
from flexep.ref.combine import slot_values
from flexep.ref.dispatch import pick
from flexep.testing.case import Case
from flexep.testing.experts import expert_partials
from flexep.testing.inputs import Inputs

FP64_LIMIT = (
    2**22
)  # R * T * K * H; larger cases rely on the recipe's bits, whose distance from fp64 smaller ones show
UNIT = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-24}


@dataclass(frozen=True)
class Close:
    """An fp64 value and how far an fp32 or narrower result may be from it."""

    value: torch.Tensor
    tolerance: torch.Tensor


@dataclass(frozen=True)
class Expected:
    """Tensors by name: `exact` to the bit, `close` within a tolerance; some are both."""

    exact: dict[str, torch.Tensor | None]
    close: dict[str, Close]


def expected(
    case: Case,
    plan: ref.Plan,
    topk_idx: list[torch.Tensor],
    inputs: Inputs,
    scale_EH: torch.Tensor,
    rank: int,
) -> Expected:
    """Everything that `rank` must see."""
    out = Expected({}, {})
    _arriving(case, plan, inputs, rank, out)
    if case.y_layout == "flat":
        _home_of_partials(case, plan, topk_idx[rank], inputs, scale_EH, rank, out)
    else:
        _home_of_slots(case, plan, topk_idx[rank], inputs, scale_EH, rank, out)
    return out


def _arriving(case: Case, plan: ref.Plan, inputs: Inputs, rank: int, out: Expected) -> None:
    """Received rows and the gradient of y, at the rank of the experts."""
    p = plan.ranks[rank]
    received = ref.dispatch_rank(plan, rank, inputs.x, None if case.weights == "none" else inputs.weights)
    names = ("x", "weights", "counts", "padded_counts", "dropped")
    out.exact.update({f"received {name}": getattr(received, name) for name in names})
    if case.layout == "flat":
        out.exact.update({"expert_idx": received.expert_idx, "row_map": received.row_map})
    if case.y_layout == "flat":
        out.exact["dy"] = pick(inputs.dz, p.flat_rank, p.flat_token)
        return
    dy = pick(inputs.dz, p.source_rank, p.source_token)
    if case.weights == "combine":
        w = pick(inputs.weights, p.source_rank, p.source_token, p.source_slot)
        used = p.source_rank >= 0  # padding stays +0 whatever the signs
        dy[used] = (w[used, None] * dy[used].float()).to(dy.dtype)
    out.exact["dy"] = dy


def _home_of_slots(
    case: Case,
    plan: ref.Plan,
    topk_idx: torch.Tensor,
    inputs: Inputs,
    scale_EH: torch.Tensor,
    rank: int,
    out: Expected,
) -> None:
    """z, dx and the weight gradients of a home rank whose experts return one row a slot."""
    world, x, w, dz = plan.world, inputs.x[rank], inputs.weights[rank], inputs.dz[rank]
    kept = plan.slot_rank[rank] >= 0
    scale = scale_EH[topk_idx.clamp(min=0)]
    scaled = x.float()[:, None] * scale
    inside = w[..., None] if case.weights == "inside" else None
    y = (scaled if inside is None else scaled * inside).to(world.dtype)
    w_TK = w if case.weights == "combine" else None
    out.exact["z"] = ref.combine_slots(plan, rank, y, w_TK, world.wire, world.dtype)
    if case.elements <= FP64_LIMIT:
        _near(plan, rank, y, w_TK, out)

    dy = dz.float()[:, None].expand_as(scaled)
    if w_TK is not None:
        dy = (w_TK[..., None] * dy).to(world.dtype).float()
    d_rows = ((dy if inside is None else dy * inside) * scale).to(world.dtype)
    out.exact["dx"] = ref.combine_slots(plan, rank, d_rows, None, world.dtype, world.dtype)
    _weight_gradient(case, plan, inputs, rank, kept, y if case.weights == "combine" else scaled, out)


def _near(plan: ref.Plan, rank: int, y: torch.Tensor, w_TK: torch.Tensor | None, out: Expected) -> None:
    """z within the stated tolerance of the fp64 sum: 8 units of the dtype times the sum of the terms'
    magnitudes."""
    world = plan.world
    z64 = ref.combine_slots(plan, rank, y, w_TK, world.wire, world.dtype, exact=True)
    w_abs = None if w_TK is None else w_TK.abs()
    size = ref.combine_slots(plan, rank, y.abs(), w_abs, world.wire, world.dtype, exact=True)
    coarsest = max(UNIT[world.dtype], UNIT[world.wire])
    # fp32 rounds every one of up to K terms; a partial sum narrower than fp32 may also fall below its
    # smallest step
    out.close["z"] = Close(z64, max(8, world.top_k) * coarsest * size + 1e-6)


def _home_of_partials(
    case: Case,
    plan: ref.Plan,
    topk_idx: torch.Tensor,
    inputs: Inputs,
    scale_EH: torch.Tensor,
    rank: int,
    out: Expected,
) -> None:
    """The same where the experts return one partial sum a received token."""
    world, x, w, dz = plan.world, inputs.x[rank], inputs.weights[rank], inputs.dz[rank]
    slot_rank = plan.slot_rank[rank]
    shape = (len(x), world.num_ranks, world.hidden)
    p_TRH, d_TRH = torch.zeros(shape, dtype=world.dtype), torch.zeros(shape, dtype=world.dtype)
    for r in range(world.num_ranks):
        tokens = (plan.token_row[rank][:, r] >= 0).nonzero()[:, 0]
        rows = x[tokens].requires_grad_()
        here = (slot_rank == r)[tokens]
        experts = torch.where(here, topk_idx[tokens], -1)
        weights = torch.where(here, w[tokens], 0.0) if case.weights == "inside" else None
        y = expert_partials(scale_EH, rows, experts, weights)
        (d_rows,) = torch.autograd.grad(y, rows, dz[tokens])
        p_TRH[tokens, r], d_TRH[tokens, r] = y.detach(), d_rows
    out.exact["z"] = ref.combine_partials(plan, rank, p_TRH, world.wire, world.dtype)
    out.exact["dx"] = ref.combine_partials(plan, rank, d_TRH, world.dtype, world.dtype)
    scaled = x.float()[:, None] * scale_EH[topk_idx.clamp(min=0)]
    _weight_gradient(case, plan, inputs, rank, slot_rank >= 0, scaled, out)


def _weight_gradient(
    case: Case,
    plan: ref.Plan,
    inputs: Inputs,
    rank: int,
    kept: torch.Tensor,
    u_TKH: torch.Tensor,
    out: Expected,
) -> None:
    """Gradient of topk_weights [T, K]: carried home bit for bit, or a dot of u and dz over H; zero without a
    row."""
    if case.weights == "nowhere":  # then the check itself hands a gradient to r.weights
        out.exact["dweights"] = slot_values(plan, rank, inputs.dw)
    if case.weights not in ("inside", "combine"):
        return
    u, dz = u_TKH.double(), inputs.dz[rank].double()[:, None]
    value = torch.where(kept, (u * dz).sum(2), 0.0)
    # any fixed order over H in at least 16 lanes: H/16 sums and one product an element, and the lanes
    magnitude = torch.where(kept, (u * dz).abs().sum(2), 0.0)
    out.close["dweights"] = Close(value, (case.hidden / 16 + 20) * 2.0**-24 * magnitude)
