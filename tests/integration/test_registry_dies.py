"""The registry is killed and started again: generations don't notice, servers and new clients find it again."""

import pytest
from registry_process import RegistryProcess
from respawning import RespawningSwarm, eventually

import petals_async
from petals_async.registry.address import connect_registry

pytestmark = pytest.mark.processes

ROUTE = {"first": "0:2", "middle": "2:4", "last": "4:6"}
PROMPT = [65 + 3 * n % 26 for n in range(7)]
OPTIONS = {"max_new_tokens": 20, "do_sample": False}
TTL_S = 1.5
"""Short, so that servers renew their leases, and learn that nobody knows them, within half a second."""


@pytest.fixture
def registry(context):
    process = RegistryProcess(context)
    process.start()
    yield process
    process.kill()


@pytest.fixture
async def swarm(context, tiny_model, registry):
    spans = {**ROUTE, "spare": "2:4"}
    swarm = RespawningSwarm(context, tiny_model, registry.address, spans, ttl_s=TTL_S)
    try:
        await swarm.ensure(ROUTE)
        yield swarm
    finally:
        await swarm.stop()


async def listed(registry):
    async with connect_registry(registry.address) as connection:
        return {server.name for server in await connection.list_servers()}


async def test_a_generation_outlives_its_registry(swarm, registry, tiny_model):
    async with petals_async.Client(tiny_model, registry.address, timeout_s=30) as client:
        expected = await client.generate(PROMPT, **OPTIONS)
        tokens = []
        async with client.stream(PROMPT, **OPTIONS) as stream:
            async for piece in stream:
                tokens += piece.token_ids
                if len(tokens) == 4:
                    registry.kill()
                if len(tokens) == 12:
                    registry.start()
        assert tuple(tokens) == expected.token_ids
        assert stream.result.recoveries == ()

        async def all_are_back():
            return await listed(registry) == set(ROUTE)

        await eventually(all_are_back)
        assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected.token_ids
    async with petals_async.Client(tiny_model, registry.address, timeout_s=30) as later:
        assert (await later.generate(PROMPT, **OPTIONS)).token_ids == expected.token_ids


async def test_a_server_is_replaced_while_the_registry_is_away(swarm, registry, tiny_model):
    """The last picture is enough to recover with; and a session that opens meanwhile works as well."""
    async with petals_async.Client(tiny_model, registry.address, timeout_s=30) as client:
        expected = await client.generate(PROMPT, **OPTIONS)
        tokens = []
        async with client.stream(PROMPT, **OPTIONS) as stream:
            async for piece in stream:
                tokens += piece.token_ids
                if len(tokens) == 4:
                    await swarm.ensure(["spare"])
                    await eventually(lambda: _knows(client, "spare"))
                    registry.kill()
                    await swarm.kill("middle")
        assert tuple(tokens) == expected.token_ids
        (recovery,) = stream.result.recoveries
        assert recovery.replacements[0].startswith("spare ")
        assert (await client.generate(PROMPT, **OPTIONS)).token_ids == expected.token_ids


async def _knows(client, name):
    return name in {server.name for server in client.servers}


async def test_a_client_follows_a_restarted_registry(swarm, registry, tiny_model):
    """After the restart the client hears of newcomers again, and uses one."""
    async with petals_async.Client(tiny_model, registry.address, timeout_s=30) as client:
        expected = await client.generate(PROMPT, **OPTIONS)
        registry.kill()
        registry.start()
        await swarm.ensure(["spare"])
        await eventually(lambda: _knows(client, "spare"))
        await swarm.kill("middle")
        result = await client.generate(PROMPT, **OPTIONS)
        assert result.token_ids == expected.token_ids


async def test_fixed_addresses_need_no_registry(swarm, registry, tiny_model):
    """`static:` with real servers: one of them dies, and comes back at its address or not at all."""
    async with petals_async.Client(tiny_model, registry.address, timeout_s=30) as client:
        expected = await client.generate(PROMPT, **OPTIONS)
    await swarm.ensure(["spare"])
    registry.kill()
    addresses = ",".join(swarm.info(name).address for name in (*ROUTE, "spare"))
    async with petals_async.Client(tiny_model, f"static:{addresses}", timeout_s=30) as client:
        tokens = []
        async with client.stream(PROMPT, **OPTIONS) as stream:
            async for piece in stream:
                tokens += piece.token_ids
                if len(tokens) == 4:
                    held = {name: await swarm.num_sessions(name) for name in ("middle", "spare")}
                    await swarm.kill(max(held, key=held.get))
        assert tuple(tokens) == expected.token_ids
        assert len(stream.result.recoveries) == 1
