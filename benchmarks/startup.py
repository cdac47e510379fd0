"""How long a block server takes to answer and to be ready, and what memory it needs beside weights and KV.

Half of the demo model, 0:15, float32, one thread. `serve` is started as a process of its own, from nothing; then
further servers are started from one preloaded fork server, as `up` does.

    python -m benchmarks.startup        # prints JSON
"""

from __future__ import annotations

import argparse
import re
import signal
import socket
import sys
import time
from contextlib import AsyncExitStack

import anyio
import grpc
import psutil
from anyio.streams.text import TextReceiveStream
from grpc_health.v1 import health_pb2, health_pb2_grpc

import petals_async
from benchmarks.children import start_servers
from benchmarks.report import Report, spread
from petals_async.loop import run
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.demo import demo_path

BLOCKS = "0:15"
MIB = 2**20


def weights_bytes() -> int:
    """Return the bytes of the weights of `BLOCKS` in float32, from the shapes in the checkpoint."""
    checkpoint = Checkpoint.open(demo_path())
    total = 0
    for block in range(15):
        for name in checkpoint.block_tensors(block):
            size = 1
            for length in checkpoint.tensor(name).shape:
                size *= length
            total += 4 * size
    return total


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def first_answer_s(port: int, started_at: float) -> tuple[float, str]:
    """Return when the server answered a health check for the first time, and what."""
    while True:
        async with grpc.aio.insecure_channel(
            f"127.0.0.1:{port}", options=[("grpc.use_local_subchannel_pool", 1)]
        ) as channel:
            try:
                reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=1)
            except grpc.aio.AioRpcError:
                await anyio.sleep(0.01)
                continue
        return time.perf_counter() - started_at, health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)


async def from_nothing(figures: dict[str, list[float]]) -> None:
    """Start `serve`, and note when it answers, when its imports end, and when it is ready."""
    port = free_port()
    command = [
        sys.executable, "-m", "petals_async", "serve", "demo", "--blocks", BLOCKS, "--threads", "1",
        "--listen", f"127.0.0.1:{port}",
    ]  # fmt: skip
    started_at = time.perf_counter()
    async with await anyio.open_process(command) as process:
        answered_s, status = await first_answer_s(port, started_at)
        if status != "NOT_SERVING":
            raise RuntimeError(f"the first answer was {status}")
        imported_at = 0.0
        async for text in TextReceiveStream(process.stderr):  # type: ignore[arg-type]
            if found := re.search(r"imported in ([\d.]+) s", text):
                imported_at = time.perf_counter()
                figures["imports_s"].append(float(found[1]))
            if "loaded in" in text:
                break
        async for text in TextReceiveStream(process.stdout):  # type: ignore[arg-type]
            if text.startswith("ready"):
                break
        figures["first_answer_s"].append(answered_s)
        figures["ready_after_imports_s"].append(time.perf_counter() - imported_at)
        figures["beside_weights_mib"].append((psutil.Process(process.pid).memory_info().rss - weights_bytes()) / MIB)
        process.send_signal(signal.SIGINT)
        await process.wait()


async def from_fork_server(figures: dict[str, list[float]], rounds: int) -> None:
    """Start further servers from one fork server that has the imports already."""
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(petals_async.Registry("127.0.0.1:0"))
        await start_servers(stack, registry.address, "demo", [BLOCKS])
        for _ in range(rounds):
            started_at = time.perf_counter()
            (server,) = await start_servers(stack, registry.address, "demo", [BLOCKS])
            figures["further_one_ready_s"].append(time.perf_counter() - started_at)
            await server.stop(5.0)


async def main(rounds: int) -> None:
    report = Report("startup", {"rounds": rounds, "blocks": BLOCKS, "dtype": "float32"})
    names = ("first_answer_s", "imports_s", "ready_after_imports_s", "beside_weights_mib", "further_one_ready_s")
    figures: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        await from_nothing(figures)
    await from_fork_server(figures, rounds)
    for name, values in figures.items():
        report.add(name, spread(values))
    for name, limit in (
        ("first_answer_s", 0.5),
        ("ready_after_imports_s", 1.5),
        ("further_one_ready_s", 1.5),
        ("beside_weights_mib", 450.0),
    ):
        report.ratio(f"{name} / {limit:g}", figures[name], [limit] * len(figures[name]), 1, limit=1.0)
    report.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    run(main, parser.parse_args().rounds)
