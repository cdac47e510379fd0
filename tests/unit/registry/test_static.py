"""A swarm without a registry, in virtual time on trio, over a connector whose servers are set by the test."""

from contextlib import asynccontextmanager

import anyio
import pytest
from server_records import MODEL, OTHER_MODEL, make_server
from trio.testing import MockClock

from petals_async.core.lease import RegistrySnapshot, ServerPut, ServerRemoved
from petals_async.core.server_info import ServerState
from petals_async.errors import ConfigurationError, RegistryUnavailableError, ServerUnavailableError
from petals_async.registry.static import ASK_TIMEOUT_S, MAX_CONCURRENT_ASKS, POLL_INTERVAL_S, StaticRegistry

SILENT = object()


class Swarm:
    """A connector: `servers` is address -> record, SILENT, or missing for one that can't be reached."""

    def __init__(self, servers):
        self.servers = servers
        self.num_open = 0
        self.num_asks = 0
        self.most_asks = 0

    @asynccontextmanager
    async def connect(self, address):
        self.num_open += 1
        try:
            yield Channel(self, address)
        finally:
            self.num_open -= 1


class Channel:
    def __init__(self, swarm, address):
        self.swarm = swarm
        self.address = address

    async def get_server_info(self):
        self.swarm.num_asks += 1
        self.swarm.most_asks = max(self.swarm.most_asks, self.swarm.num_asks)
        try:
            await anyio.sleep(0.1)
            answer = self.swarm.servers.get(self.address)
            if answer is SILENT:
                await anyio.sleep_forever()
            if answer is None:
                raise ServerUnavailableError("connection refused", reason="CONNECT_FAILED")
            return answer
        finally:
            self.swarm.num_asks -= 1


@pytest.fixture
def anyio_backend():
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


@pytest.fixture
def swarm():
    return Swarm({"h:1": make_server("a", "0:2"), "h:2": make_server("b", "2:4")})


@pytest.fixture
async def registry(swarm):
    async with StaticRegistry(["h:1", "h:2"], swarm) as registry:
        yield registry
    assert swarm.num_open == 0


async def test_those_that_answer_are_listed_under_the_address_given(registry, swarm):
    swarm.servers["h:2"] = None
    servers = await registry.list_servers()
    assert [(server.server_id, server.address) for server in servers] == [("a", "h:1")]


async def test_models_are_kept_apart(registry, swarm):
    swarm.servers["h:2"] = make_server("b", model_fingerprint=OTHER_MODEL)
    assert [server.server_id for server in await registry.list_servers(MODEL)] == ["a"]
    assert await registry.list_servers("no such model") == []


async def test_nobody_reachable_names_the_addresses_and_what_happened(registry, swarm):
    swarm.servers = {"h:1": SILENT}
    with pytest.raises(RegistryUnavailableError) as caught:
        await registry.list_servers()
    assert str(caught.value) == ("no block server answers; tried h:1 (no answer within 2 s), h:2 (connection refused)")
    with pytest.raises(RegistryUnavailableError, match="h:1"):
        async with registry.watch():
            pass


async def test_a_silent_server_costs_no_more_than_its_time_limit(registry, swarm):
    swarm.servers["h:1"] = SILENT
    start = anyio.current_time()
    assert [server.server_id for server in await registry.list_servers()] == ["b"]
    assert anyio.current_time() - start == pytest.approx(ASK_TIMEOUT_S)


async def test_a_watch_gives_a_snapshot_and_then_what_changes(registry, swarm):
    async with registry.watch(MODEL) as watch:
        snapshot = await watch.receive()
        assert isinstance(snapshot, RegistrySnapshot)
        assert [server.server_id for server in snapshot.servers] == ["a", "b"]
        swarm.servers["h:1"] = make_server("a", "0:2", state=ServerState.DRAINING)
        changed = await watch.receive()
        assert isinstance(changed, ServerPut)
        assert changed.server.state is ServerState.DRAINING
        swarm.servers["h:2"] = make_server("b2", "2:4")
        events = [await watch.receive(), await watch.receive()]
        assert isinstance(events[0], ServerRemoved)
        assert (events[0].server_id, events[1].server.server_id) == ("b", "b2")
        assert [event.cursor.revision for event in (snapshot, changed, *events)] == [1, 2, 3, 4]


async def test_a_watch_asks_again_after_its_pause_only(registry, swarm):
    start = anyio.current_time()
    async with registry.watch() as watch:
        await watch.receive()
        del swarm.servers["h:2"]
        assert (await watch.receive()).server_id == "b"
    assert anyio.current_time() - start == pytest.approx(POLL_INTERVAL_S + 0.2)


async def test_a_watch_ends_when_nobody_answers_any_more(registry, swarm):
    async with registry.watch() as watch:
        await watch.receive()
        swarm.servers.clear()
        with pytest.raises(RegistryUnavailableError, match=r"tried h:1 .*, h:2 "):
            await watch.receive()


async def test_announcements_are_accepted_and_do_nothing(registry):
    await registry.announce(make_server("c"), ttl_s=10.0)
    assert await registry.renew("c")
    await registry.withdraw("c")
    assert len(await registry.list_servers()) == 2


async def test_few_servers_are_asked_at_once():
    addresses = [f"h:{port}" for port in range(1, 41)]
    swarm = Swarm({address: make_server(address) for address in addresses})
    async with StaticRegistry(addresses, swarm) as registry:
        assert len(await registry.list_servers()) == 40
    assert swarm.most_asks == MAX_CONCURRENT_ASKS


async def test_a_cancelled_question_closes_its_connections(registry, swarm):
    swarm.servers["h:1"] = SILENT
    with anyio.move_on_after(1.0):
        await registry.list_servers()
    assert (swarm.num_open, swarm.num_asks) == (0, 0)


@pytest.mark.parametrize("addresses", [[], [f"h:{port}" for port in range(2000)]])
def test_the_number_of_addresses_is_bounded(addresses):
    with pytest.raises(ConfigurationError, match="1 to 1024 addresses"):
        StaticRegistry(addresses, Swarm({}))
