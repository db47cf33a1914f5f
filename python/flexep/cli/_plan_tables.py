"""A prediction as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.markup import escape
from rich.table import Table

if TYPE_CHECKING:
    from rich.console import Console

    from flexep.planning import Prediction

OPS = ("dispatch", "combine")


def show(result: dict[str, Any], predicted: Prediction, out: Console) -> None:
    """What was asked, traffic, time by term, memory, assumptions, and the choice."""
    machine, work, sampling = result["topology"], result["workload"], result["sampling"]
    domains = machine["ranks"] // machine["domain_size"]
    out.print(f"[bold]{machine['ranks']} ranks, {domains} domains of {machine['domain_size']}[/bold]")
    out.print("  " + ", ".join(f"{k} {v}" for k, v in work.items() if v is not None))
    how = "all" if sampling["exact"] else f"{sampling['tokens_drawn']:,}"
    out.print(f"  routing drawn for {how} of {sampling['tokens']:,} tokens: {sampling['counted_by']}")
    said = "  ".join(f"{name} {value:.2f}" for name, value in result["balance"].items())
    out.print(f"  balance: {said}")
    if predicted.dropped:
        out.print(f"  slots over capacity and dropped, all ranks: {predicted.dropped:,.0f}")
    out.print(_traffic(predicted))
    for op in OPS:
        out.print(_terms(predicted, op))
    out.print(_memory(predicted))
    _assumptions(predicted, result["rates"], out)
    _choice(result["choice"], predicted, out)


def _traffic(predicted: Prediction) -> Table:
    table = Table(
        *("dispatcher", "", "remote MB", "link MB", "rail MB", "us", "ratio", "runs here"),
        title="Predicted traffic of the rank that sends most (mean), and time, drawn (uniform)",
    )
    for name in predicted.closed:
        for op in OPS:
            drawn, uniform = getattr(predicted.drawn[name], op), getattr(predicted.closed[name], op)
            table.add_row(
                name if op == "dispatch" else "",
                op,
                *(f"{_mb(r.max)} ({_mb(r.mean)})" for r in (drawn.remote, drawn.link, drawn.rail)),
                f"{drawn.total_us:,.0f} ({uniform.total_us:,.0f})",
                f"{drawn.total_us / uniform.total_us:.2f}",
                ("no" if name in predicted.why_not else "yes") if op == "dispatch" else "",
            )
    return table


def _mb(count: float) -> str:
    """Bytes as MB (1e6), with a decimal where it says something."""
    return f"{count / 1e6:,.1f}" if count < 1e9 else f"{count / 1e6:,.0f}"


def _terms(predicted: Prediction, op: str) -> Table:
    from flexep.planning.terms import term_names

    priced = {name: getattr(predicted.drawn[name], op) for name in predicted.drawn}
    uniform = {name: getattr(predicted.closed[name], op) for name in predicted.closed}
    table = Table(op, *priced, title=f"{op}: microseconds by term, drawn (uniform)")
    for term in term_names([*priced.values(), *uniform.values()]):
        cells = ((priced[n].us(term), uniform[n].us(term)) for n in priced)
        table.add_row(term, *(f"{a:,.1f} ({b:,.1f})" if a or b else "-" for a, b in cells))
    totals = (f"{priced[n].total_us:,.1f} ({uniform[n].total_us:,.1f})" for n in priced)
    table.add_row("[bold]total[/bold]", *totals)
    return table


def _memory(predicted: Prediction) -> Table:
    table = Table(
        *("dispatcher", "buffer", "kind", "MB here", "MB worst routing"),
        title="Predicted memory of the fullest rank (drawn routing)",
    )
    for name, priced in predicted.drawn.items():
        for at, buffer in enumerate(priced.memory):
            table.add_row("" if at else name, buffer.name, buffer.kind, _mb(buffer.here), _mb(buffer.worst))
    return table


def _assumptions(predicted: Prediction, rates: list[str], out: Console) -> None:
    """Every formula once, with the terms that use it."""
    out.print("\n[bold]Assumptions[/bold]")
    for rate in rates:
        out.print(f"  {escape(rate)}", highlight=False)
    users: dict[str, list[str]] = {}
    for name, priced in predicted.drawn.items():
        for op in OPS:
            operation = getattr(priced, op)
            for term in operation.terms:
                if term.us > 0:
                    users.setdefault(f"{term.name}: {term.formula}", []).append(f"{name} {op}")
            users.setdefault(f"total: {operation.rule}", []).append(f"{name} {op}")
    for formula, where in users.items():
        out.print(f"  {escape(formula)} [dim]({', '.join(where)})[/dim]")


def _choice(choice: dict[str, str | None], predicted: Prediction, out: Console) -> None:
    for name, why in predicted.why_not.items():
        out.print(f"  {name}: {why}")
    out.print("\nTimes are predictions: lower bounds, nothing was measured here.")
    out.print(
        f"least predicted dispatch + combine, closed form: [bold]{choice['closed_form']}[/bold] "
        f"(of those that run here: {choice['closed_form_runnable']}); "
        f"drawn routing: {choice['drawn']} ({choice['drawn_runnable']})"
    )
    ratios = ", ".join(f"{name} {predicted.ratio(name):.2f}" for name in predicted.closed)
    out.print(f"predicted time, drawn over uniform: {ratios}")
