"""One use of a dispatcher in a case: dispatch -> experts -> combine -> backward, on the ranks of this
process."""

from __future__ import annotations

from typing import Any

import torch

import flexep
from flexep.testing.case import Case
from flexep.testing.compare import digest, raw
from flexep.testing.experts import TakeRows, expert_partials, expert_rows
from flexep.testing.oracle import Oracle
from flexep.testing.windows import sends_ahead, window_bytes

Seen = dict[str, "torch.Tensor | None"]
GUARD_ROWS = 2
TIMEOUT = 60.0  # seconds; a rank that failed alone must not hold up the others for the generous default


class Flow:
    """A dispatcher made for a case, and what its ranks see. `problems` collects broken promises that are no
    tensors."""

    def __init__(self, case: Case, group: flexep.Group, oracle: Oracle) -> None:
        self.case, self.group, self.oracle = case, group, oracle
        world = oracle.world
        self.ranks = list(group.hosted)
        self.problems: list[tuple[int, str, str]] = []
        self.ep = flexep.Dispatcher(
            group, num_experts=world.num_experts, hidden=world.hidden, top_k=world.top_k,
            max_tokens=world.max_tokens, backend=case.dispatcher, dtype=world.dtype,
            combine_wire=case.combine_wire, domain_size=case.domain_size, layout=case.layout,
            alignment=case.alignment, capacity=world.capacity, overflow=case.overflow,
            placement=world.placement, timeout=TIMEOUT, window_bytes=window_bytes(case, world),
            send_ahead=sends_ahead(case),
        )  # fmt: skip

    def problem(self, what: str, detail: str, rank: int | None = None) -> None:
        self.problems.append((self.ranks[0] if rank is None else rank, what, detail))

    def guarded(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(the tensor as rows inside a larger buffer, that buffer): whatever is written around it is
        noticed."""
        fill = torch.nan if tensor.is_floating_point() else -7
        rows = (len(tensor) + 2 * GUARD_ROWS, *tensor.shape[1:])
        buffer = torch.full(rows, fill, dtype=tensor.dtype, device=self.group.device)
        view = buffer[GUARD_ROWS : GUARD_ROWS + len(tensor)]
        view.copy_(tensor)
        return view.detach(), buffer

    def _one(self, values: list[Any]) -> Any:
        """Values of the hosted ranks as the API takes them: a list only in a local group."""
        return values if self.group.is_local else values[0]

    def _all(self, result: Any) -> list[Any]:
        return list(result) if self.group.is_local else [result]

    def use(
        self, step: int, use: int, handles: list[flexep.Handle] | None
    ) -> tuple[list[flexep.Handle], list[Seen]]:
        """One dispatch (through `handles` if given), experts, combine and backward; what each hosted rank
        saw."""
        case, inputs = self.case, self.oracle.inputs(step, use)
        watched: list[tuple[torch.Tensor, torch.Tensor]] = []  # (tensor nobody may write to, what is in it)

        def place(tensor: torch.Tensor, grad: bool) -> torch.Tensor:
            view, buffer = self.guarded(tensor)
            watched.append((buffer, buffer.clone()))
            return view.requires_grad_() if grad else view

        xs = [place(inputs.x[r], True) for r in self.ranks]
        ws = None if case.weights == "none" else [place(inputs.weights[r], True) for r in self.ranks]
        routing = {"topk_idx": self._one([place(self.oracle.topk_idx(step)[r], False) for r in self.ranks])}
        if handles is not None:
            routing = {"handle": self._one(handles)}
        received = self._all(
            self.ep.dispatch(self._one(xs), topk_weights=None if ws is None else self._one(ws), **routing)
        )
        handles = [r.handle for r in received]
        hashes = [digest(h) for h in handles]
        if "handle" not in routing:
            self._check_overflow(step)
        ys = [self._experts(step, rank, r) for rank, r in zip(self.ranks, received, strict=True)]
        watched += [(y, y.detach().clone()) for y in ys]
        for tensor in (
            *ys,
            *(r.x for r in received),
            *(r.weights for r in received if r.weights is not None),
        ):
            tensor.retain_grad()
        at_combine = self._one([r.weights for r in received]) if case.weights == "combine" else None
        zs = self._all(self.ep.combine(self._one(ys), self._one(handles), at_combine, y_layout=case.y_layout))

        roots, grads = list(zs), [inputs.dz[r].to(self.group.device) for r in self.ranks]
        if (
            case.weights == "nowhere"
        ):  # weights that reach nothing else get a gradient of their own to carry home
            roots += [r.weights for r in received]
            grads += [
                self._fit(inputs.dw[rank], r.weights) for rank, r in zip(self.ranks, received, strict=True)
            ]
        torch.autograd.backward(roots, grads)
        if not all(torch.equal(raw(tensor), raw(before)) for tensor, before in watched):
            self.problem("inputs", "written to, or written around, by dispatch, combine or backward")
        for rank, handle, at_first in zip(self.ranks, handles, hashes, strict=True):
            if digest(handle) != at_first:
                self.problem("handle", "changed by combine or backward", rank)
        seen = [self._seen(r, y, z, x, None if ws is None else ws[i])
                for i, (r, y, z, x) in enumerate(zip(received, ys, zs, xs, strict=True))]  # fmt: skip
        return handles, seen

    def _fit(self, gradient: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """The gradient where it has the right shape; zeros where rows came out wrong (which is reported
        anyway)."""
        return gradient.to(like.device) if gradient.shape == like.shape else torch.zeros_like(like)

    def _experts(self, step: int, rank: int, r: flexep.DispatchResult) -> torch.Tensor:
        """y of one rank. Wrong shapes are reported elsewhere; here they must only not leave the other ranks
        alone."""
        case, plan, device = self.case, self.oracle.plan(step).ranks[rank], self.group.device
        scale_EH = self.oracle.scale_EH.to(device)
        weights = r.weights if case.weights == "inside" else None
        flat_shape = r.expert_idx is not None and r.expert_idx.shape == plan.expert_idx.shape
        if case.layout == "flat" and not (
            flat_shape and r.row_map is not None and len(r.row_map) == len(plan.expert)
        ):
            return (
                r.x * 0
                if case.y_layout == "flat"
                else r.x.sum() * r.x.new_zeros(r.handle.num_rows, case.hidden)
            )
        if case.layout == "expert_major":
            fits = len(r.x) == len(plan.expert)
            return expert_rows(scale_EH, r.x, plan.expert.to(device), weights) if fits else r.x * 0
        assert r.expert_idx is not None
        assert r.row_map is not None
        here = torch.tensor([*self.oracle.world.experts_of(rank), -1], device=device)  # a rank may have none
        if case.y_layout == "flat":
            local = r.expert_idx.long()
            expert = torch.where(local < 0, -1, here[local.clamp(0, len(here) - 1)])
            return expert_partials(scale_EH, r.x, expert, weights)
        if weights is not None:
            weights = weights[r.row_map.long().clamp(min=0), plan.source_slot.to(device).clamp(min=0)]
        return expert_rows(scale_EH, TakeRows.apply(r.x, r.row_map), plan.expert.to(device), weights)

    def _check_overflow(self, step: int) -> None:
        """Rows dropped under overflow="error" are announced by name, on every rank, once; otherwise never."""
        dropped = sum(int(p.dropped.sum()) for p in self.oracle.plan(step).ranks)
        must = dropped if self.case.overflow == "error" else 0
        for expected in (must, 0):
            said = 0
            try:
                self.ep.check()
            except flexep.CapacityExceeded as error:
                said = error.dropped
            if said != expected:
                self.problem("CapacityExceeded", f"announced {said} dropped rows, want {expected}")

    def _seen(
        self,
        r: flexep.DispatchResult,
        y: torch.Tensor,
        z: torch.Tensor,
        x: torch.Tensor,
        w: torch.Tensor | None,
    ) -> Seen:
        names = ("x", "weights", "counts", "padded_counts", "dropped")
        seen: Seen = {f"received {name}": getattr(r, name) for name in names}
        if self.case.layout == "flat":
            seen.update({"expert_idx": r.expert_idx, "row_map": r.row_map})
        seen.update({"z": z, "dy": y.grad, "dx": x.grad})
        if w is not None:
            seen["dweights"] = w.grad
        return {name: None if value is None else value.detach().cpu() for name, value in seen.items()}
