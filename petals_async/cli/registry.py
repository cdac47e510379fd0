"""`petals-async registry`: who serves what, for servers and clients to ask."""

from __future__ import annotations

from typing import Annotated

import typer

from petals_async.cli.console import log_to_stderr, say
from petals_async.cli.exits import EXIT_STOPPED, checked, reported
from petals_async.cli.options import DEFAULT_REGISTRY


def registry(
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 for any free one.")
    ] = DEFAULT_REGISTRY,
) -> None:
    """Run a registry until SIGTERM or Ctrl-C.

    Writes one line to stdout when it can be used: ready registry HOST:PORT
    """
    with reported(interrupted=EXIT_STOPPED):
        import anyio

        from petals_async.cli.signals import until_stopped
        from petals_async.loop import run
        from petals_async.registry.embedded import Registry

        log_to_stderr()
        with checked():
            embedded = Registry(listen)

        async def work() -> None:
            async with embedded:
                say(f"ready registry {embedded.address}")
                await anyio.sleep_forever()

        run(until_stopped, work)
