"""The command `petals-async`: its commands and nothing else; each has a file of its own.

What a command needs is imported when it runs, so that `--help` imports no gRPC and no torch.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from petals_async.cli.generate import generate
from petals_async.cli.registry import registry
from petals_async.cli.serve import serve
from petals_async.cli.status import status
from petals_async.cli.up import up
from petals_async.version import __version__

app = typer.Typer(
    name="petals-async",
    help="Run one large language model over several machines, and keep generating when any of them dies.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # importing it costs a tenth of a second, and plain usage errors are one line
    pretty_exceptions_enable=False,
)

for command in (up, registry, serve, generate, status):
    app.command()(command)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"petals-async {__version__}")
        raise typer.Exit


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Run one large language model over several machines, and keep generating when any of them dies."""


def main() -> None:
    """Run the command, and exit with its code."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # its own lines on stderr repeat our errors, less clearly
    app()
