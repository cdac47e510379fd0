"""What a command writes: results to stdout, everything else to stderr."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

import typer

LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"
"""A line of the log, for people and for journald."""


def say(line: str) -> None:
    """Write one line to stdout, at once: another program may wait for it."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def tell(line: str) -> None:
    """Write one line about what happens to stderr."""
    typer.echo(line, err=True)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to what `sys.stderr` is now: rich replaces it while it shows progress."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)


def log_to_stderr() -> None:
    """Send the library's log to stderr; warnings alone of other libraries."""
    handler = _StderrHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    logging.getLogger().addHandler(handler)
    logging.getLogger("petals_async").setLevel(logging.INFO)


class Progress:
    """Shows how far something is: one line that changes on a terminal, plain lines otherwise."""

    def __init__(self, show: Callable[[str], None], stop: Callable[[], None]) -> None:
        self._show = show
        self._stop = stop

    def __call__(self, line: str) -> None:
        """Show a line; from any thread."""
        self._show(line)

    def done(self) -> None:
        """Take the line away: what follows is written by others. May be called again."""
        self._stop()


@contextmanager
def progress() -> Iterator[Progress]:
    """Show progress on stderr for as long as the context is open, or until `done`."""
    if not sys.stderr.isatty():
        yield Progress(tell, lambda: None)
        return
    from rich.console import Console
    from rich.markup import escape

    with Console(stderr=True).status("starting") as status:
        yield Progress(lambda line: status.update(escape(line)), status.stop)
