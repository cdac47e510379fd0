"""How a command ends: exit codes, and one line on stderr for each error of ours.

0 is stopped or done, 2 wrong usage, 1 anything else. An error that isn't of our tree is a bug, and keeps its traceback.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from petals_async.errors import ConfigurationError, PetalsAsyncError, RequestError

EXIT_FAILED = 1
"""It could not be done, or was interrupted."""

EXIT_STOPPED = 0
"""It was asked to stop."""


@contextmanager
def reported(*, interrupted: int = EXIT_FAILED) -> Iterator[None]:
    """End the command with EXIT_FAILED and one line on stderr when an error of ours comes out.

    SIGTERM counts as Ctrl-C, from here until an event loop takes both over.

    Args:
        interrupted: The exit code after Ctrl-C.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(interrupted) from None
    except PetalsAsyncError as error:
        typer.echo(f"error: {one_line(str(error))}", err=True)
        raise typer.Exit(EXIT_FAILED) from None


@contextmanager
def checked() -> Iterator[None]:
    """End the command as wrong usage when a value that was typed can't be read."""
    try:
        yield
    except (ConfigurationError, RequestError) as error:
        raise typer.BadParameter(one_line(str(error))) from None


def one_line(text: str) -> str:
    """Return a text without line breaks."""
    return " ".join(text.split())
