"""Processes that end with a dispatcher, a result and a handle alive: python -m tests.failure.exits FOLDER BACKEND.

Twice two ranks: first both end between dispatch and combine, then rank 0 does and rank 1 meets nobody in combine. Exits
with 0, and says nothing, if all of them end well. They are forked, for an interpreter that has torch, but end in full.
"""

from __future__ import annotations

import os
import sys
import warnings

import torch
import torch._dynamo  # custom ops load it; here once, not once a rank
import torch.distributed as dist

import flexep
from tests.contract.rounds import GOOD, inputs, works
from tests.failure.scenarios import TIMEOUT


def play(rank: int, store: str, backend: str, alone: bool) -> object:
    """One rank; returns what must live until the interpreter is gone."""
    torch.set_num_threads(1)
    group = flexep.Group.from_store(dist.FileStore(store, -1), rank, 2)
    ep = flexep.Dispatcher(group, backend=backend, **GOOD | {"timeout": TIMEOUT})
    assert works(ep)
    result = ep.dispatch(**inputs())
    if alone:
        try:
            ep.combine(result.x, result.handle)
        except (flexep.Timeout, flexep.PeerLost):
            return group, ep, result
        raise AssertionError("combine went through without rank 0")
    return group, ep, result


if __name__ == "__main__":
    folder, backend = sys.argv[1:]
    for early in (False, True):
        ranks = []
        for rank in range(2):
            with warnings.catch_warnings():  # numpy's idle threads; nothing here needs them
                warnings.simplefilter("ignore")
                ranks.append(os.fork())
            if ranks[-1] == 0:
                alive = play(rank, f"{folder}/{early}", backend, early and rank == 1)
                sys.exit()
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
        if codes != [0, 0]:
            sys.exit(f"ranks ended with {codes} (one of them early: {early})")
