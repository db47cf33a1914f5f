"""Whether a library did the work that is timed: its rows and its sums against the oracle, on every rank."""

from __future__ import annotations

from functools import cached_property, lru_cache
from typing import Any

import torch

from flexep import ref
from flexep.benchmark.case import BenchCase
from flexep.benchmark.library import Delivered, Promising, Routed, SelfChecked
from flexep.ref import Plan, World
from flexep.testing.compare import differs, outside
from flexep.testing.expected import UNIT
from flexep.testing.experts import expert_rows, expert_scales
from flexep.testing.inputs import Inputs, make_inputs


class Answers:
    """One rank's inputs and right answers at one step, for libraries that promise `world`.

    The experts of a timed run hand back what they received; those of a check ("scaled") multiply by a diagonal matrix
    of their own, so that a row from the wrong expert cannot pass. Sums are made when somebody asks: they take longest.
    """

    def __init__(self, case: BenchCase, world: World, rank: int, step: int) -> None:
        self.world, self.rank = world, rank
        self.topk_idx, inputs = _inputs(case, step)
        self.plan: Plan = ref.make_plan(world, self.topk_idx)
        self._x = inputs.x
        self._weights = inputs.weights if case.weights == "combine" else None
        weights = None if self._weights is None else self._weights[rank]
        self.routed = Routed(inputs.x[rank], self.topk_idx[rank], weights)
        self.scale_EH = expert_scales(case.data)

    @cached_property
    def received(self) -> ref.Received:
        return ref.dispatch_rank(self.plan, self.rank, self._x, self._weights)

    @cached_property
    def exact(self) -> list[torch.Tensor]:
        """z [T, H] in the recipe's bits, of a timed run and of a check."""
        return [self._combine(self._terms(scaled), self.routed.weights, False) for scaled in (False, True)]

    @cached_property
    def bounded(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """z [T, H] in fp64 and how far from it plain sums in the dtype may be, of a timed run and of a check."""
        w_TK, both = self.routed.weights, []
        for scaled in (False, True):
            terms = self._terms(scaled)
            size = self._combine(terms.abs(), None if w_TK is None else w_TK.abs(), True)
            # every one of K products, weights and running sums is rounded to the dtype
            tolerance = (self.world.top_k + 2) * UNIT[self.world.dtype] * size + 1e-6
            both.append((self._combine(terms, w_TK, True), tolerance))
        return both

    def _terms(self, scaled: bool) -> torch.Tensor:
        """What experts hand back for each token of this rank: [T, K, H]; [T, R, H] where they add up themselves."""
        x, world = self.routed.x, self.world
        if world.layout == "flat":  # a rank's partial sum: the token itself, or times a vector of that rank
            size_RH = self.scale_EH[: world.num_ranks] if scaled else torch.ones(world.num_ranks, 1)
            return (x.float()[:, None] * _rows(size_RH, world.num_ranks)).to(world.dtype)
        own = (
            self.scale_EH[self.topk_idx[self.rank].clamp(min=0)] if scaled else torch.ones(1, world.top_k, 1)
        )
        return (x.float()[:, None] * own).to(world.dtype)

    def _combine(self, terms: torch.Tensor, w_TK: torch.Tensor | None, exact: bool) -> torch.Tensor:
        wires = (self.world.wire, self.world.dtype)
        if self.world.layout == "flat":
            return ref.combine_partials(self.plan, self.rank, terms, *wires, exact=exact)
        return ref.combine_slots(self.plan, self.rank, terms, w_TK, *wires, exact=exact)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """What the check's experts make of received rows x."""
        p, world = self.plan.ranks[self.rank], self.world
        if world.layout == "flat":
            return (x.float() * _rows(self.scale_EH, world.num_ranks)[self.rank].to(x.device)).to(x.dtype)
        return expert_rows(self.scale_EH.to(x.device), x, p.expert.to(x.device), None)

    def wrong_rows(self, got: Delivered, order: torch.Tensor | None) -> list[str]:
        """How delivered rows, counts and weights differ from the oracle's; `order` as Promising.order has it."""
        want = self.received
        x = got.x if order is None else got.x[order]
        how = {"rows": differs(x, want.x), "counts": differs(got.counts, want.counts)}
        if got.weights is not None:
            how["weights"] = differs(got.weights, want.weights)
        return [f"{name}: {text}" for name, text in how.items() if text is not None]

    def wrong_sums(self, got: torch.Tensor, scaled: bool, exact: bool) -> list[str]:
        """How z differs: in any bit, or from fp64 by more than rounding explains."""
        how = differs(got, self.exact[scaled]) if exact else outside(got, *self.bounded[scaled])
        return [] if how is None else [f"z: {how}"]


def _rows(size: torch.Tensor, ranks: int) -> torch.Tensor:
    """A row for every rank, however few experts there are."""
    return size[torch.arange(ranks) % len(size)]


def _inputs(case: BenchCase, step: int) -> tuple[list[torch.Tensor], Inputs]:
    """topk_idx and the tensors of all ranks, the same for every promise."""
    return _kept_inputs(case.inputs, step)


@lru_cache(maxsize=4)
def _kept_inputs(case: BenchCase, step: int) -> tuple[list[torch.Tensor], Inputs]:
    topk_idx = case.topk_idx(case.world, step)
    return topk_idx, make_inputs(case.data, ref.make_plan(case.world, topk_idx), step, 0)


@lru_cache(maxsize=8)
def _kept_answers(case: BenchCase, world: World, rank: int, step: int) -> Answers:
    return Answers(case, world, rank, step)


def answers(case: BenchCase, world: World, rank: int, step: int) -> Answers:
    """The answers of one promise, shared by all libraries that give it and by all runs with the same inputs."""
    return _kept_answers(case.asked, world, rank, step)


def forget() -> None:
    """Lets go of all inputs and answers."""
    _kept_inputs.cache_clear()
    _kept_answers.cache_clear()


Checked = Promising[Any] | SelfChecked[Any]


def check_library(case: BenchCase, library: Checked, rank: int) -> list[str]:
    """Runs every step once, with experts that cannot be confused; what is wrong here. Collective."""
    found = []
    for step in range(case.steps):
        delivered = library.dispatch(step)
        if isinstance(library, SelfChecked):
            found += library.wrong(library.combine(delivered.x, delivered))
            continue
        right = answers(case, library.world, rank, step)
        order = library.order(delivered)
        found += right.wrong_rows(delivered, order)
        # Rows of a wrong shape are reported; the others must still not wait for this rank.
        rows = len(delivered.x) if order is None else len(order)
        fits = rows == len(right.received.x)
        y = _scaled(right, delivered.x, order) if fits else delivered.x
        found += right.wrong_sums(library.combine(y, delivered), True, library.exact)
    return found


def check_last(
    case: BenchCase, library: Checked, rank: int, step: int, delivered: Delivered, z: torch.Tensor
) -> list[str]:
    """What is wrong with the rows and sums that the last roundtrip of a chain left."""
    if isinstance(library, SelfChecked):
        return library.wrong(z)
    right = answers(case, library.world, rank, step)
    return right.wrong_rows(delivered, library.order(delivered)) + right.wrong_sums(z, False, library.exact)


def _scaled(right: Answers, x: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    """Rows of the check's experts, where the library has them."""
    if order is None:
        return right.scaled(x)
    y = torch.empty_like(x)
    y[order] = right.scaled(x[order])
    return y
