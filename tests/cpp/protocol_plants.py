"""Bugs to plant in copies of csrc/proto, and where the simulator must notice each.

All of them go into one copy, which is compiled once: the environment variable PLANTED chooses one when a program runs.
"""

from __future__ import annotations

import shutil
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from tests.cpp.compile import ROOT


@dataclass(frozen=True)
class Plant:
    """`right` is an expression, or statements that end with ';' and perhaps a comment. `seen_in`: a scenario.
    `seen_as`: its failure."""

    name: str
    file: str
    right: str
    wrong: str
    seen_in: str
    seen_as: str


SETTLE = "mem_.drain();\n    team_.sync();"
GIVEN_BACK = "last ? all_given_back(op_.epoch, op_.op) : signal(chunk + 1)"
ARRIVED = "await(ready_word(channel), line.here, signal(chunk + 1), line.peer)"
ARRIVED_BEFORE = (
    "await(ready_word(channel), line.here, make_signal(op_.epoch - 1, chunk + 1, op_.op), line.peer)"
)
TAKES = "last_used(channel, line) = op_.epoch;"
EMPTIED = "await(free_word(channel), line.here, all_given_back(op_.epoch, op_.op), line.peer)"
GAVE_UP = "mem.load(layout.word(Word::stopped, peer)) == kGaveUp"
LEFT = "mem.load(layout.word(Word::stopped, awaited)) == kLeft"
STOP_ONCE = "if (!mem_.stop_once()) return;"
STOP_FIRST = "if (!mem_.stop_once() || waited.status == Status::stopped) return;"
RELAY_LINE = "return {member, domain(source) * domain_size + index(member), source};"
RELAY_LINE_OF_OTHER = "return {member, source, index(member)};"
RELAY_ARRIVES = """\
const Status status = exchange.arrive(from, in(i), chunk);
          if (status != Status::arrived) return status;"""
RELAY_POSTS = "exchange.release(from, in(i), chunk, last)"
TEAM_MOVES = """\
only_move(move);
    exchange_.settle();
    post(exchange_);"""
TEAM_MOVES_LATE = """\
post(exchange_);
    only_move(move);
    exchange_.settle();"""
GRANTED, MOVED_ALL = "granted_ >= step_", "progress_.moved(mover) < step_"
MOVED = "mover_.done()"
HELD_UP = "settle();  // whom the waiter waits for may wait for these"
NO_MORE = "progress_.granted() == kNoMore"

STEP_OF = "step_of_.get(over_ & (kTags - 1)) - 1"

READ_BY_TWO = "top_k > 1 && readers[list + 1] >= 0"

AHEAD_CLAIM = "exchange.claim(Channel::pull, Topology::direct(me, (me + step) % R), 0)"
AHEAD_SAID_SOON = """\
[&] {
            const Line to = Topology::direct(me, (me + step) % R);
            const Status status = exchange.claim(Channel::pull, to, 0);
            exchange.announce(Channel::pull, to, chunks - 1);
            return status;
          }()"""
AHEAD_POSTS = "exchange.announce(Channel::pull, Topology::direct(me, (me + step) % R), chunks - 1);"
AHEAD_TAKES = "exchange.take(Channel::pull, Topology::direct(me, (me + step) % R))"
AHEAD_ROW = "layout.landed_row(to, me, t)"
LINE_OF_LANDED = "source < reader ? source : source - 1"

SLOT_OF_LANE = "layout.mail_slot(me, chunk) + mine.begin"

EXCHANGE, BARRIER, RELAY, CREW = "proto/exchange.h", "proto/barrier.h", "proto/relay.h", "proto/crew.h"
RING, RECORDS, DELIVER = "mem/ring_mover.h", "kernels/records.h", "kernels/deliver.h"
WAIT, WINDOW, TOPOLOGY = "proto/wait.h", "proto/window.h", "proto/topology.h"

PULLED, SUM, BOARD, RECORD = "a pulled row differs", "a sum differs", "a board differs", "a record differs"
OWNER, GROWTH, DEADLOCK, NO_END = "another writer", "a word does not grow", "deadlock", "no end"
WAIT_FAILED = "a wait failed"  # the protocol itself notices

PLANTS = [
    Plant("missing drain of a chunk", EXCHANGE, SETTLE, "team_.sync();", "push", SUM),
    Plant("missing team sync after puts", EXCHANGE, SETTLE, "mem_.drain();", "pull", PULLED),
    Plant("missing team sync after reads", EXCHANGE, SETTLE, "mem_.drain();", "push", SUM),
    Plant("missing settle of a board", BARRIER, "exchange.settle();", "", "publish", BOARD),
    Plant("early credit: one chunk too many", EXCHANGE, GIVEN_BACK, "signal(chunk + 2)", "push relay", SUM),
    Plant("early credit: all at once", EXCHANGE, GIVEN_BACK, "signal(kMaxChunks)", "records", GROWTH),
    Plant("early credit: before the step", CREW, TEAM_MOVES, TEAM_MOVES_LATE, "push relay", SUM),
    Plant("a mover goes ahead of its grant", CREW, GRANTED, "granted_ >= step_ - 1", "pull", PULLED),
    Plant(
        "a poster goes ahead of a mover", CREW, MOVED_ALL, "progress_.moved(mover) < step_ - 1", "push", SUM
    ),
    Plant("a mover's step said to be done when it was begun", CREW, MOVED, "step_", "push", SUM),
    Plant("a mover that is held up keeps what it has", CREW, HELD_UP, "", "pull", DEADLOCK),
    Plant(
        "a poster that never hears of the end", CREW, NO_MORE, "false", "one is killed in a pull", DEADLOCK
    ),
    Plant(
        "a ring's step said to be done at its first row",
        RING,
        STEP_OF,
        "step_of_.get(over_ & (kTags - 1))",
        "pull",
        PULLED,
    ),
    Plant("a ring's store said to be in place", RING, "ring_.drain(late)", "(void)0", "pull", PULLED),
    Plant("a ring that ends with stores under way", RING, "ring_.drain();", "", "pull", PULLED),
    Plant("a ring that keeps what it holds", RING, "ring_.held() > 0", "false", "pull", PULLED),
    Plant(
        "a credit of a relay given for one chunk more",
        RELAY,
        RELAY_POSTS,
        "exchange.release(from, in(i), chunk + 1, last)",
        "push relay",
        SUM,
    ),
    Plant(
        "reuse of a chunk too soon",
        EXCHANGE,
        "signal(chunk + 1 - slots)",
        "signal(chunk - slots)",
        "push",
        SUM,
    ),
    Plant(
        "reuse of a chunk by the next operation",
        EXCHANGE,
        "last_used(channel, line) != 0",
        "false",
        "pull",
        PULLED,
    ),
    Plant("reuse of a board too soon", WINDOW, "static_cast<std::size_t>(parity)", "0u", "publish", BOARD),
    Plant("reuse of registered rows too soon", EXCHANGE, EMPTIED, "Status::arrived", "pull", PULLED),
    Plant("stale epoch of a reader", EXCHANGE, ARRIVED, ARRIVED_BEFORE, "push", WAIT_FAILED),
    Plant("stale epoch of a writer", EXCHANGE, TAKES, TAKES.replace(";", " - 1;"), "pull", PULLED),
    Plant("a claim that is not written down", EXCHANGE, "take(channel, line)", "(void)0", "pull", PULLED),
    Plant(
        "a row that another reads beside its home is left out", DELIVER, READ_BY_TWO, "false", "pull", PULLED
    ),
    Plant(
        "a row that only one other reads is left out", DELIVER, "reader != me", "reader == me", "pull", PULLED
    ),
    Plant("rows sent ahead over those not read yet", DELIVER, AHEAD_CLAIM, "Status::arrived", "pull", PULLED),
    Plant(
        "rows sent ahead once the first reader is done",
        DELIVER,
        AHEAD_CLAIM,
        f"step > 1 ? Status::arrived : {AHEAD_CLAIM}",
        "pull",
        PULLED,
    ),
    Plant("rows sent before, and nobody takes note", DELIVER, AHEAD_TAKES, "(void)0", "pull", PULLED),
    Plant(
        "rows said to have landed before they are put", DELIVER, AHEAD_CLAIM, AHEAD_SAID_SOON, "pull", PULLED
    ),
    Plant(
        "rows whose last chunk is never said to have landed",
        DELIVER,
        AHEAD_POSTS,
        AHEAD_POSTS.replace("chunks - 1", "chunks - 2"),
        "pull",
        DEADLOCK,
    ),
    Plant(
        "rows landed on the sender's own line",
        DELIVER,
        AHEAD_ROW,
        "layout.landed_row(me, to, t)",
        "pull",
        PULLED,
    ),
    Plant(
        "rows of two peers landed on one line",
        WINDOW,
        LINE_OF_LANDED,
        "source > 0 ? source - 1 : 0",
        "pull",
        PULLED,
    ),
    Plant(
        "landed rows read at their source", DELIVER, "landed ? me : from.owner", "from.owner", "pull", PULLED
    ),
    Plant(
        "wrong word owner",
        EXCHANGE,
        "layout_.word(ready_word(channel), line.there)",
        "layout_.word(ready_word(channel), line.here)",
        "push",
        OWNER,
    ),
    Plant("wrong word owner of a relay", TOPOLOGY, RELAY_LINE, RELAY_LINE_OF_OTHER, "push relay", OWNER),
    Plant("relay forwarding before arrival", RELAY, RELAY_ARRIVES, "", "pull relay", PULLED),
    Plant(
        "relay waits for its first reader only",
        RELAY,
        "exchange.claim(to, out(i), chunk)",
        "i > 0 ? Status::arrived : exchange.claim(to, out(i), chunk)",
        "pull relay",
        PULLED,
    ),
    Plant(
        "a ring's last piece as long as the others", RING, "left < most ? left : most", "most", "pull", PULLED
    ),
    Plant(
        "every lane's records in one place",
        RECORDS,
        SLOT_OF_LANE,
        "layout.mail_slot(me, chunk)",
        "records",
        RECORD,
    ),
    Plant("abort ignored", WAIT, GAVE_UP, "false", "one never comes", NO_END),
    Plant(
        "abort ignored by a relay",
        RELAY,
        RELAY_ARRIVES,
        "exchange.arrive(from, in(i), chunk);",
        "one is killed in a pull",
        "a read raced",
    ),
    Plant(
        "abort told to nobody", EXCHANGE, "step < topology().ranks", "step < 1", "one never comes", DEADLOCK
    ),
    Plant("abort not passed on", EXCHANGE, STOP_ONCE, STOP_FIRST, "one dies while it tells", DEADLOCK),
    Plant("abort told in one's own name", EXCHANGE, "fault = *said;", "", "one never comes", "fault record"),
    Plant(
        "a wait for oneself expires first",
        EXCHANGE,
        "2 * op_.seconds",
        "op_.seconds",
        "one is killed in a push",
        "waited for itself",
    ),
    Plant("leaving ignored", WAIT, LEFT, "false", "one leaves early", DEADLOCK),
    Plant(
        "leaving ends every wait",
        WAIT,
        GAVE_UP,
        GAVE_UP.replace("== kGaveUp", "!= 0"),
        "all leave",
        "a wait failed",
    ),
    Plant(
        "leaving ends a wait unread",
        WAIT,
        "if (!has_reached(last, want)) return {Status::left, last, -1};",
        "return {Status::left, got, -1};",
        "all leave",
        "a wait failed",
    ),
    Plant(
        "other operation taken for one's own",
        WAIT,
        "belongs(word, got, want) ? Status::arrived : Status::mismatched",
        "Status::arrived",
        "one runs something else",
        "did not learn",
    ),
]


def plant_all(to: Path) -> Path:
    """A copy of csrc under `to` that holds every plant; its include path."""
    include = Path(shutil.copytree(ROOT / "csrc", to / "csrc"))
    sites: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
    for number, plant in enumerate(PLANTS, start=1):
        sites[plant.file, plant.right].append((number, plant.wrong))
    for (file, right), wrongs in sites.items():
        text = (include / file).read_text()
        assert text.count(right) == 1, f"planted bugs no longer fit {file}: {right}"
        (include / file).write_text(text.replace(right, choose(right, wrongs)))
    for file in {file for file, _ in sites}:  # what may be planted is no constant
        text = (include / file).read_text()
        (include / file).write_text(text.replace("FLEXEP_HD constexpr ", "FLEXEP_HD "))
    chosen = '#include <cstdlib>\nnamespace flexep { inline const int planted = std::atoi(std::getenv("PLANTED")); }\n'
    lowest = include / "proto/signal.h"
    lowest.write_text(lowest.read_text() + chosen)
    return include


def choose(right: str, wrongs: list[tuple[int, str]]) -> str:
    """C++ that does what is right, or one of the wrong things if its number is planted."""
    if not right.partition("  //")[0].endswith(";"):
        for number, wrong in wrongs:
            right = f"(planted == {number} ? ({wrong}) : ({right}))"
        return right
    text = "".join(f"if (planted == {number}) {{ {wrong} }}\n    else " for number, wrong in wrongs)
    return text + f"{{ {right}\n}}"
