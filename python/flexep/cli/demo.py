"""`flexep demo`: train on one rank and on several with every dispatcher; the loss curves must agree."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer

from flexep.cli._output import console, make_folder
from flexep.cli.train import train_rank

# nats a byte. With the number of ranks only the order in which fp32 gradients are summed changes: measured
# gaps are below 1e-6. Gradients scaled wrongly (the mutants of tests/training) move these curves by 0.02 and
# more.
TOLERANCE = 1e-3


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(demo)


def demo(
    out: Annotated[str, typer.Option(help="Folder for loss.png and one JSON file a run.")] = "out/demo",
    ranks: Annotated[int, typer.Option(help="Ranks to compare with one.")] = 4,
    steps: Annotated[int, typer.Option(help="Optimizer steps a run.")] = 60,
    domain_size: Annotated[
        int | None,
        typer.Option(help="Ranks of a domain.", show_default="half of them, if even and more than 2"),
    ] = None,
    seed: Annotated[int, typer.Option(help="Keys initial weights and batches.")] = 0,
) -> None:
    """Train the small language model on 1 rank, then on several with every dispatcher, and compare losses.

    Every dispatcher must give the same losses to the bit, and one rank the same ones but for rounding.
    Exit codes: 0 the curves agree, 1 they do not or a rank failed, 2 bad usage.
    """
    from flexep.cli._plot import plot_losses
    from flexep.errors import ArgumentError, FlexEPError, NotBuilt
    from flexep.training.launch import run_ranks

    try:
        from flexep.dispatchers import BACKENDS  # NotBuilt without the compiled module
        from flexep.training.config import TrainConfig

        if domain_size is None:
            domain_size = ranks // 2 if ranks > 2 and ranks % 2 == 0 else ranks
        same: dict[str, Any] = {"steps": steps, "seed": seed}
        configs = [TrainConfig(ranks=1, dispatcher=next(iter(BACKENDS)), **same)]
        configs += [
            TrainConfig(ranks=ranks, domain_size=domain_size, dispatcher=name, **same) for name in BACKENDS
        ]
        folder = make_folder("out", out)
        reports: dict[str, dict[str, Any]] = {}
        for config in configs:
            label = f"{config.ranks}-rank{'s' * (config.ranks > 1)}-{config.dispatcher}"
            file = folder / f"{label}.json"
            run_ranks(config.device, config.ranks, train_rank, config, str(file), False)
            reports[label] = json.loads(file.read_text())
    except FlexEPError as error:
        print(f"flexep demo: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, (ArgumentError, NotBuilt)) else 1) from None

    one_rank, first, *_ = (report["losses"] for report in reports.values())
    unequal = [
        label for label, report in reports.items() if report["ranks"] > 1 and report["losses"] != first
    ]
    apart = {label: largest_gap(report["losses"], one_rank) for label, report in reports.items()}
    plot_losses(
        folder / "loss.png", {label: report["losses"] for label, report in reports.items()}, TOLERANCE
    )
    _print_table(reports, apart, unequal)
    console(None).print(f"picture: {folder / 'loss.png'}   data: {folder}/*.json")
    if max(apart.values()) > TOLERANCE:
        print(f"flexep demo: loss curves are further apart than {TOLERANCE:g}", file=sys.stderr)
        raise typer.Exit(1)
    if unequal:
        print(f"flexep demo: other bits than the first dispatcher's: {', '.join(unequal)}", file=sys.stderr)
        raise typer.Exit(1)


def largest_gap(losses: list[float], reference: list[float]) -> float:
    """The largest difference between two loss curves at the same step, in nats a byte."""
    return max(abs(a - b) for a, b in zip(losses, reference, strict=True))


def _print_table(reports: dict[str, dict[str, Any]], apart: dict[str, float], unequal: list[str]) -> None:
    from rich.table import Table

    table = Table(
        "dispatcher", "ranks", "last loss", "tokens/s", "seconds", "gap to 1 rank", "bits", box=None
    )
    for label, report in reports.items():
        table.add_row(
            report["dispatcher"], _shape(report), f"{report['losses'][-1]:.4f}",
            f"{report['tokens_per_second']:,.0f}", f"{report['seconds']:.1f}",
            f"{apart[label]:.1e} {'ok' if apart[label] <= TOLERANCE else 'APART'}",
            "" if report["ranks"] == 1 else "OTHER" if label in unequal else "the same",
        )  # fmt: skip
    console(None).print(table)


def _shape(report: dict[str, Any]) -> str:
    """Ranks of a run, and domains x ranks where there are several."""
    ranks, size = report["ranks"], report["config"]["domain_size"]
    return str(ranks) if size in (None, ranks) else f"{ranks} ({ranks // size}x{size})"
