"""Why a run goes on without a column, and when it must not."""

from __future__ import annotations

from flexep.benchmark.case import ALL, BenchCase
from flexep.benchmark.library import Column
from flexep.errors import PeerRefused, Unavailable
from flexep.testing.pool import RankFailed


def reason(case: BenchCase, column: Column, failed: RankFailed) -> str:
    """What a column that could not be opened is left out for, in one line.

    Raises `failed` for anything but Unavailable in a dispatcher of ours, and Unavailable for one that was asked for by
    name. Of other libraries whatever ends on all ranks leaves them out.
    """
    # The others only say that one rank refused.
    errors = [error for error in failed.errors.values() if not isinstance(error, PeerRefused)]
    said = str((errors or list(failed.errors.values()))[0]).partition("\n")[0]
    if column[0] == "flexep":
        if not all(isinstance(error, Unavailable) for error in errors):
            raise failed
        if case.dispatchers != ALL:
            raise Unavailable(f"dispatchers = {column[1]!r}: {said}") from failed
    return said
