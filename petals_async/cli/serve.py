"""`petals-async serve`: one block server."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from petals_async.cli.console import log_to_stderr, progress, say
from petals_async.cli.exits import EXIT_STOPPED, checked, reported
from petals_async.cli.options import (
    DEFAULT_DEVICE,
    DEFAULT_DRAIN_S,
    DEFAULT_DTYPE,
    DEFAULT_KV_BUDGET,
    DEFAULT_LISTEN,
    Dtype,
    KvBudget,
    Model,
)

if TYPE_CHECKING:
    from petals_async.server.block_server import BlockServer

log = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0:", "[::]:")
"""Hosts that one can listen on, and nobody can connect to."""


def serve(
    model: Model,
    blocks: Annotated[
        str | None, typer.Option(metavar="START:END", help="The blocks to hold, END not included.  [default: all]")
    ] = None,
    registry: Annotated[
        str | None,
        typer.Option(metavar="ADDRESS", help="HOST:PORT of the registry to announce to.  [default: announce nowhere]"),
    ] = None,
    listen: Annotated[
        str, typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 for any free one.")
    ] = DEFAULT_LISTEN,
    public_address: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="What clients reach it under.  [default: as listened on]")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="A stable name for people.  [default: of host, process and blocks]")
    ] = None,
    dtype: Dtype = DEFAULT_DTYPE,
    device: Annotated[str, typer.Option(metavar="DEVICE", help="cpu, cuda, cuda:N or mps.")] = DEFAULT_DEVICE,
    kv_budget: KvBudget = DEFAULT_KV_BUDGET,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads that compute.  [default: torch's own]")] = None,
    drain_timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.0, help="How long SIGTERM waits for clients to leave.")
    ] = DEFAULT_DRAIN_S,
) -> None:
    """Serve blocks of a model until it is stopped.

    Writes one line to stdout when it can be used: ready SERVER_ID HOST:PORT blocks=START:END
    SIGTERM drains: no new sessions, and those held move on. A second one, or Ctrl-C, stops at once.
    """
    with reported(interrupted=EXIT_STOPPED), progress() as report:
        from petals_async.loop import run
        from petals_async.server.block_server import BlockServer
        from petals_async.server.serve import serve as serve_until_stopped

        log_to_stderr()
        with checked():
            server = BlockServer(
                model,
                blocks,
                on_progress=report,
                registry=registry,
                listen=listen,
                public_address=public_address,
                name=name,
                dtype=dtype.value,
                device=device,
                kv_budget=kv_budget,
                threads=threads,
                drain_s=drain_timeout,
            )

        def ready(running: BlockServer) -> None:
            report.done()
            _warn_if_unreachable(running.address)
            say(f"ready {running.info.server_id} {running.address} blocks={running.info.span}")

        run(serve_until_stopped, server, ready)


def _warn_if_unreachable(address: str) -> None:
    if address.startswith(EVERYWHERE):
        log.warning("clients are told to connect to %s, which they can't: give --public-address", address)
