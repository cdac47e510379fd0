"""The public client over the in-memory swarm: generation survives what the sessions under it survive."""

import anyio
import pytest
from virtual import SETTLE_S

from petals_async import Client
from petals_async.engine.backend import TorchBackend
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.span import BlockSpan
from petals_async.testing.node import ModelSpec
from petals_async.testing.swarm import MemorySwarm, NodeSpec
from petals_async.testing.tiny import make_tiny_llama
from petals_async.testing.workers import InlineExecutor

NUM_TOKENS = 8
OPTIONS = [{}, {"temperature": 0.9, "seed": 7}, {"repetition_penalty": 1.3}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return Checkpoint.open(make_tiny_llama(tmp_path_factory.mktemp("llama"), num_blocks=3, hidden_size=32))


def llama_swarm(checkpoint, **options):
    model = ModelSpec(checkpoint.name, checkpoint.fingerprint, checkpoint.num_blocks, checkpoint.hidden_size)
    nodes = [NodeSpec(f"{name}{n}", f"{i}:{i + 1}") for n in range(2) for i, name in enumerate("abc")]
    return MemorySwarm(
        nodes,
        model=model,
        backend=lambda spec: TorchBackend(BlockSpan.load(checkpoint, spec.span.start, spec.span.end)),
        **options,
    )


def client_of(checkpoint, swarm):
    return Client(
        checkpoint.path, registry=swarm.registry, connector=swarm.network.connector(), executor=InlineExecutor()
    )


async def assert_free(swarm):
    await anyio.sleep(SETTLE_S)
    assert (swarm.kv_in_use(), swarm.num_sessions(), swarm.num_streams()) == (0, 0, 0)


@pytest.mark.parametrize("options", OPTIONS, ids=["greedy", "sampled", "penalty"])
async def test_killed_spans_do_not_show(options, checkpoint):
    async with llama_swarm(checkpoint, respawn_s=1.0) as swarm, client_of(checkpoint, swarm) as client:
        expected = await client.generate("Once upon", max_new_tokens=NUM_TOKENS, **options)
        assert len(expected.token_ids) == NUM_TOKENS
        for name in "abc":
            async with client.stream("Once upon", max_new_tokens=NUM_TOKENS, **options) as stream:
                number = 0
                async for _ in stream:
                    number += 1
                    if number == 3:
                        victims = {info for info, held in swarm.sessions().items() if held and info[0] == name}
                        for victim in victims:
                            swarm.kill(victim)
            assert stream.result.token_ids == expected.token_ids
            assert [recovery.reason for recovery in stream.result.recoveries] == ["STREAM_LOST"]
            assert stream.result.exact
            await anyio.sleep(2)
        await assert_free(swarm)


async def test_many_prompts_while_servers_die(checkpoint):
    prompts = ["a", "Once upon a time", "The quick brown fox", "b" * 30]
    async with llama_swarm(checkpoint, respawn_s=0.5) as swarm, client_of(checkpoint, swarm) as client:
        expected = [await client.generate(prompt, max_new_tokens=NUM_TOKENS) for prompt in prompts]

        async def disturb():
            for name in ("a0", "b0", "c0", "a1", "b1", "c1"):
                await anyio.sleep(0.008)
                swarm.kill(name)

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(disturb)
            results = await client.generate(prompts, max_new_tokens=NUM_TOKENS)
        assert [result.token_ids for result in results] == [result.token_ids for result in expected]
        assert sum(len(result.recoveries) for result in results) > 0
        await assert_free(swarm)


async def test_leaving_a_stream_early_frees_everything(checkpoint):
    async with llama_swarm(checkpoint) as swarm, client_of(checkpoint, swarm) as client:
        async with client.stream("Once upon", max_new_tokens=200) as stream:
            async for _ in stream:
                break
        await assert_free(swarm)
        computed = [swarm.node(name).worker.num_steps for name in swarm.alive]
        await anyio.sleep(60)
        assert computed == [swarm.node(name).worker.num_steps for name in swarm.alive]
