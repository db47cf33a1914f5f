"""A rank that is killed while it has windows open, or while ranks open them: nothing is left, and the others go on."""

from __future__ import annotations

import signal
import sys
import time

import pytest

from flexep.errors import PeerLost, Timeout
from flexep.transport._fd_passing import Mailbox
from flexep.transport.window_memory import WindowMemory, open_windows
from tests.failure.ranks import DYING, Crew, Rank, Tried
from tests.transport.fake_driver import reached_by
from tests.transport.held import open_files, window_mappings

R = 3
NBYTES = 3 * 4096 + 128  # no whole number of pages
TIMEOUT = 20.0
OPEN_SECONDS = 2.0
SHARED_FOLDERS = ("/dev/shm/", "/tmp/", "/var/tmp/")


def outlives(me: Rank, transport: str, killed: str) -> tuple[Tried, int, float, list[str]]:
    """Rank 1 dies with open windows ("open"), or while ranks swap theirs ("swap"); the rest open windows without it.

    Returns what opening came to, windows still mapped after closing, the sum that a view of the dead rank's window
    gives, and files of this process that have a name in a folder shared by processes.
    """
    before = open_files()  # the interpreter's own libraries may lie in such a folder
    if me.rank == 1 and killed == "swap":
        Mailbox.swap = me.die
    opened: list[WindowMemory] = []
    group = reached_by(transport, me.group)
    tried = me.attempt(lambda: opened.append(open_windows(group, NBYTES, OPEN_SECONDS)))
    total = 0.0
    for one in opened:
        one.view(me.rank)[:] = me.rank + 1
        me.group.barrier(TIMEOUT)
        if me.rank == 1:
            me.die()
        time.sleep(0.5)
        total = float(one.view(1).sum())
        one.close()
    left = window_mappings()
    us = me.regroup([1])
    again = open_windows(reached_by(transport, us.group), NBYTES, TIMEOUT)
    assert not any(again.view(rank).any() for rank in range(us.size))
    new = [path for path in open_files() - before if not path.startswith(sys.prefix)]
    named = [path for path in new if path.startswith(SHARED_FOLDERS)]
    again.close()
    return tried, left, total, named


@pytest.mark.parametrize("transport", ["shm", "peer"])
@pytest.mark.parametrize("killed", ["open", "swap"])
def test_a_killed_rank_leaves_nothing_and_keeps_nobody(transport: str, killed: str) -> None:
    with Crew(R, outlives, transport, killed) as crew:
        died = crew.heard(1, DYING)
        found = crew.values(but=1)
        assert crew.exit_code(1) == -signal.SIGKILL
    for tried, left, total, named in found.values():
        if killed == "open":
            assert tried.error is None
            assert total == 2 * NBYTES  # the dead rank's window is still there for whoever mapped it
        else:
            assert isinstance(tried.error, (Timeout, PeerLost)), tried.error
            assert "open_windows" in str(tried.error)
            assert tried.ended - died < 1.5 * OPEN_SECONDS
        assert (left, named) == (0, [])
