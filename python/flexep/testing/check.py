"""The one checker: a real dispatcher against the oracle, for the contract test and for `flexep verify`."""

from __future__ import annotations

from dataclasses import replace

import flexep
from flexep.testing.case import Case
from flexep.testing.compare import Mismatch, differs, digest, outside
from flexep.testing.expected import Expected
from flexep.testing.flow import Flow, Seen
from flexep.testing.oracle import oracle_of
from flexep.testing.traffic import expected_rows, snapshot, wrong_traffic


def check_case(case: Case, group: flexep.Group) -> list[Mismatch]:
    """Runs the case on `group` (of `case.ranks` ranks; collective) and returns all that differs from the
    oracle here."""
    return _run(case, group)[0]


def check_dispatchers(case: Case, group: flexep.Group, dispatchers: list[str]) -> list[Mismatch]:
    """`check_case` with every dispatcher, and their results against each other, weight gradients' bits
    included."""
    found: list[Mismatch] = []
    digests: dict[str, str] = {}
    for name in dispatchers:
        mismatches, digests[name] = _run(replace(case, dispatcher=name), group)
        found += mismatches
    if len(set(digests.values())) > 1 and not found:
        found.append(
            Mismatch(
                replace(case, dispatcher=dispatchers[0]), group.rank, "dispatchers", f"bits differ: {digests}"
            )
        )
    return found


def _run(case: Case, group: flexep.Group) -> tuple[list[Mismatch], str]:
    """(mismatches, digest of everything seen that the oracle does not fix to the bit)."""
    oracle = oracle_of(case.data)
    flow = Flow(case, group, oracle)
    found: list[Mismatch] = []
    digests = []
    for repeat in range(1 + case.repeats):
        everything = []
        for step in range(case.fresh):
            handles, at_first = None, ""
            for use in range(1 + case.cached):
                before = snapshot(flow.ep)
                handles, seen = flow.use(step, use, handles)
                if wrong := wrong_traffic(
                    before, snapshot(flow.ep), expected_rows(case, oracle, step, flow.ranks)
                ):
                    flow.problem("traffic", f"step {step}, use {use}: {wrong}")
                at_first = at_first or digest(handles)
                if digest(handles) != at_first:
                    flow.problem("handle", f"use {use} of it changed its tensors")
                for rank, saw in zip(flow.ranks, seen, strict=True):
                    place = f"step {step}, use {use}: " + (f"repeat {repeat}: " if repeat else "")
                    found += _against_oracle(case, oracle.expected(step, use, rank), rank, saw, place)
                    everything.append(_open(oracle.expected(step, use, rank), saw))
        digests.append(digest(everything))
    if len(set(digests)) > 1:
        flow.problem("determinism", f"the same inputs gave other bits: {digests}")
    flow.ep.destroy()
    return found + [Mismatch(case, *problem) for problem in flow.problems], digests[0]


def _against_oracle(case: Case, want: Expected, rank: int, seen: Seen, place: str) -> list[Mismatch]:
    wrong = [(name, differs(seen.get(name), value)) for name, value in want.exact.items()]
    wrong += [
        (f"{name} (fp64)", outside(seen.get(name), close.value, close.tolerance))
        for name, close in want.close.items()
    ]
    return [Mismatch(case, rank, name, place + how) for name, how in wrong if how is not None]


def _open(want: Expected, seen: Seen) -> Seen:
    """What was seen beside what the oracle compares bit by bit."""
    return {name: value for name, value in seen.items() if name not in want.exact}
