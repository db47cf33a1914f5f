"""The `flexep` command. Each command lives in a file of its own with `register(app)`.

Those files import torch and the rest of the package inside their functions, so that `--help` is instant and
works where the rest does not load.
"""

from __future__ import annotations

from typing import Annotated

import typer

from flexep import __version__
from flexep.cli import bench, demo, doctor, plan, train, verify

app = typer.Typer(
    name="flexep",
    help="Dispatch and combine for Mixture-of-Experts expert parallelism.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"flexep {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit."),
    ] = False,
) -> None:
    pass


for command in (doctor, verify, bench, plan, train, demo):
    command.register(app)


def main() -> None:
    """Entry point of the console script."""
    app()
