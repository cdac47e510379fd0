"""The forerunner's picture of recovery: 8:14 is lost from a route, a newcomer holds 6:24, only 8:14 is done again."""

import anyio
import pytest
from scenarios import in_child, plain_greedy

import petals_async
from petals_async.core.span import Span
from petals_async.rpc.block_channel import GrpcConnector
from petals_async.testing.tiny import make_tiny_llama

pytestmark = pytest.mark.processes

GAP_S = 2.5
"""How long nobody serves the lost blocks."""

PROMPT = [10, 20, 30, 40, 50]
NEW_TOKENS = 24
LOST_AFTER = 9
SEEN_AFTER = 15


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("deep") / "tiny"
    return make_tiny_llama(path, num_blocks=24, hidden_size=32, num_heads=2, num_kv_heads=1)


async def sessions_at(address):
    async with GrpcConnector().connect(address) as channel:
        return await channel.list_sessions()


async def test_seed_91(process_swarm, deep_model, context):
    tokens, joined, held = [], anyio.Event(), None
    async with (
        process_swarm(deep_model, head="0:8", middle="8:14", tail="14:24") as swarm,
        petals_async.Client(deep_model, swarm.registry.address, timeout_s=40) as client,
        client.stream(PROMPT, max_new_tokens=NEW_TOKENS, do_sample=False) as stream,
        anyio.create_task_group() as tasks,
    ):

        async def join_later():
            nonlocal address
            await anyio.sleep(GAP_S)
            address = (await swarm.add("joiner", "6:24")).address
            joined.set()

        address = ""
        async for piece in stream:
            if len(tokens) < LOST_AFTER <= len(tokens) + len(piece.token_ids):
                await swarm.kill("middle")
                tasks.start_soon(join_later)
            tokens += piece.token_ids
            if len(tokens) >= SEEN_AFTER and held is None:
                await joined.wait()
                held = [session.span for session in await sessions_at(address)]

    assert held == [Span(8, 14)]
    (recovery,) = stream.result.recoveries
    assert recovery.span == Span(8, 14)
    assert recovery.lost.startswith("middle ")
    assert [server.split()[0] for server in recovery.replacements] == ["joiner"]
    assert recovery.replayed_tokens == recovery.at
    assert len(PROMPT) + LOST_AFTER - 1 <= recovery.at <= len(PROMPT) + LOST_AFTER + 1
    assert recovery.duration_s >= GAP_S - 1
    assert tuple(tokens) == stream.result.token_ids
    assert tokens == in_child(context, plain_greedy, str(deep_model), PROMPT, NEW_TOKENS)
