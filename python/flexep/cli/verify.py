"""`flexep verify`: random conformance cases against the oracle, on this machine."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexep.cli._output import JsonOption, check_json, console, split_names, write_json

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console

    from flexep.testing.case import Case
    from flexep.testing.sweep import Failure

STOP_AFTER = 20  # failed cases


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(verify)


def verify(
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, one GPU a rank).")] = "cpu",
    ranks: Annotated[int, typer.Option(help="Processes, all started here.")] = 2,
    dispatchers: Annotated[
        str, typer.Option(help="all (that run on the device), or names separated by commas.")
    ] = "all",
    cases: Annotated[int, typer.Option(help="Random cases; each runs on every dispatcher.")] = 100,
    seed: Annotated[int, typer.Option(help="Keys the cases.")] = 0,
    case: Annotated[
        str | None, typer.Option(metavar="JSON", help="Run this one case, as a failure printed it.")
    ] = None,
    json: JsonOption = None,
) -> None:
    """Check every dispatcher against an independent oracle, bit for bit, forward and backward.

    Exit codes: 0 every case passed, 1 a case failed, 2 bad usage.
    """
    from flexep.errors import FlexEPError

    try:
        check_json(json)
        names = _names(dispatchers, device)
        chosen = _cases(case, ranks, cases, seed)
        _check_device(device, chosen[0].ranks)
    except FlexEPError as error:
        print(f"flexep verify: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    result = run(chosen, names, device, seed, console(json))
    write_json(json, result)
    raise typer.Exit(1 if result["failures"] else 0)


def run(
    cases: Sequence[Case], dispatchers: list[str], device: str, seed: int, out: Console
) -> dict[str, Any]:
    """Runs the cases with a progress bar and a report on `out`; returns the JSON result.

    Stops early after STOP_AFTER failed cases; `cases` counts those that ran.
    """
    from rich.progress import MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from flexep.testing.coverage import coverage
    from flexep.testing.sweep import Sweep

    started = time.monotonic()
    finished: list[Case] = []
    failures: list[Failure] = []
    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with (
        Progress(*columns, TextColumn("{task.fields[failed]} failed"), console=out, transient=True) as bar,
        Sweep(dispatchers, device) as sweep,
    ):
        task = bar.add_task("cases", total=len(cases), failed=0)
        for done, failed in sweep.run(cases):
            finished += done
            failures += failed
            bar.update(task, advance=len(done), failed=len(failures))
            if len(failures) >= STOP_AFTER:
                break
    result = {
        "cases": len(finished),
        "failures": [{"case": failure.case.to_json(), "differs": failure.messages} for failure in failures],
        "coverage": coverage(finished),
        "seed": seed,
        "ranks": cases[0].ranks,
        "dispatchers": dispatchers,
        "device": device,
        "seconds": round(time.monotonic() - started, 1),
    }
    show(result, out)
    return result


def show(result: dict[str, Any], out: Console) -> None:
    """The result for people."""
    from rich.markup import escape
    from rich.table import Table

    table = Table("row", "conformance", "cases", "not covered here", box=None, pad_edge=False)
    for number, row in result["coverage"].items():
        table.add_row(number, row["title"], str(row["cases"]), f"[dim]{escape(row['rest'])}[/dim]")
    out.print(table)
    for failure in result["failures"]:
        out.print("\n[red]failed[/red]", *map(escape, failure["differs"][:6]), sep="\n  ")
        out.print(f"  flexep verify --case '{failure['case']}'", markup=False, soft_wrap=True)
    verdict = (
        f"[red]{len(result['failures'])} failed[/red]" if result["failures"] else "[green]all passed[/green]"
    )
    where = f"{result['ranks']} ranks on {result['device']}, seed {result['seed']}"
    names = ", ".join(result["dispatchers"])
    out.print(f"\n{result['cases']} cases on {names} ({where}) in {result['seconds']} s: {verdict}")


def _names(text: str, device: str) -> list[str]:
    """Dispatchers by name; all are those that run on the device."""
    import flexep
    from flexep.config import WINDOWED
    from flexep.errors import ArgumentError

    known = list(flexep.BACKENDS)
    if text == "all":
        return [name for name in known if device == "cpu" or name not in WINDOWED]
    names = split_names("dispatchers", text)
    for name in names:
        if name not in known:
            raise ArgumentError("dispatchers", name, f"all, or some of {', '.join(known)}")
    return names


def _cases(text: str | None, ranks: int, count: int, seed: int) -> list[Case]:
    """The one case that was asked for, or random ones."""
    from flexep.errors import ArgumentError
    from flexep.testing.axes import random_cases
    from flexep.testing.case import Case

    if text is not None:
        given = Case.from_json(text)
        _check_case(given)
        return [given]
    for name, value in (("ranks", ranks), ("cases", count)):
        if value < 1:
            raise ArgumentError(name, value, "at least 1")
    if not 0 <= seed < 2**63:
        raise ArgumentError("seed", seed, "0 to 2**63 - 1")
    return random_cases(ranks, count, seed)


def _check_case(case: Case) -> None:
    """Refuses a case that no dispatcher accepts: that is bad usage, not a failed check.

    Capacity and placement follow from the routing, which is drawn later.
    """
    from flexep.config import DispatcherConfig
    from flexep.testing.case import DTYPES

    DispatcherConfig(
        num_ranks=case.ranks, num_experts=case.experts, hidden=case.hidden, top_k=case.top_k,
        max_tokens=case.tokens + case.headroom, backend=case.dispatcher, dtype=DTYPES[case.dtype], wire=None,
        combine_wire=case.combine_wire, domain_size=case.domain_size, layout=case.layout,
        alignment=case.alignment, capacity=None, overflow=case.overflow, num_sms=None, timeout=1.0,
        placement=None, reduction="ordered",
    )  # fmt: skip


def _check_device(device: str, ranks: int) -> None:
    """Refuses a device that is not there, or has too few GPUs for one a rank."""
    import torch

    from flexep.errors import ArgumentError, Unavailable

    if device not in ("cpu", "cuda"):
        raise ArgumentError("device", device, "cpu or cuda")
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise Unavailable(f"{ranks} ranks need a GPU each; this machine has {torch.cuda.device_count()}")
