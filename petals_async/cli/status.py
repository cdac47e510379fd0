"""`petals-async status`: who serves what, which blocks are covered, and the KV memory in use."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import typer

from petals_async.cli.console import say
from petals_async.cli.exits import EXIT_FAILED, checked, reported
from petals_async.cli.options import DEFAULT_REGISTRY, AsJson, RegistryAddress

if TYPE_CHECKING:
    from petals_async.cli.coverage import ModelCoverage
    from petals_async.cli.survey import Answer


def status(registry: RegistryAddress = DEFAULT_REGISTRY, as_json: AsJson = False) -> None:
    """Show a swarm's servers, the coverage of each model's blocks, and the KV memory in use."""
    with reported():
        from petals_async.cli.coverage import coverage_by_model
        from petals_async.cli.signals import until_stopped
        from petals_async.cli.survey import survey
        from petals_async.loop import run
        from petals_async.registry.address import parse_registry

        with checked():
            parse_registry(registry)

        async def work() -> None:
            answers = await survey(registry)
            reachable = [answer.info for answer in answers if answer.info is not None and not answer.problem]
            models = coverage_by_model(reachable)
            if as_json:
                say(json.dumps(status_record(registry, answers, models)))
            else:
                _show(registry, answers, models)

        stopped = run(until_stopped, work)
    if stopped:
        raise typer.Exit(EXIT_FAILED)


def _show(registry: str, answers: Sequence[Answer], models: Sequence[ModelCoverage]) -> None:
    from petals_async.cli.status_table import show_status

    show_status(registry, answers, models)


def status_record(registry: str, answers: Sequence[Answer], models: Sequence[ModelCoverage]) -> dict[str, Any]:
    """Return a swarm's state as JSON has it; spans are START:END."""
    return {
        "registry": registry,
        "servers": [_server_record(answer) for answer in answers],
        "models": [
            {
                "model": found.model,
                "fingerprint": found.fingerprint,
                "num_blocks": found.num_blocks,
                "coverage": [{"blocks": str(span), "servers": count} for span, count in found.runs],
                "gaps": [str(span) for span in found.gaps],
                "conflicts": list(found.conflicts),
            }
            for found in models
        ],
    }


def _server_record(answer: Answer) -> dict[str, Any]:
    record: dict[str, Any] = {"address": answer.address, "reachable": not answer.problem, "problem": answer.problem}
    info = answer.info
    if info is None:
        return record
    return record | {
        "server_id": info.server_id,
        "name": info.name,
        "version": info.version,
        "model": info.model,
        "model_fingerprint": info.model_fingerprint,
        "blocks": str(info.span),
        "dtype": info.dtype,
        "state": info.state.value,
        "kv_capacity_tokens": info.kv_capacity_tokens,
        "kv_free_tokens": info.kv_free_tokens,
        "block_step_s": info.block_step_s,
        "kv_used_bytes": sum(session.kv_bytes for session in answer.sessions),
        "sessions": [{**asdict(session), "span": str(session.span)} for session in answer.sessions],
    }
