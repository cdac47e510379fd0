"""The demo: three servers share a model, one is killed in the middle of a text, and the text stays the same.

    make demo, or: python clients/demo.py [MODEL] [--prompt TEXT] [--max-new-tokens N]

Exits with 1 if the tokens are not those of plain transformers in one process.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread

import petals_async
from petals_async.errors import PetalsAsyncError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.resolve import resolve
from petals_async.server.process import ServerProcess, forkserver, preload

DEFAULT_PROMPT = "The old lighthouse keeper opened the door, and"
DEFAULT_NEW_TOKENS = 72

KILL_AFTER_TOKENS = 24
"""The middle server is killed when so many tokens are there, and the spare one is ready."""

STOP_TIMEOUT_S = 5.0
"""How long a server may take to end; it is killed then."""


class Screen:
    """Where the growing text and what happens meanwhile are shown."""

    def __init__(self) -> None:
        self._started_at = time.perf_counter()
        self._in_text = False

    def show(self, text: str) -> None:
        """Show more of the text."""
        print(text, end="", flush=True)
        self._in_text = True

    def tell(self, line: str) -> None:
        """Show a line with the seconds since the start."""
        if self._in_text:
            print()
        self._in_text = False
        print(f"[{time.perf_counter() - self._started_at:5.1f} s] {line}", flush=True)


screen = Screen()


@dataclass
class Swarm:
    """A registry here, and block servers in processes of their own."""

    context: Any
    model: str
    registry: petals_async.Registry
    processes: dict[str, ServerProcess] = field(default_factory=dict)

    async def add(self, name: str, blocks: str) -> None:
        """Start a server, and return when it can be used."""
        options = {"model": self.model, "blocks": blocks, "name": name, "registry": self.registry.address, "threads": 1}
        process = self.processes[name] = ServerProcess(self.context, options)
        ready = await process.start()
        screen.tell(f"server {name:6} blocks {ready.span:5} at {ready.address}, process {process.pid}")

    async def kill(self, name: str) -> None:
        """Kill a server: no goodbye, as if its machine had lost power."""
        screen.tell(f"kill -9 server {name}")
        self.processes[name].signal(signal.SIGKILL)
        await self.processes[name].wait()


async def import_in_thread(name: str) -> None:
    """Import a module without holding up the event loop."""
    await anyio.to_thread.run_sync(import_module, name)


@asynccontextmanager
async def local_swarm(model: str, checkpoint: Checkpoint) -> AsyncIterator[Swarm]:
    """Run a registry and three servers, each with a third of the blocks."""
    context = forkserver(checkpoint.text_config.get("model_type"))
    screen.tell("importing torch and transformers, once here and once for all servers")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(preload, context)
        tasks.start_soon(import_in_thread, "transformers.modeling_utils")  # for the client
    async with petals_async.Registry("127.0.0.1:0") as registry:
        swarm = Swarm(context, model, registry)
        try:
            async with anyio.create_task_group() as tasks:
                for name, blocks in zip(("first", "middle", "last"), thirds(checkpoint.num_blocks), strict=True):
                    tasks.start_soon(swarm.add, name, str(blocks))
            yield swarm
        finally:
            async with anyio.create_task_group() as tasks:
                for process in swarm.processes.values():
                    tasks.start_soon(process.stop, STOP_TIMEOUT_S)


def thirds(num_blocks: int) -> list[petals_async.Span]:
    """Return all blocks in three spans."""
    cuts = [0, num_blocks // 3, 2 * num_blocks // 3, num_blocks]
    return [petals_async.Span(start, end) for start, end in pairwise(cuts)]


def spare_span(num_blocks: int) -> petals_async.Span:
    """Return the middle third and a few blocks to each side: who steps in runs only the blocks that are missing."""
    middle = thirds(num_blocks)[1]
    return petals_async.Span(middle.start - len(middle) // 5, middle.end + len(middle) // 5)


async def generate(
    client: petals_async.Client, swarm: Swarm, prompt: str, max_new_tokens: int
) -> petals_async.GenerationResult:
    """Show a text while it grows; meanwhile a spare server comes, and the middle one is killed."""
    screen.tell("route: " + " -> ".join(f"{server.span} on {server.name}" for server in by_block(client.servers)))
    screen.tell(f"prompt: {prompt!r}")
    num_tokens, started_at = 0, time.perf_counter()
    async with anyio.create_task_group() as tasks:
        spare_ready = anyio.Event()
        tasks.start_soon(add_spare, swarm, client.checkpoint.num_blocks, spare_ready)
        async with client.stream(prompt, max_new_tokens=max_new_tokens, eos_token_id=None) as stream:
            async for piece in stream:
                screen.show(piece.text)
                num_tokens += len(piece.token_ids)
                if num_tokens >= KILL_AFTER_TOKENS and swarm.processes["middle"].exit_code is None:
                    await spare_ready.wait()
                    await swarm.kill("middle")
    elapsed_s = time.perf_counter() - started_at
    screen.tell(f"{num_tokens} tokens in {elapsed_s:.1f} s, {num_tokens / elapsed_s:.1f} tokens/s")
    return stream.result


async def add_spare(swarm: Swarm, num_blocks: int, ready: anyio.Event) -> None:
    """Start a fourth server, which can step in for the middle one."""
    await swarm.add("spare", str(spare_span(num_blocks)))
    ready.set()


def by_block(servers: list[petals_async.ServerInfo]) -> list[petals_async.ServerInfo]:
    """Return servers in the order of their blocks."""
    return sorted(servers, key=lambda server: server.span)


def tell_recoveries(result: petals_async.GenerationResult) -> None:
    """Print what the generation got over."""
    for recovery in result.recoveries:
        screen.tell(
            f"recovered: blocks {recovery.span} lost with {recovery.lost} at token {recovery.at} ({recovery.reason}); "
            f"{' and '.join(recovery.replacements)} took over: {recovery.replayed_tokens} tokens replayed, "
            f"{recovery.duration_s * 1e3:.0f} ms"
        )


def plain_tokens(path: Path, prompt: str, max_new_tokens: int) -> list[int]:
    """Return what plain transformers generates, in one process and with no server."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    inputs = AutoTokenizer.from_pretrained(path)(prompt, return_tensors="pt")
    output = model.generate(
        **inputs, max_new_tokens=max_new_tokens, min_new_tokens=max_new_tokens, do_sample=False, eos_token_id=None
    )
    tokens: list[int] = output[0, inputs.input_ids.shape[1] :].tolist()
    return tokens


async def run(model: str, prompt: str, max_new_tokens: int) -> bool:
    """Run the demo; return whether the text was that of an undisturbed model, and a server was lost meanwhile."""
    checkpoint = Checkpoint.open(resolve(model, progress=screen.tell))
    async with (
        local_swarm(model, checkpoint) as swarm,
        petals_async.Client(model, swarm.registry.address, threads=1) as client,
    ):
        result = await generate(client, swarm, prompt, max_new_tokens)
    tell_recoveries(result)
    screen.tell("asking plain transformers for the same, in one process")
    expected = plain_tokens(checkpoint.path, prompt, max_new_tokens)
    equal = list(result.token_ids) == expected
    screen.tell(
        f"all {len(expected)} tokens are equal" if equal else "THE TOKENS DIFFER from those of plain transformers"
    )
    if not result.recoveries:
        screen.tell("NOTHING WAS RECOVERED: the server was killed too late")
    return equal and bool(result.recoveries)


def main() -> None:
    """Read the arguments, run, and exit with 1 if the demo doesn't hold."""
    parser = argparse.ArgumentParser(description="Three servers, one killed in the middle of a text: the same text.")
    parser.add_argument("model", nargs="?", default="demo", help="a directory, a Hub id, a .gguf file, or 'demo'")
    parser.add_argument("--prompt", default=DEFAULT_PROMPT)
    parser.add_argument("--max-new-tokens", type=int, default=DEFAULT_NEW_TOKENS)
    arguments = parser.parse_args()
    if arguments.max_new_tokens <= KILL_AFTER_TOKENS:
        parser.error(f"--max-new-tokens must be above {KILL_AFTER_TOKENS}")
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    try:
        sys.exit(not anyio.run(run, arguments.model, arguments.prompt, arguments.max_new_tokens))
    except PetalsAsyncError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")


if __name__ == "__main__":
    main()
