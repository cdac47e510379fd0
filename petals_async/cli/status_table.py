"""A swarm's state as tables, for people."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from petals_async.cli.coverage import ModelCoverage
from petals_async.cli.survey import Answer
from petals_async.core.sizes import format_bytes

PLAIN_WIDTH = 200
"""Columns when the output isn't a terminal, so that nothing is cut."""

ID_CHARS = 8
"""Digits of ids shown."""

COLUMNS = ("name", "id", "address", "blocks", "dtype", "state", "KV free", "KV used", "sessions", "ms/token")


def show_status(registry: str, answers: Sequence[Answer], models: Sequence[ModelCoverage]) -> None:
    """Write the tables to stdout."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=PLAIN_WIDTH)
    if not answers:
        console.print(f"registry {escape(registry)}: no servers")
        return
    console.print(_server_table(registry, answers))
    for found in models:
        console.print(_coverage_line(found))
        for conflict in found.conflicts:
            console.print(f"  [red]different weights[/red] under one fingerprint: {escape(conflict)}")


def _server_table(registry: str, answers: Sequence[Answer]) -> Table:
    table = Table(title=f"registry {escape(registry)}", title_justify="left", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, overflow="fold")
    for answer in answers:
        table.add_row(*map(escape, _cells(answer)))
    return table


def _cells(answer: Answer) -> tuple[str, ...]:
    info = answer.info
    if info is None:
        return ("?", "", answer.address, "", "", f"unreachable ({answer.problem})")
    who = (info.name, info.server_id[:ID_CHARS], answer.address, str(info.span), info.dtype)
    if answer.problem:
        return (*who, f"unreachable ({answer.problem})")
    return (
        *who,
        info.state.value,
        f"{info.kv_free_tokens} of {info.kv_capacity_tokens} tokens",
        format_bytes(sum(session.kv_bytes for session in answer.sessions)),
        str(len(answer.sessions)),
        f"{info.block_step_s * len(info.span) * 1e3:.2f}",
    )


def _coverage_line(found: ModelCoverage) -> str:
    runs = ", ".join(f"{span} by {count}" for span, count in found.runs if count)
    line = f"{escape(found.model)} ({found.fingerprint[:ID_CHARS]}): {found.num_blocks} blocks; {runs or 'none served'}"
    if not found.gaps:
        return f"{line}; [green]complete[/green]"
    return f"{line}; [red]nobody serves {', '.join(map(str, found.gaps))}[/red]"
