"""`flexep plan`: predicted traffic, time and memory of every dispatcher on a machine given by a few figures."""

from __future__ import annotations

import sys
from typing import Annotated, Any

import typer

from flexep.cli._output import JsonOption, check_json, console, split_names, write_json

RATE = "Default: see the output, with its origin."


def register(app: typer.Typer) -> None:
    """Add the command to the program."""
    app.command()(plan)


def plan(
    topology: Annotated[
        str | None, typer.Option(help="nvl8, nvl72, or AxB: A domains of B ranks. Instead of --ranks.")
    ] = None,
    ranks: Annotated[int | None, typer.Option(help="Ranks. Default: 8.")] = None,
    domain_size: Annotated[int | None, typer.Option(help="Ranks a domain. Default: one domain.")] = None,
    link_gbs: Annotated[float | None, typer.Option(help=f"GB/s inside a domain, each way. {RATE}")] = None,
    rail_gbs: Annotated[float | None, typer.Option(help=f"GB/s between domains, each way. {RATE}")] = None,
    hbm_gbs: Annotated[float | None, typer.Option(help=f"GB/s of memory, read + written. {RATE}")] = None,
    latency_us: Annotated[float | None, typer.Option(help=f"Microseconds of a hand-shake. {RATE}")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens a rank.")] = 4096,
    hidden: Annotated[int, typer.Option(help="Elements a token.")] = 7168,
    experts: Annotated[int, typer.Option(help="Experts over all ranks.")] = 256,
    top_k: Annotated[int, typer.Option(help="Experts a token.")] = 8,
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16",
    wire: Annotated[
        str | None, typer.Option(help="Of dispatch: the dtype (default), fp8, mxfp8 or nvfp4.")
    ] = None,
    layout: Annotated[str, typer.Option(help="expert_major or flat.")] = "expert_major",
    alignment: Annotated[int, typer.Option(help="Rows of an expert are padded to a multiple of it.")] = 16,
    capacity: Annotated[
        str | None, typer.Option(help="Rows a rank (40000) or a factor (1.5). Default: exact sizes.")
    ] = None,
    routing: Annotated[
        str, typer.Option(help="uniform, zipf, hot (a tenth of the experts), W0 to W7, ...")
    ] = "uniform",
    dispatchers: Annotated[str, typer.Option(help="all, or names separated by commas.")] = "all",
    seed: Annotated[int, typer.Option(help="Keys the routing.")] = 0,
    samples: Annotated[
        int, typer.Option(help="Tokens to draw over all ranks; all of them if there are no more.")
    ] = 1 << 20,
    json: JsonOption = None,
) -> None:
    """Predict remote bytes, time by term and memory of dispatch and combine. Nothing is measured here.

    Exit codes: 0 predicted, 2 bad usage.
    """
    from flexep.errors import FlexEPError

    rates = {"link_gbs": link_gbs, "rail_gbs": rail_gbs, "hbm_gbs": hbm_gbs, "latency_us": latency_us}
    try:
        check_json(json)
        size, domain = _shape(topology, ranks, domain_size)
        machine = _machine(size, domain, rates)
        shapes = {
            "tokens": tokens,
            "hidden": hidden,
            "experts": experts,
            "top_k": top_k,
            "dtype": dtype,
            "wire": dtype if wire is None else wire,
            "layout": layout,
            "alignment": alignment,
            "capacity": _capacity(capacity),
            "routing": routing,
            "seed": seed,
        }
        result, predicted = run(machine, shapes, dispatchers, samples)
    except FlexEPError as error:
        print(f"flexep plan: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    from flexep.cli._plan_tables import show

    show(result, predicted, console(json))
    write_json(json, result)


def run(machine: Any, shapes: dict[str, Any], dispatchers: str, samples: int) -> tuple[dict[str, Any], Any]:
    """The JSON result and the Prediction behind it. Raises ArgumentError naming the value."""
    from flexep.errors import ArgumentError
    from flexep.planning import PATTERNS, RATES, draw, make_workload, predict

    if samples < 1:
        raise ArgumentError("samples", samples, "at least 1")
    names = list(PATTERNS) if dispatchers == "all" else split_names("dispatchers", dispatchers)
    work = make_workload(ranks=machine.ranks, domain_size=machine.domain_size, **shapes)
    predicted = predict(work, machine, names, draw(work, samples))
    result = {
        "topology": machine.as_dict(),
        "rates": [machine.source(rate) for rate in RATES],
        "workload": {**shapes, "routing": work.case.routing},
        **predicted.as_dict(),
    }
    return result, predicted


def _shape(topology: str | None, ranks: int | None, domain_size: int | None) -> tuple[int, int]:
    """Ranks, and ranks a domain."""
    from flexep.errors import ArgumentError
    from flexep.planning import parse_topology

    if topology is not None:
        for name, value in (("ranks", ranks), ("domain_size", domain_size)):
            if value is not None:
                raise ArgumentError(name, value, f"nothing beside topology = {topology!r}")
        return parse_topology(topology)
    ranks = 8 if ranks is None else ranks
    return ranks, ranks if domain_size is None else domain_size


def _machine(ranks: int, domain_size: int, rates: dict[str, float | None]) -> Any:
    from flexep.planning import Topology

    given = {name: value for name, value in rates.items() if value is not None}
    return Topology(ranks=ranks, domain_size=domain_size, **given)


def _capacity(text: str | None) -> float | int | None:
    """ "40000" is a number of rows, "1.5" a factor."""
    from flexep.errors import ArgumentError

    if text is None:
        return None
    try:
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    except ValueError:
        raise ArgumentError("capacity", text, "a number of rows (40000) or a factor (1.5)") from None
