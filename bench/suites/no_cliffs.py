"""No cliffs: odd shapes and crooked routings against one model of dispatch and combine.

    python -m bench.suites.no_cliffs --device cuda --ranks 2 --num-sms 16,24,64 --out no-cliffs.json

An operation takes as long as the slower of two things, and a constant:

    max(link bytes / link rate, local bytes / local rate) + constant

Link bytes are those that the busiest rank sends or receives. Local bytes of dispatch are the rows that it writes,
padding included; of combine, the expert rows that it reads and the sums that it writes. Both rates and the constant are
measured once for each number of multiprocessors, on shapes made for it: tokens that all cross and arrive once, tokens
that all stay and arrive K times, and a single token. Where rows are sent ahead of the plan, every token crosses to
every peer, by copy engines: the link and the constant then have measurements of their own. Nothing is fitted to the
shapes that are judged. Plans are kept, so that rows alone are timed. Exit codes: 0 every shape is near the model, 1
some shape is further away than the tolerance or wrong, 2 nothing could be measured.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache

from bench.suites import record
from bench.suites.measured import OPS, Measured, WrongResult, reach_peers
from flexep.benchmark.case import BenchCase
from flexep.benchmark.copy_engine import rows_between
from flexep.ref import make_plan
from flexep.testing.pool import RankFailed

TOLERANCE = 0.15
HIDDEN = (2048, 2880, 4096, 5120)
TOP_K = (1, 2, 6)
ROUTING = ("uniform", "zipf", "hot")
Key = tuple[int | None, str, bool]  # multiprocessors, operation, whether rows are sent ahead
Measure = Callable[[BenchCase], dict[str, float]]  # {operation: microseconds}


class TooFewTokens(Exception):
    """The shapes that rates come from take no longer than one token."""


@dataclass(frozen=True)
class Load:
    """Bytes of the busiest rank: over the link in one direction, and in its own memory."""

    link: float
    local: float


@dataclass(frozen=True)
class Rates:
    """Bytes per microsecond, and the microseconds that an operation takes without any."""

    link: float
    local: float
    constant_us: float


@dataclass(frozen=True)
class Judged:
    """One operation of one shape."""

    num_sms: int | None
    op: str
    sent_ahead: bool
    hidden: int
    top_k: int
    routing: str
    tokens: int
    link_bytes: float
    local_bytes: float
    measured_us: float
    model_us: float
    ratio: float


def load_of(case: BenchCase, op: str) -> Load:
    """What an operation must move, by the oracle's plan."""
    rows = _rows(replace(case.asked, hidden=_narrow(case)))
    row = case.hidden * case.world.dtype.itemsize
    ahead = op == "dispatch" and case.sends_ahead
    crosses = (case.ranks - 1) * case.tokens if ahead else rows["link"]
    return Load(crosses * row, rows[op] * row)


def _narrow(case: BenchCase) -> int:
    """The narrowest row of the case's dtype: plans do not depend on the width."""
    return 16 // case.world.dtype.itemsize


@cache
def _rows(case: BenchCase) -> dict[str, int]:
    """Rows of the busiest rank: over the link, and in memory by operation."""
    world = case.world
    plan = make_plan(world, case.topk_idx(world, 0))
    there = rows_between(plan)
    if world.layout == "flat":
        arrive = read = [p.num_recv for p in plan.ranks]
    else:
        arrive = [int(p.padded_counts.sum()) for p in plan.ranks]
        read = [int(p.counts.sum()) for p in plan.ranks]
    home = [rows + len(token_row) for rows, token_row in zip(read, plan.token_row, strict=True)]
    link = max(*map(sum, there), *map(sum, zip(*there, strict=True)))
    return {"link": link, "dispatch": max(arrive), "combine": max(home)}


def model_us(load: Load, rates: Rates) -> float:
    """The slower of link and memory, and the constant."""
    return max(load.link / rates.link, load.local / rates.local) + rates.constant_us


def references(base: BenchCase) -> dict[str, BenchCase]:
    """The shapes that give the link's rate, memory's rate and the constant."""
    return {
        "link": replace(base, routing="next_rank", top_k=1, layout="flat"),
        "local": replace(
            base, routing="own_rank", top_k=min(6, base.experts // base.ranks), send_ahead=False
        ),
        "constant": replace(base, tokens=1, top_k=1, layout="flat"),
    }


def measure_rates(base: BenchCase, measure: Measure) -> dict[str, Rates]:
    """By operation. Where even rows that all cross take longer in memory than on the link, the link's rate comes out
    lower than it is, and decides nothing: no shape has less to do in memory for a crossing row. Raises TooFewTokens."""
    cases = references(base)
    times = {name: measure(case) for name, case in cases.items()}
    found = {}
    for op in OPS:
        constant = times["constant"][op]
        took = {name: times[name][op] - constant for name in ("link", "local")}
        if min(took.values()) <= 0:
            raise TooFewTokens(f"{op}: {base.tokens} tokens take no longer than one: {times}")
        link, local = (load_of(cases[name], op) for name in ("link", "local"))
        found[op] = Rates(link.link / took["link"], local.local / took["local"], constant)
    return found


def shapes(base: BenchCase) -> Iterator[BenchCase]:
    """All combinations."""
    for hidden in HIDDEN:
        for top_k in TOP_K:
            for routing in ROUTING:
                yield replace(base, hidden=hidden, top_k=top_k, routing=routing)


def judge(case: BenchCase, rates: dict[Key, Rates], measure: Measure) -> list[Judged]:
    """Both operations of a shape."""
    times, found, ahead = measure(case), [], case.sends_ahead
    for op in OPS:
        load = load_of(case, op)
        expected = model_us(load, rates[case.num_sms, op, ahead])
        found.append(
            Judged(
                case.num_sms, op, ahead, case.hidden, case.top_k, case.routing, case.tokens, load.link, load.local,
                times[op], expected, times[op] / expected,
            )
        )  # fmt: skip
    return found


def run(
    base: BenchCase, num_sms: list[int | None], measure: Measure, cases: list[BenchCase]
) -> tuple[dict[Key, Rates], list[Judged]]:
    """Rates, and every shape at each number of multiprocessors; a shape keeps its inputs meanwhile."""
    ways = sorted({case.sends_ahead for case in cases})
    rates: dict[Key, Rates] = {}
    for sms in num_sms:
        for ahead in ways:
            found = measure_rates(replace(base, num_sms=sms, send_ahead=ahead), measure)
            rates |= {(sms, op, ahead): one for op, one in found.items()}
    judged = [
        one for case in cases for sms in num_sms for one in judge(replace(case, num_sms=sms), rates, measure)
    ]
    return rates, judged


def cliffs(judged: list[Judged], tolerance: float = TOLERANCE) -> list[Judged]:
    """What is further from the model than allowed, slower or faster."""
    return [one for one in judged if abs(one.ratio - 1) > tolerance]


def report(rates: dict[Key, Rates], judged: list[Judged], tolerance: float) -> str:
    """Two tables."""
    speeds = [
        [str(sms), op, way(ahead), f"{r.link / 1e3:.0f}", f"{r.local / 1e3:.0f}", f"{r.constant_us:.1f}"]
        for (sms, op, ahead), r in rates.items()
    ]
    far = cliffs(judged, tolerance)
    lines = [
        [
            str(one.num_sms), one.op, way(one.sent_ahead), str(one.hidden), str(one.top_k), one.routing,
            f"{one.link_bytes / 1e6:.1f}",
            f"{one.local_bytes / 1e6:.1f}", f"{one.measured_us:.1f}", f"{one.model_us:.1f}",
            f"{one.ratio:.2f}" + (" cliff" if one in far else ""),
        ]
        for one in judged
    ]  # fmt: skip
    heads = ["SMs", "op", "rows", "H", "K", "routing", "link MB", "local MB", "us", "model us", "ratio"]
    verdict = f"{len(far)} of {len(judged)} further than {tolerance:.0%} from the model"
    rate_table = record.table(["SMs", "op", "rows", "link GB/s", "local GB/s", "constant us"], speeds)
    return "\n\n".join([rate_table, record.table(heads, lines), verdict])


def way(sent_ahead: bool) -> str:
    """How rows go, in words."""
    return "sent ahead" if sent_ahead else "pulled"


def main() -> int:
    parser = record.arguments(__doc__, "cpu", 2)
    parser.add_argument("--dispatcher", default="deepep")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument(
        "--num-sms", default="", help="numbers separated by commas; none: the dispatcher's choice"
    )
    parser.add_argument(
        "--send-ahead", action=argparse.BooleanOptionalAction, help="not given: as the dispatcher chooses"
    )
    parser.add_argument("--shapes", type=int, help="only the first so many")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE)
    given = parser.parse_args()
    reach_peers(given.device)
    base = BenchCase(
        device=given.device, ranks=given.ranks, dispatchers=(given.dispatcher,), baselines=(), hidden=4096,
        tokens=given.tokens, experts=given.experts, top_k=1, fresh=False,
        send_ahead=given.send_ahead,
    )  # fmt: skip
    num_sms = [int(n) for n in given.num_sms.split(",")] if given.num_sms else [None]
    try:
        with Measured(given.device, given.ranks) as measure:
            rates, judged = run(base, num_sms, measure, list(shapes(base))[: given.shapes])
    except (TooFewTokens, RankFailed, WrongResult) as error:
        print(error, file=sys.stderr)
        return 1 if isinstance(error, WrongResult) else 2
    print(report(rates, judged, given.tolerance))
    if given.out is not None:
        speeds = [
            {"num_sms": n, "op": op, "sent_ahead": ahead, **asdict(r)} for (n, op, ahead), r in rates.items()
        ]
        results = [asdict(one) for one in judged]
        record.write(
            given.out, "bench.suites.no_cliffs", given.commit, rates=speeds, results=results,
            tolerance=given.tolerance,
        )  # fmt: skip
    return 1 if cliffs(judged, given.tolerance) else 0


if __name__ == "__main__":
    sys.exit(main())
