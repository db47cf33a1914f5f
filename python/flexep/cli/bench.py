"""`flexep bench`: dispatchers beside a plain torch baseline on this machine, checked, by the benchmark contract."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flexep.cli._output import JsonOption, check_file, check_json, console, split_names, write_json

if TYPE_CHECKING:
    from typing import Any

    from rich.console import Console

    from flexep.benchmark.case import BenchCase


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(bench)


def bench(
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, one GPU a rank).")] = "cpu",
    ranks: Annotated[int, typer.Option(help="Processes, all started here.")] = 4,
    dispatchers: Annotated[
        str, typer.Option(help="all (that can run here), none, or names separated by commas.")
    ] = "all",
    baselines: Annotated[
        str,
        typer.Option(
            help="torch; on cuda also symm_mem, deep_ep and copy_engine; all (that can run here); none."
        ),
    ] = "torch",
    tokens: Annotated[int, typer.Option(help="Tokens a rank.")] = 2048,
    hidden: Annotated[int, typer.Option(help="Elements of a token.")] = 1024,
    experts: Annotated[int, typer.Option(help="Experts, over all ranks.")] = 64,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 8,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    domain_size: Annotated[
        int | None, typer.Option(help="Ranks of a domain.", show_default="one domain")
    ] = None,
    routing: Annotated[
        str,
        typer.Option(help="uniform, zipf, hot, own_rank, next_rank, or a named workload, W0 to W7."),
    ] = "uniform",
    layout: Annotated[str, typer.Option(help="expert_major or flat.")] = "expert_major",
    mode: Annotated[str, typer.Option(help="exact or capacity (static sizes, overflow dropped).")] = "exact",
    capacity: Annotated[
        float, typer.Option(help="With mode capacity: rows a rank, over tokens * top_k.")
    ] = 1.25,
    fresh: Annotated[
        bool, typer.Option("--fresh/--cached", help="Plan in every dispatch, or use one handle.")
    ] = True,
    alignment: Annotated[int, typer.Option(help="Rows of an expert are padded to a multiple of this.")] = 16,
    weights: Annotated[
        str, typer.Option(help="none, or combine: routing weights multiply the rows that come home.")
    ] = "none",
    seed: Annotated[int, typer.Option(help="Keys routing and payload.")] = 0,
    time_limit: Annotated[
        float, typer.Option(help="Seconds that one library may take for one operation.")
    ] = 12.0,
    pairs: Annotated[int, typer.Option(help="Roundtrips of the chained run, if the time allows.")] = 128,
    num_sms: Annotated[
        int | None, typer.Option(help="GPU multiprocessors a dispatcher may take.", show_default="its choice")
    ] = None,
    send_ahead: Annotated[
        bool | None,
        typer.Option(
            help="Whether one-sided dispatchers send x before the plan.", show_default="their choice"
        ),
    ] = None,
    beside: Annotated[
        str,
        typer.Option(help="none, or gemm: what matrix products next to dispatch and combine lose (cuda)."),
    ] = "none",
    sweep: Annotated[
        str | None,
        typer.Option(metavar="KEY=N,N,...", help="Run every value of num_sms or of tokens, into one result."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result to this PNG.")] = None,
    json: JsonOption = None,
) -> None:
    """Time dispatch, combine and the roundtrip of every dispatcher beside plain torch, and check all results.

    Exit codes: 0 measured and right, 1 a check or a rank failed, 2 bad usage.
    """
    from flexep.errors import FlexEPError, Unavailable

    try:
        from flexep.benchmark.case import BenchCase  # NotBuilt without the compiled module
        from flexep.benchmark.sweep import cases, parse
        from flexep.testing.pool import RankFailed

        check_json(json)
        case = BenchCase(
            device=device, ranks=ranks, dispatchers=_names("dispatchers", dispatchers),
            baselines=_names("baselines", baselines), domain_size=domain_size,
            tokens=tokens, hidden=hidden, experts=experts, top_k=top_k, dtype=dtype, routing=routing,
            layout=layout, mode=mode, capacity=capacity, fresh=fresh, alignment=alignment, weights=weights,
            seed=seed, time_limit=time_limit, pairs=pairs, num_sms=num_sms, send_ahead=send_ahead, beside=beside,
        )  # fmt: skip
        swept = None if sweep is None else parse(sweep)
        if swept is not None:
            cases(case, *swept)
        _check_place(device, ranks, plot)
    except FlexEPError as error:
        print(f"flexep bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    try:
        result = _run(case, swept, console(json))
    except Unavailable as error:  # a dispatcher that was asked for, or everything
        print(f"flexep bench: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    except RankFailed as error:
        print(f"flexep bench: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    _report(result, console(json), plot)
    write_json(json, result)
    raise typer.Exit(0 if all(row["checked"] for row in result["results"]) else 1)


def _names(argument: str, text: str) -> tuple[str, ...]:
    return () if text == "none" else tuple(split_names(argument, text))


def _check_place(device: str, ranks: int, plot: Path | None) -> None:
    """Refuses too few GPUs, and a picture that could not be drawn after minutes of measuring."""
    import torch

    from flexep.cli._plot import pyplot
    from flexep.errors import ArgumentError, Unavailable

    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise Unavailable(f"{ranks} ranks need a GPU each; this machine has {torch.cuda.device_count()}")
    if plot is not None:
        pyplot()
        if plot.suffix.lower() != ".png":
            raise ArgumentError("plot", str(plot), "a file that ends in .png")
        check_file("plot", str(plot))


def _run(case: BenchCase, swept: tuple[str, list[int]] | None, out: Console) -> dict[str, Any]:
    from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn

    from flexep.benchmark.run import run
    from flexep.benchmark.sweep import run_sweep

    columns = (*Progress.get_default_columns()[:2], MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as bar:
        task = bar.add_task(" " * 36, total=None)

        def on_step(what: str, done: int, total: int) -> None:
            bar.update(task, description=f"{what:<36}", completed=done, total=total)

        return run(case, on_step) if swept is None else run_sweep(case, *swept, on_step)


def _report(result: dict[str, Any], out: Console, plot: Path | None) -> None:
    from flexep.cli._bench_plot import plot_bench
    from flexep.cli._bench_report import show
    from flexep.cli._bench_sweep import plot_sweep, show_sweep

    swept = "sweep" in result
    (show_sweep if swept else show)(result, out)
    if plot is not None:
        (plot_sweep if swept else plot_bench)(plot, result)
        out.print(f"picture: {plot}")
