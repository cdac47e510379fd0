"""`petals-async generate`: a text, shown while it grows."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from petals_async.cli.console import Progress, log_to_stderr, progress, say, tell
from petals_async.cli.exits import EXIT_FAILED, checked, reported
from petals_async.cli.options import DEFAULT_REGISTRY, AsJson, DtypeName, Model, RegistryAddress

if TYPE_CHECKING:
    from petals_async.client.client import Client
    from petals_async.client.result import GenerationResult, Recovery

DEFAULT_TIMEOUT_S = 120.0
"""How long to wait for servers, at the start and at each step."""

STDIN = "-"
"""The prompt that stands for standard input."""


def generate(
    model: Model,
    prompt: Annotated[str, typer.Argument(metavar="PROMPT", help="The text to continue; - reads it from stdin.")],
    registry: RegistryAddress = DEFAULT_REGISTRY,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="New tokens at most.  [default: 256]")] = None,
    temperature: Annotated[
        float | None, typer.Option(min=0.0, help="0 takes the best token; above, tokens are drawn.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Draw from so many tokens; 0 for all.")] = None,
    top_p: Annotated[float | None, typer.Option(min=0.0, max=1.0, help="Draw from tokens of this probability.")] = None,
    repetition_penalty: Annotated[float | None, typer.Option(help="Above 1 makes repetitions rarer.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be given several times.")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Of the draws.")] = None,
    dtype: Annotated[
        DtypeName | None, typer.Option(help="Use servers that compute in this.  [default: the swarm's]")
    ] = None,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", min=0.1, help="How long to wait for servers, at each step.")
    ] = DEFAULT_TIMEOUT_S,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    as_json: AsJson = False,
) -> None:
    """Continue a text.

    The new text goes to stdout as it comes, or at the end as one JSON object; what happens meanwhile goes to stderr.
    """
    options = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "stop_strings": stop or None,
        "seed": seed,
    }
    with reported():
        from petals_async.cli.signals import until_stopped
        from petals_async.client.client import Client
        from petals_async.loop import run

        log_to_stderr()
        text = sys.stdin.read().removesuffix("\n") if prompt == STDIN else prompt
        with progress() as report:
            with checked():
                dtype_name = dtype.value if dtype else None
                client = Client(model, registry, dtype=dtype_name, timeout_s=timeout, on_progress=report)
            request: Any = [{"role": "user", "content": text}] if chat else text
            set_options = {name: value for name, value in options.items() if value is not None}
            stopped = run(until_stopped, lambda: _continue(client, report, request, set_options, as_json))
    if stopped:
        tell("interrupted")
        raise typer.Exit(EXIT_FAILED)


async def _continue(client: Client, report: Progress, request: Any, options: dict[str, Any], as_json: bool) -> None:
    async with client:
        report.done()
        started_at = time.perf_counter()
        async with client.stream(request, **options) as stream:
            async for piece in stream:
                if not as_json:
                    sys.stdout.write(piece.text)
                    sys.stdout.flush()
        elapsed_s = time.perf_counter() - started_at
    for recovery in stream.result.recoveries:
        tell(recovery_line(recovery))
    tokens_per_s = len(stream.result.token_ids) / elapsed_s
    if as_json:
        say(json.dumps(result_record(stream.result, tokens_per_s)))
    else:
        say("")
        result = stream.result
        tell(f"{len(result.token_ids)} tokens, {tokens_per_s:.1f} tokens/s, ended by {result.finish_reason}")


def recovery_line(recovery: Recovery) -> str:
    """Return what was lost and how it went on, for a person."""
    return (
        f"recovered: blocks {recovery.span} were lost with {recovery.lost} at token {recovery.at} ({recovery.reason}); "
        f"{' and '.join(recovery.replacements)} took over after {recovery.duration_s:.2f} s, "
        f"{recovery.replayed_tokens} tokens replayed"
    )


def result_record(result: GenerationResult, tokens_per_s: float) -> dict[str, Any]:
    """Return a result as JSON has it; spans are START:END."""
    return {
        "text": result.text,
        "token_ids": list(result.token_ids),
        "finish_reason": result.finish_reason,
        "usage": asdict(result.usage),
        "recoveries": [{**asdict(recovery), "span": str(recovery.span)} for recovery in result.recoveries],
        "exact": result.exact,
        "tokens_per_s": round(tokens_per_s, 3),
    }
