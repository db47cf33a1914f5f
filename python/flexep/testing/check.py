"""The one checker: a real dispatcher against the oracle, for the contract test and for `flexep verify`."""

from __future__ import annotations

from dataclasses import replace

import flexep
from flexep.testing.case import Case
from flexep.testing.compare import Mismatch, differs, digest, outside
from flexep.testing.flow import Flow, Seen
from flexep.testing.oracle import Oracle, oracle_of
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
    """(mismatches, digest of everything seen)."""
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
                    if repeat == 0:
                        found += _against_oracle(case, oracle, step, use, rank, saw)
                everything.append(seen)
        digests.append(digest(everything))
    if len(set(digests)) > 1:
        flow.problem("determinism", f"the same inputs gave other bits: {digests}")
    flow.ep.destroy()
    return found + [Mismatch(case, *problem) for problem in flow.problems], digests[0]


def _against_oracle(case: Case, oracle: Oracle, step: int, use: int, rank: int, seen: Seen) -> list[Mismatch]:
    want = oracle.expected(step, use, rank)
    wrong = [(name, differs(seen.get(name), value)) for name, value in want.exact.items()]
    wrong += [
        (name, outside(seen.get(name), close.value, close.tolerance)) for name, close in want.close.items()
    ]
    place = f"step {step}, use {use}: "
    return [Mismatch(case, rank, name, place + how) for name, how in wrong if how is not None]
