"""From SIGKILL to the next token, against one prefill of the same prefix on the same span.

The demo model on two servers, 0:15 and 15:30, and a spare for the second. A generation decodes some tokens, the
second server is killed, and the next token is awaited: the loss is noticed, the spare opened, the prefix replayed in
the chunks in which it was first sent, and the step run. The prefill it is held against is one step of all tokens of
the prefix, on the spare itself, in the same round.

    python -m benchmarks.recovery       # prints JSON
"""

from __future__ import annotations

import argparse
import signal
import time
from contextlib import AsyncExitStack

import anyio

import petals_async
from benchmarks.children import start_servers
from benchmarks.report import Report, spread
from petals_async.client.segment import Segment, SegmentRequest
from petals_async.core.hidden import HiddenStates
from petals_async.core.server_info import Limits, ServerInfo, ServerState
from petals_async.core.span import Span
from petals_async.loop import run
from petals_async.rpc.block_channel import GrpcConnector

LOST = Span(15, 30)
CASES = ((512, 8), (8, 512))
LIMITS = Limits(max_step_tokens=1024)  # so that the whole prefix fits in the one step that is the yardstick


async def decode(client: petals_async.Client, session: petals_async.Session, token_ids: list[int]) -> int:
    states = client.files.edges.embed(token_ids, position=session.position)
    outputs = await session.step(states, num_outputs=1)
    return int(client.files.edges.logits(outputs)[0, -1].argmax())


async def prefill_s(client: petals_async.Client, server: ServerInfo, prefix: HiddenStates) -> float:
    """Return the seconds of one step with the whole prefix, on a session of its own."""
    async with GrpcConnector().connect(server.address) as channel, anyio.create_task_group() as tasks:
        request = SegmentRequest(client.checkpoint.fingerprint, LOST, 1, prefix.num_tokens, client.dtype)
        segment = Segment(channel, server, request)
        tasks.start_soon(segment.run)
        await segment.opened()
        started_at = time.perf_counter()
        await segment.step(0, prefix, num_outputs=1)
        elapsed_s = time.perf_counter() - started_at
        segment.close()
    return elapsed_s


async def id_of(client: petals_async.Client, name: str) -> str:
    """Return the id of the server with a name, once the client has heard of it."""
    while True:
        for known in client.servers:
            if known.name == name and known.state is ServerState.SERVING:
                return known.server_id
        await client._swarm.wait_for_change(1.0)


async def one_round(
    client: petals_async.Client, stack: AsyncExitStack, registry: str, case: tuple[int, int]
) -> tuple[float, float]:
    num_prompt, num_decoded = case
    name = f"victim-{time.monotonic_ns()}"
    (server,) = await start_servers(stack, registry, "demo", [str(LOST)], name=name, dtype=client.dtype, limits=LIMITS)
    victim_id = await id_of(client, name)
    prompt = [1 + index % 1000 for index in range(num_prompt)]
    spares = [known for known in client.servers if known.span == LOST and known.server_id != victim_id]
    for spare in spares:
        client._swarm.health.record_failure(spare.server_id, anyio.current_time(), "kept as the spare")
    async with client.session(max_tokens=num_prompt + num_decoded + 1) as session:
        token = await decode(client, session, prompt)
        for _ in range(num_decoded):
            token = await decode(client, session, [token])
        for spare in spares:
            client._swarm.health.readmit(spare.server_id)
        if session.route[-1][1].server_id != victim_id:
            raise RuntimeError("the route doesn't go through the victim")
        prefix = HiddenStates.concat_tokens([chunk.hidden for chunk in session._stages[-1].links[0].log.read(0, 10**6)])
        started_at = time.perf_counter()
        server.signal(signal.SIGKILL)
        await server.wait()
        await decode(client, session, [token])
        recovery_s = time.perf_counter() - started_at
        if len(session.recoveries) != 1:
            raise RuntimeError(f"expected one recovery, got {session.recoveries}")
        spare = session.route[-1][1]
    return recovery_s, await prefill_s(client, spare, prefix)


async def main(rounds: int, dtype: str, cases: tuple[tuple[int, int], ...]) -> None:
    report = Report("recovery", {"rounds": rounds, "dtype": dtype, "lost_span": str(LOST)})
    async with AsyncExitStack() as stack:
        registry = await stack.enter_async_context(petals_async.Registry("127.0.0.1:0"))
        await start_servers(stack, registry.address, "demo", ["0:15", str(LOST)], dtype=dtype, limits=LIMITS)
        client = await stack.enter_async_context(petals_async.Client("demo", registry.address, threads=1))
        for case in cases:
            recoveries, prefills = [], []
            for turn in range(rounds + 1):
                recovery_s, whole_s = await one_round(client, stack, registry.address, case)
                if turn:
                    recoveries.append(recovery_s)
                    prefills.append(whole_s)
            name = f"{case[0]} prompt, {case[1]} decoded"
            report.add(name, {"kill_to_token_s": spread(recoveries), "prefill_s": spread(prefills)})
            allowed = [1.5 * whole_s + 0.05 for whole_s in prefills]
            limit = 1.0 if case == CASES[0] else None
            report.ratio(f"{name}: kill to token / (1.5 prefill + 50 ms)", recoveries, allowed, 1, limit=limit)
    report.print()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="counted rounds of each case")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--short", action="store_true", help="leave out the case with 512 decoded tokens (minutes a round)"
    )
    arguments = parser.parse_args()
    run(main, arguments.rounds, arguments.dtype, CASES[:1] if arguments.short else CASES)
