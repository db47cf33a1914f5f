"""How long a plan takes, and that it grows as T*K + E*R: executed in one process up to 72 ranks, planned up to 2,048.

    python -m bench.plan_time --json out.json

*Executed*: a fresh dispatch of a local group up to where rows would move, the exchange of counts and metadata between
its ranks included, per rank. *Planned*: what one of R ranks computes, without anybody to exchange with: the steps of
the plan on its own tokens and on the counts of all R, which are drawn. The best of several rounds counts. T*K is the
slots of a rank, E*R the counts that it reads; a plan that is linear shows one number of ns in the last column, a
little more where fixed costs are not yet small.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch
import typer

import flexep
from flexep._native.arrivals import receive_rows
from flexep._native.plan import HEADER_INTS, PlanTable, assign_rows, count_slots, resolve
from flexep.dispatchers.backend import Delivered


@dataclass(frozen=True)
class Shape:
    """R ranks in domains of `size` (one domain: R), T tokens each, K of E experts."""

    ranks: int
    size: int
    experts: int
    tokens: int = 512
    top_k: int = 8

    @property
    def work(self) -> int:
        """T*K + E*R."""
        return self.tokens * self.top_k + self.experts * self.ranks


@dataclass(frozen=True)
class Row:
    """Microseconds of one rank's plan, and nanoseconds for each of T*K + E*R."""

    what: str
    shape: Shape
    us: float
    ns_each: float


EXECUTED = [
    *(Shape(ranks, ranks, 288) for ranks in (8, 18, 36, 72)),
    Shape(72, 72, 288, tokens=2048),
    Shape(72, 72, 1152),
]
DOMAINS = [Shape(8, 4, 288), Shape(16, 4, 288), Shape(72, 8, 288), Shape(72, 36, 288), Shape(72, 2, 288)]
PLANNED = [Shape(ranks, ranks, 4096, tokens=4096) for ranks in (8, 72, 256, 1024, 2048)]


def routing(shape: Shape, rank: int) -> torch.Tensor:
    """int32 [T, K] uniform expert ids of a rank."""
    generator = torch.Generator().manual_seed(rank)
    return torch.randint(
        0, shape.experts, (shape.tokens, shape.top_k), generator=generator, dtype=torch.int32
    )


def plan_of_all(backend: str, shape: Shape) -> tuple[flexep.Dispatcher, Callable[[], object]]:
    """A dispatcher of a local group, and its fresh dispatch without the rows."""
    ep = flexep.Dispatcher(
        flexep.Group.local(shape.ranks), num_experts=shape.experts, hidden=8, top_k=shape.top_k,
        max_tokens=shape.tokens, backend=backend, domain_size=shape.size,
    )  # fmt: skip
    x = [torch.zeros(shape.tokens, 8, dtype=torch.bfloat16)] * shape.ranks
    topk_idx = [routing(shape, rank) for rank in range(shape.ranks)]
    nothing = [x[0][:0]] * shape.ranks
    vars(ep._alive().backend)["deliver"] = lambda *_, **__: Delivered(nothing, None)
    return ep, lambda: ep.dispatch(x, topk_idx)


def plan_of_one(shape: Shape) -> Callable[[], object]:
    """The steps of one rank, the last, on drawn counts of the others."""
    R, E = shape.ranks, shape.experts
    table, topk_idx = PlanTable(E, R, None), routing(shape, R - 1)
    counts_RE = torch.randint(0, 2 * shape.tokens * shape.top_k // E + 1, (R, E), dtype=torch.int32)
    received = routing(shape, 0)
    records = torch.cat([received[:, :1], torch.where(received < shape.top_k, received, -1)], 1)

    def plan() -> None:
        counted = count_slots(topk_idx, table)
        counts_RE[-1] = counted.said[HEADER_INTS : HEADER_INTS + E]
        resolved = resolve(counts_RE, table, 16, None)
        leaving = int(counted.said[HEADER_INTS + E :].sum())
        assign_rows(counted, R - 1, resolved, table, num_send=leaving, records=True)
        receive_rows(records, shape.top_k, int(resolved.rows_R[-1]))

    return plan


def measure(what: str, shape: Shape, rounds: int = 5) -> Row:
    """The best of some rounds; `what` is "planned" or a dispatcher."""
    ep = None
    if what == "planned":
        ranks, call = 1, plan_of_one(shape)
    else:
        ep, call = plan_of_all(what, shape)
        ranks = shape.ranks
    best = float("inf")
    with torch.no_grad():
        for _ in range(1 + rounds):  # the first warms up
            start = time.perf_counter()
            call()
            best = min(best, time.perf_counter() - start)
    if ep is not None:
        ep.destroy()
    return Row(what, shape, best / ranks * 1e6, best / ranks * 1e9 / shape.work)


def main(
    rounds: int = 5,
    json_path: str = typer.Option("", "--json", help='where to write the numbers, "-" for standard output'),
) -> None:
    """Measure on one thread, print a table, and write JSON if asked."""
    torch.set_num_threads(1)
    out = sys.stderr if json_path == "-" else sys.stdout
    print(
        f"{'':10}{'ranks':>7}{'domains':>9}{'T':>6}{'K':>4}{'E':>6}{'us a rank':>12}{'ns each':>9}", file=out
    )
    todo = [(name, shape) for name in ("alltoall", "deepep") for shape in EXECUTED]
    todo += [("hybridep", shape) for shape in DOMAINS] + [("planned", shape) for shape in PLANNED]
    rows = []
    for what, shape in todo:
        rows.append(row := measure(what, shape, rounds))
        domains = f"{shape.ranks // shape.size}x{shape.size}"
        print(
            f"{what:10}{shape.ranks:7}{domains:>9}{shape.tokens:6}{shape.top_k:4}{shape.experts:6}"
            f"{row.us:12.0f}{row.ns_each:9.1f}",
            file=out,
        )
    if json_path:
        text = json.dumps([asdict(row) for row in rows], indent=2) + "\n"
        if json_path == "-":
            sys.stdout.write(text)
        else:
            with open(json_path, "w", encoding="utf-8") as file:
                file.write(text)


if __name__ == "__main__":
    typer.run(main)
