"""What one more hop costs: a session step over a block server, against a bare grpc.aio echo of the same bytes.

Both servers are processes of their own; the client alternates between them in one run. The backend is either the
identity (no compute at all: what is measured is ours), or one block of a tiny random Llama.

    python -m benchmarks.hop            # prints JSON
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import anyio

from benchmarks.children import child
from benchmarks.report import Report, quantiles
from petals_async.abc import BackendResult
from petals_async.core.hidden import HiddenStates
from petals_async.loop import run

IDENTITY_WIDTH = 4096
TOKENS_IN_SESSION = 8000
FINGERPRINT = "0" * 64


class IdentityBackend:
    """No compute: outputs are inputs."""

    dtype = "float32"

    def __init__(self, hidden_size: int) -> None:
        from petals_async.core.span import Span

        self.hidden_size = hidden_size
        self.span = Span(0, 1)

    def kv_bytes(self, span: Any, batch_size: int, num_tokens: int) -> int:
        return batch_size * num_tokens

    def allocate(self, span: Any, batch_size: int, max_tokens: int) -> None:
        return None

    def copy_prefix(self, source: Any, target: Any, num_tokens: int) -> None:
        return None

    def run(self, steps: Any) -> list[BackendResult]:
        return [BackendResult(step.hidden, 0.0) for step in steps]


# -- the servers, each in a process of its own


def serve_block(pipe: Any, model: str | None) -> None:
    run(_serve_block, pipe, model)


async def _serve_block(pipe: Any, model: str | None) -> None:
    from petals_async.core.server_info import Limits, ServerInfo, ServerState
    from petals_async.core.span import Span
    from petals_async.engine.worker import compute_thread
    from petals_async.rpc.block_servicer import BlockServicer
    from petals_async.rpc.server import serve_blocks
    from petals_async.server.host import BlockHost, HostOptions

    def load() -> Any:
        if model is None:
            return IdentityBackend(IDENTITY_WIDTH)
        import torch

        from petals_async.engine.backend import TorchBackend
        from petals_async.models.checkpoint import Checkpoint
        from petals_async.models.span import BlockSpan

        torch.set_num_threads(1)
        return TorchBackend(BlockSpan.load(Checkpoint.open(Path(model)), 0, 1))

    servicer = BlockServicer()
    async with serve_blocks(servicer, "127.0.0.1", 0) as server, compute_thread() as worker:
        backend = await worker.call(load)
        worker.adopt(backend)
        info = ServerInfo(
            "id", "bench", f"127.0.0.1:{server.port}", "0", "bench", FINGERPRINT, 1, backend.hidden_size,
            Span(0, 1), "float32", ServerState.SERVING, limits=Limits(max_session_tokens=100_000),
        )  # fmt: skip
        servicer.service = BlockHost(info, backend, worker, HostOptions(kv_budget_bytes=2**32))
        pipe.send(info)
        await anyio.sleep_forever()


def serve_echo(pipe: Any) -> None:
    run(_serve_echo, pipe)


async def _serve_echo(pipe: Any) -> None:
    import grpc

    from petals_async.rpc.options import SERVER_OPTIONS

    async def echo(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        async for request in requests:
            yield request

    server = grpc.aio.server(options=SERVER_OPTIONS)
    handler = grpc.stream_stream_rpc_method_handler(echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Echo", {"Run": handler}),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    pipe.send(f"127.0.0.1:{port}")
    await anyio.sleep_forever()


# -- the clients


@dataclass
class Lane:
    """Something that sends the same bytes there and back."""

    name: str
    times: list[float]
    call: Any


@asynccontextmanager
async def block_lane(info: Any, name: str) -> AsyncIterator[Lane]:
    from petals_async.client.segment import Segment, SegmentRequest
    from petals_async.rpc.block_channel import GrpcConnector

    async with GrpcConnector().connect(info.address) as channel, anyio.create_task_group() as tasks:
        request = SegmentRequest(FINGERPRINT, info.span, 1, TOKENS_IN_SESSION, "float32")
        segment = Segment(channel, info, request)
        tasks.start_soon(segment.run)
        await segment.opened()
        states = HiddenStates("float32", (1, 1, info.hidden_size), bytes(4 * info.hidden_size))
        position = 0

        async def call() -> None:
            nonlocal position
            await segment.step(position, states)
            position += 1

        yield Lane(name, [], call)
        segment.close()


@asynccontextmanager
async def echo_lane(address: str, name: str, size: int) -> AsyncIterator[Lane]:
    import grpc

    from petals_async.rpc.options import CHANNEL_OPTIONS

    async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
        stream = channel.stream_stream("/bench.Echo/Run")()
        data = bytes(size)

        async def call() -> None:
            await stream.write(data)
            await stream.read()

        yield Lane(name, [], call)
        stream.cancel()


async def measure(lanes: list[Lane], rounds: int, calls: int) -> None:
    """Alternate between the lanes, `calls` at a time; the first round warms up."""
    for turn in range(rounds + 1):
        for lane in lanes:
            for _ in range(calls):
                started_at = time.perf_counter()
                await lane.call()
                if turn:
                    lane.times.append(time.perf_counter() - started_at)


async def main(rounds: int, calls: int) -> None:
    from petals_async.testing.tiny import make_tiny_llama

    with TemporaryDirectory() as folder:
        model = make_tiny_llama(Path(folder) / "tiny", num_blocks=1)
        async with AsyncExitStack() as stack:
            enter = stack.enter_async_context
            echo_address = (await enter(child(serve_echo))).first
            identity = (await enter(child(serve_block, None))).first
            tiny = (await enter(child(serve_block, str(model)))).first
            lanes = [
                await enter(echo_lane(echo_address, "echo 16 KiB", 4 * IDENTITY_WIDTH)),
                await enter(block_lane(identity, "identity 16 KiB")),
                await enter(echo_lane(echo_address, "echo 256 B", 4 * tiny.hidden_size)),
                await enter(block_lane(tiny, "tiny block 256 B")),
            ]
            await measure(lanes, rounds, calls)
    report = Report("hop", {"rounds": rounds, "calls": calls})
    for lane in lanes:
        report.add(lane.name, quantiles(lane.times))
    report.ratio("identity / echo", lanes[1].times, lanes[0].times, calls, limit=2.0)
    report.ratio("tiny block / echo", lanes[3].times, lanes[2].times, calls, limit=3.0)
    report.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="counted rounds")
    parser.add_argument("--calls", type=int, default=200, help="calls of each lane in one round")
    arguments = parser.parse_args()
    run(main, arguments.rounds, arguments.calls)
