"""A whole swarm inside one async program: registry, block servers and client are context managers.

    python clients/embedded.py                      # a tiny random model, made on the spot
    python clients/embedded.py demo "Once upon a time"

A service that serves blocks beside its other work embeds a `BlockServer` in the same way.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path

import anyio

import petals_async
from petals_async.testing.tiny import make_tiny_llama

TINY_BLOCKS = 4


async def run(model: str, prompt: str, max_new_tokens: int) -> petals_async.GenerationResult:
    """Open a registry, a block server for each half of the model, and a client; print a text as it grows."""
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(petals_async.Registry("127.0.0.1:0"))
        for blocks in halves(model):
            server = petals_async.BlockServer(model, blocks, registry=registry.address)
            await stack.enter_async_context(server)
            print(f"serving blocks {server.info.span} at {server.address}")
        client = await stack.enter_async_context(petals_async.Client(model, registry.address))
        async with client.stream(prompt, max_new_tokens=max_new_tokens) as stream:
            async for piece in stream:
                print(piece.text, end="", flush=True)
        print(f"\n{len(stream.result.token_ids)} tokens, ended by {stream.result.finish_reason}")
        return stream.result


def halves(model: str) -> tuple[str, str]:
    """Return the two halves of a model's blocks."""
    from petals_async.models.checkpoint import Checkpoint
    from petals_async.models.resolve import resolve

    num_blocks = Checkpoint.open(resolve(model)).num_blocks
    return f"0:{num_blocks // 2}", f"{num_blocks // 2}:{num_blocks}"


def main() -> None:
    """Read the arguments, and run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", help="a directory, a Hub id, a .gguf file, or 'demo'; tiny if left out")
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as work:
        model = arguments.model or str(make_tiny_llama(Path(work) / "tiny", num_blocks=TINY_BLOCKS))
        anyio.run(run, model, arguments.prompt, arguments.max_new_tokens)


if __name__ == "__main__":
    main()
