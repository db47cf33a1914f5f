"""`flexep train`: train the small byte-level language model, its experts spread over ranks."""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flexep.cli._output import JsonOption, check_json, console, write_json

if TYPE_CHECKING:
    import torch.distributed as dist

    from flexep.training.config import TrainConfig


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(train)


def train(
    device: Annotated[str, typer.Option(help="cpu (gloo) or cuda (NCCL, one GPU a rank).")] = "cpu",
    ranks: Annotated[
        int | None, typer.Option(help="Processes; under torchrun its own count.", show_default="1")
    ] = None,
    dispatcher: Annotated[str, typer.Option(help="allgather, alltoall, deepep, hybridep or auto.")] = "auto",
    domain_size: Annotated[
        int | None, typer.Option(help="Ranks of a domain.", show_default="one domain")
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps.")] = 60,
    seed: Annotated[int, typer.Option(help="Keys initial weights and batches.")] = 0,
    hidden: Annotated[int, typer.Option(help="Width of the model, a multiple of 32.")] = 128,
    inner: Annotated[int, typer.Option(help="Width inside an expert.")] = 256,
    layers: Annotated[int, typer.Option(help="Blocks of attention and experts.")] = 2,
    experts: Annotated[int, typer.Option(help="Experts a layer, over all ranks.")] = 8,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 2,
    seq: Annotated[int, typer.Option(help="Bytes a sequence.")] = 128,
    batch: Annotated[int, typer.Option(help="Sequences a step, over all ranks.")] = 16,
    lr: Annotated[float, typer.Option(help="Learning rate after warm-up.")] = 3e-3,
    dtype: Annotated[
        str | None,
        typer.Option(help="float32 or bfloat16.", show_default="float32 on cpu, bfloat16 on cuda"),
    ] = None,
    layout: Annotated[str, typer.Option(help="expert_major or flat.")] = "expert_major",
    weights_at: Annotated[
        str, typer.Option(help="Where routing weights apply: expert (before its second linear) or combine.")
    ] = "expert",
    json: JsonOption = None,
) -> None:
    """Train a byte-level language model with experts spread over ranks, on the text that Python ships.

    Starts its ranks itself, or joins those of torchrun. Exit codes: 0 trained, 1 the loss was not finite or a
    rank failed, 2 bad usage.
    """
    from flexep.errors import ArgumentError, FlexEPError, NotBuilt, Unavailable
    from flexep.training.launch import RankFailed, launched_size, run_launched, run_ranks

    try:
        from flexep.training.config import TrainConfig  # NotBuilt without the compiled module

        check_json(json)
        launched = launched_size()
        if launched is not None and ranks not in (None, launched):
            raise ArgumentError("ranks", ranks, f"nothing, or the launcher's {launched}")
        config = TrainConfig(
            device=device, ranks=launched or (1 if ranks is None else ranks), dispatcher=dispatcher,
            steps=steps, seed=seed, hidden=hidden, inner=inner, layers=layers, experts=experts, top_k=top_k,
            seq=seq, batch=batch, lr=lr, dtype=dtype or ("bfloat16" if device == "cuda" else "float32"),
            layout=layout, weights_at=weights_at, domain_size=domain_size,
        )  # fmt: skip
        if launched is None:
            run_ranks(device, config.ranks, train_rank, config, json, True)
        else:
            run_launched(device, train_rank, config, json, True)
    except RankFailed as error:
        # The rank has already said why, unless it was killed or raised something that is not ours.
        print(f"flexep train: {error}", file=sys.stderr)
        raise typer.Exit(error.exit_code if error.exit_code == 2 else 1) from None
    except FlexEPError as error:
        print(f"flexep train: {error}", file=sys.stderr)
        raise typer.Exit(2 if isinstance(error, (ArgumentError, NotBuilt, Unavailable)) else 1) from None


def train_rank(
    process_group: dist.ProcessGroup, config: TrainConfig, json_path: str | None, with_table: bool
) -> None:
    """What every rank runs; rank 0 draws the progress, writes the JSON and prints a table."""
    from flexep.training.loop import train as train_loop

    if process_group.rank() != 0:
        train_loop(config, process_group)
        return
    progress = _progress(json_path)
    with progress:
        task = progress.add_task(
            f"{config.ranks} x {config.device}, {config.dispatcher}", total=config.steps, say=""
        )

        def on_step(step: int, loss: float, tokens_per_second: float) -> None:
            progress.update(
                task, completed=step + 1, say=f"loss {loss:.4f}  {tokens_per_second:,.0f} tokens/s"
            )

        report = asdict(train_loop(config, process_group, on_step))
    write_json(json_path, report)
    if with_table:
        _print_table(report, json_path)


def _progress(json_path: str | None) -> Any:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[say]}"),
    )  # fmt: skip
    return Progress(*columns, console=console(json_path))


def _print_table(report: dict[str, Any], json_path: str | None) -> None:
    from rich.table import Table

    losses = report["losses"]
    table = Table(
        "dispatcher", "ranks", "first loss", "last loss", "tokens/s", "seconds",
        caption=f"loss in nats a byte; text {report['text_sha256'][:12]}",
    )  # fmt: skip
    table.add_row(
        report["dispatcher"], str(report["ranks"]), f"{losses[0]:.4f}", f"{losses[-1]:.4f}",
        f"{report['tokens_per_second']:,.0f}", f"{report['seconds']:.1f}",
    )  # fmt: skip
    console(json_path).print(table)
