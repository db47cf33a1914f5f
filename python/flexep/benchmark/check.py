"""Whether a library did the work that is timed: its rows and its sums against the oracle, on every rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

from flexep import ref
from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import Delivered, Library, Routed
from flexep.ref import Plan, World
from flexep.testing.compare import differs, outside
from flexep.testing.expected import UNIT
from flexep.testing.experts import expert_rows, expert_scales
from flexep.testing.inputs import make_inputs, topk_indices


@dataclass(frozen=True)
class Sums:
    """z [T, H] of the home rank: the recipe's bits, or an fp64 value and how far from it plain bf16 sums may be."""

    exact: torch.Tensor
    value: torch.Tensor
    tolerance: torch.Tensor


class Answers:
    """One rank's inputs and right answers at one step, for libraries that promise `world`.

    The experts of a timed run hand back what they received (`z`); those of a check multiply by a diagonal matrix of
    their own (`z_scaled`), so that a row from the wrong expert cannot pass.
    """

    def __init__(self, case: BenchCase, world: World, rank: int, step: int) -> None:
        self.world, self.rank = world, rank
        self.topk_idx = topk_indices(case.data, world, step)
        self.plan: Plan = ref.make_plan(world, self.topk_idx)
        inputs = make_inputs(case.data, self.plan, step, 0)
        weights = inputs.weights if case.weights == "combine" else None
        self.routed = Routed(inputs.x[rank], self.topk_idx[rank], None if weights is None else weights[rank])
        self.received = ref.dispatch_rank(self.plan, rank, inputs.x, weights)
        self.scale_EH = expert_scales(case.data)
        self.z, self.z_scaled = self._sums(False), self._sums(True)

    def _sums(self, scaled: bool) -> Sums:
        x, w_TK, world = self.routed.x, self.routed.weights, self.world
        if world.layout == "flat":  # a rank's partial sum: the token itself, or times a vector of that rank
            size_RH = self.scale_EH[: world.num_ranks] if scaled else torch.ones(world.num_ranks, 1)
            p_TRH = (x.float()[:, None] * _rows(size_RH, world.num_ranks)).to(world.dtype)
            exact = ref.combine_partials(self.plan, self.rank, p_TRH, world.wire, world.dtype)
            return Sums(exact, exact.double(), torch.zeros(()))
        scale = (
            self.scale_EH[self.topk_idx[self.rank].clamp(min=0)] if scaled else torch.ones(1, world.top_k, 1)
        )
        y_TKH = (x.float()[:, None] * scale).to(world.dtype)
        wires = (world.wire, world.dtype)
        size = ref.combine_slots(
            self.plan, self.rank, y_TKH.abs(), None if w_TK is None else w_TK.abs(), *wires, exact=True
        )
        return Sums(
            exact=ref.combine_slots(self.plan, self.rank, y_TKH, w_TK, *wires),
            value=ref.combine_slots(self.plan, self.rank, y_TKH, w_TK, *wires, exact=True),
            # every one of K products, weights and running sums is rounded to the dtype
            tolerance=(world.top_k + 2) * UNIT[world.dtype] * size + 1e-6,
        )

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """What the check's experts make of received rows x."""
        p, world = self.plan.ranks[self.rank], self.world
        if world.layout == "flat":
            return (x.float() * _rows(self.scale_EH, world.num_ranks)[self.rank].to(x.device)).to(x.dtype)
        return expert_rows(self.scale_EH.to(x.device), x, p.expert.to(x.device), None)

    def wrong_rows(self, got: Delivered) -> list[str]:
        """How delivered rows, counts and weights differ from the oracle's."""
        want = self.received
        how = {"rows": differs(got.x, want.x), "counts": differs(got.counts, want.counts)}
        if got.weights is not None:
            how["weights"] = differs(got.weights, want.weights)
        return [f"{name}: {text}" for name, text in how.items() if text is not None]

    def wrong_sums(self, got: torch.Tensor, want: Sums, exact: bool) -> list[str]:
        """How z differs: in any bit, or from fp64 by more than rounding explains."""
        how = differs(got, want.exact) if exact else outside(got, want.value, want.tolerance)
        return [] if how is None else [f"z: {how}"]


def _rows(size: torch.Tensor, ranks: int) -> torch.Tensor:
    """A row for every rank, however few experts there are."""
    return size[torch.arange(ranks) % len(size)]


@lru_cache(maxsize=8)
def answers(case: BenchCase, world: World, rank: int, step: int) -> Answers:
    """The answers of one promise, shared by all libraries that give it."""
    return Answers(case, world, rank, step)


def check_library(case: BenchCase, library: Library, rank: int) -> list[str]:
    """Runs every step once, with experts that cannot be confused; what is wrong here. Collective."""
    found = []
    for step in range(case.steps):
        right = answers(case, library.world, rank, step)
        delivered = library.dispatch(step)
        found += right.wrong_rows(delivered)
        # Rows of a wrong shape are reported; the others must still not wait for this rank.
        fits = delivered.x.shape == right.received.x.shape
        y = right.scaled(delivered.x) if fits else delivered.x
        found += right.wrong_sums(library.combine(y, delivered), right.z_scaled, library.library == "flexep")
    return found
