"""Processes that end with a dispatcher, a result and a handle alive: python -m tests.failure.exits FOLDER.

For every dispatcher twice: first both ranks end between dispatch and combine, then rank 0 does and rank 1 goes on to
combine. Exits with 0, and says nothing, if all of them end well. They are forked, because importing torch takes
seconds, but end as an interpreter ends.
"""

from __future__ import annotations

import gc
import os
import sys
import warnings
from dataclasses import replace

import torch
import torch._dynamo  # custom ops load it; here once, not once a rank
import torch.distributed as dist

import flexep
from tests.contract.rounds import inputs, works
from tests.failure.scenarios import SETUPS, Setup, make


def play(rank: int, store: str, setup: Setup, combines: bool) -> object:
    """One rank; returns what lives on. A combine meets nobody of rank 0."""
    torch.set_num_threads(1)
    group = flexep.Group.from_store(dist.FileStore(store, -1), rank, setup.ranks)
    ep = make(group, setup)
    assert works(ep)
    result = ep.dispatch(**inputs())
    if combines:
        try:
            ep.combine(result.x, result.handle)
        except (flexep.Timeout, flexep.PeerLost):
            return group, ep, result
        raise AssertionError("combine went through without rank 0")
    return group, ep, result


def exit_codes(folder: str, setup: Setup, early: bool) -> list[int]:
    """Of all ranks. With `early`, rank 0 is the one that does not combine."""
    ranks = []
    for rank in range(setup.ranks):
        with warnings.catch_warnings():  # numpy's idle threads; nothing here needs them
            warnings.simplefilter("ignore")
            ranks.append(os.fork())
        if ranks[-1] == 0:
            global alive  # until the interpreter is gone
            alive = play(rank, f"{folder}/{setup.backend}-{early}", setup, early and rank > 0)
            sys.exit()
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]


if __name__ == "__main__":
    gc.freeze()  # what is here already need not be taken apart by every rank
    for each in SETUPS:
        setup = replace(each, ranks=2, domain_size=None if each.domain_size is None else 1)
        for early in (False, True):
            if any(codes := exit_codes(sys.argv[1], setup, early)):
                sys.exit(f"{setup}: ranks ended with {codes} (rank 0 early: {early})")
