"""`petals-async up`: a whole swarm on this machine, with one command."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from petals_async.cli.console import Progress, log_to_stderr, progress, say
from petals_async.cli.exits import EXIT_STOPPED, checked, reported
from petals_async.cli.options import DEFAULT_DTYPE, DEFAULT_KV_BUDGET, AsJson, Dtype, KvBudget, Model

if TYPE_CHECKING:
    from petals_async.server.process import Ready

DEFAULT_PORT = 7600
MAX_SERVERS = 64
"""Processes that one command starts, at most."""


@dataclass(frozen=True, slots=True)
class UpOptions:
    """What was typed."""

    model: str
    servers: int
    port: int
    dtype: str
    kv_budget: str
    threads: int | None
    as_json: bool


def up(
    model: Model,
    servers: Annotated[int, typer.Option(min=1, max=MAX_SERVERS, help="Block servers; they share the blocks.")] = 3,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the registry; 0 for any free one.")
    ] = DEFAULT_PORT,
    dtype: Dtype = DEFAULT_DTYPE,
    kv_budget: KvBudget = DEFAULT_KV_BUDGET,
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads of each server that compute.  [default: cores / servers]")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Run a registry and block servers as child processes, until Ctrl-C.

    A server that dies is started again. SIGTERM lets the servers drain, Ctrl-C ends them at once.
    """
    with reported(interrupted=EXIT_STOPPED), progress() as report:
        from petals_async.cli.local_swarm import run_swarm
        from petals_async.loop import run
        from petals_async.server.options import ServerOptions

        log_to_stderr()
        with checked():
            ServerOptions(model, dtype=dtype.value, kv_budget=kv_budget, threads=threads)
        options = UpOptions(model, servers, port, dtype.value, kv_budget, threads, as_json)
        run(run_swarm, options, Output(options, report))


class Output:
    """What `up` writes.

    Args:
        options: What was typed.
        report: Shows progress.
    """

    def __init__(self, options: UpOptions, report: Progress) -> None:
        self._options = options
        self.tell = report
        """Takes lines for a person."""

    def ready(self, name: str, ready: Ready, pid: int) -> None:
        """Say that a server can be used."""
        if self._options.as_json:
            record = {"event": "ready", "server_id": ready.server_id, "name": name, "address": ready.address}
            say(json.dumps({**record, "blocks": ready.span, "pid": pid}))
        else:
            say(f"ready {ready.server_id} {ready.address} blocks={ready.span}")

    def complete(self, registry: str) -> None:
        """Say that all of it can be used, and how."""
        self.tell.done()
        command = f'petals-async generate {shlex.quote(self._options.model)} "Once upon a time" --registry {registry}'
        if self._options.as_json:
            say(json.dumps({"event": "up", "registry": registry, "command": command}))
        else:
            say(f"registry {registry}; try: {command}")
