"""What every registry does, checked on the one in memory and over gRPC."""

from contextlib import AsyncExitStack, asynccontextmanager

import anyio
import pytest
from server_records import MODEL, OTHER_MODEL, make_server

from petals_async.core.lease import RegistrySnapshot, ServerPut, ServerRemoved, WatchCursor
from petals_async.core.server_info import ServerState
from petals_async.errors import RegistryUnavailableError, RequestError
from petals_async.registry.memory import MemoryRegistry
from petals_async.rpc.registry_client import GrpcRegistry
from petals_async.rpc.registry_servicer import serve_registry

TTL_S = 30.0
HISTORY_EVENTS = 8
LIMIT_S = 5.0


@asynccontextmanager
async def memory_registry(records):
    yield records


@asynccontextmanager
async def grpc_registry(records):
    async with (
        serve_registry(records, "127.0.0.1", 0) as port,
        GrpcRegistry(f"127.0.0.1:{port}") as registry,
    ):
        yield registry


@pytest.fixture(params=[memory_registry, grpc_registry])
def transport(request):
    return request.param


@pytest.fixture
async def records():
    """The state behind the registry."""
    async with MemoryRegistry(history_events=HISTORY_EVENTS) as records:
        yield records


@pytest.fixture
async def registry(records, transport):
    async with transport(records) as registry:
        yield registry


async def next_event(watch):
    with anyio.fail_after(LIMIT_S):
        return await watch.receive()


def big_server(number):
    return make_server(f"s{number:03}", "0:1000", num_blocks=1000, block_digests=("x" * 64,) * 1000)


async def test_a_watch_begins_with_a_snapshot_and_goes_on_with_changes(registry):
    first, second = make_server("a"), make_server("b")
    await registry.announce(first, ttl_s=TTL_S)
    async with registry.watch() as watch:
        snapshot = await next_event(watch)
        assert snapshot == RegistrySnapshot(snapshot.cursor, (first,))
        await registry.announce(second, ttl_s=TTL_S)
        put = await next_event(watch)
        assert put == ServerPut(put.cursor, second)
        await registry.withdraw("a")
        removed = await next_event(watch)
        assert removed == ServerRemoved(removed.cursor, "a")
    revisions = [event.cursor.revision for event in (snapshot, put, removed)]
    assert revisions == sorted(set(revisions))
    assert await registry.list_servers() == [second]


async def test_an_empty_registry_gives_an_empty_snapshot(registry):
    async with registry.watch() as watch:
        snapshot = await next_event(watch)
    assert (snapshot.servers, await registry.list_servers()) == ((), [])


async def test_a_changed_record_is_put_anew(registry):
    await registry.announce(make_server("a"), ttl_s=TTL_S)
    async with registry.watch() as watch:
        await next_event(watch)
        await registry.announce(make_server("a"), ttl_s=TTL_S)
        leaving = make_server("a", state=ServerState.DRAINING)
        await registry.announce(leaving, ttl_s=TTL_S)
        assert (await next_event(watch)).server == leaving


async def test_a_watch_resumes_from_its_cursor(registry):
    async with registry.watch() as watch:
        cursor = (await next_event(watch)).cursor
    await registry.announce(make_server("a"), ttl_s=TTL_S)
    await registry.announce(make_server("b"), ttl_s=TTL_S)
    async with registry.watch(cursor=cursor) as watch:
        events = [await next_event(watch), await next_event(watch)]
    assert [(type(event), event.server.server_id) for event in events] == [(ServerPut, "a"), (ServerPut, "b")]
    async with registry.watch(cursor=events[0].cursor) as watch:
        assert (await next_event(watch)) == events[1]


async def test_a_resumed_watch_with_nothing_new_waits(registry):
    await registry.announce(make_server("a"), ttl_s=TTL_S)
    async with registry.watch() as watch:
        cursor = (await next_event(watch)).cursor
    async with registry.watch(cursor=cursor) as watch, anyio.create_task_group() as tasks:
        tasks.start_soon(registry.withdraw, "a")
        assert (await next_event(watch)).server_id == "a"


async def test_another_instances_cursor_gives_a_snapshot(registry):
    server = make_server("a")
    await registry.announce(server, ttl_s=TTL_S)
    async with registry.watch(cursor=WatchCursor("the one before", 2)) as watch:
        assert (await next_event(watch)).servers == (server,)


async def test_a_cursor_that_is_too_old_gives_a_snapshot(registry):
    async with registry.watch() as watch:
        cursor = (await next_event(watch)).cursor
    for number in range(HISTORY_EVENTS + 1):
        await registry.announce(make_server(f"s{number}"), ttl_s=TTL_S)
    async with registry.watch(cursor=cursor) as watch:
        assert len((await next_event(watch)).servers) == HISTORY_EVENTS + 1


async def test_a_lease_that_runs_out_is_a_removal(registry):
    await registry.announce(make_server("lasting"), ttl_s=TTL_S)
    await registry.announce(make_server("brief"), ttl_s=1.0)
    async with registry.watch() as watch:
        await next_event(watch)
        removed = await next_event(watch)
    assert (type(removed), removed.server_id) == (ServerRemoved, "brief")
    assert [server.server_id for server in await registry.list_servers()] == ["lasting"]
    assert not await registry.renew("brief")


async def test_a_slow_watch_gets_a_fresh_snapshot(registry, records):
    num_servers, known, num_snapshots = 100, set(), 0
    async with registry.watch() as watch:
        await next_event(watch)
        for number in range(num_servers):
            await records.announce(big_server(number), ttl_s=TTL_S)
        while len(known) < num_servers:
            event = await next_event(watch)
            if isinstance(event, RegistrySnapshot):
                num_snapshots += 1
                known = {server.server_id for server in event.servers}
            else:
                known.add(event.server.server_id)
        assert num_snapshots >= 1
        await registry.withdraw("s000")
        assert (await next_event(watch)).server_id == "s000"


async def test_renewing(registry):
    assert not await registry.renew("unknown")
    await registry.announce(make_server("a"), ttl_s=TTL_S)
    assert await registry.renew("a")
    await registry.withdraw("a")
    assert not await registry.renew("a")


async def test_withdrawing_an_unknown_server_is_no_error(registry):
    await registry.withdraw("unknown")
    await registry.announce(make_server("a"), ttl_s=TTL_S)
    await registry.withdraw("a")
    await registry.withdraw("a")


async def test_models_are_kept_apart(registry):
    ours, theirs = make_server("a"), make_server("b", model_fingerprint=OTHER_MODEL)
    async with registry.watch(OTHER_MODEL) as watch:
        assert (await next_event(watch)).servers == ()
        await registry.announce(ours, ttl_s=TTL_S)
        await registry.announce(theirs, ttl_s=TTL_S)
        assert (await next_event(watch)).server == theirs
    assert await registry.list_servers(MODEL) == [ours]
    assert await registry.list_servers(OTHER_MODEL) == [theirs]
    assert await registry.list_servers("no such model") == []
    assert await registry.list_servers() == [ours, theirs]


async def test_a_large_listing_comes_whole_and_in_order(registry, records):
    servers = [make_server(f"s{number:05}", "0:2") for number in range(2500)]
    for server in reversed(servers):
        await records.announce(server, ttl_s=TTL_S)
    assert await registry.list_servers() == servers


async def test_a_large_snapshot_comes_whole(registry, records):
    servers = [big_server(number) for number in range(40)]
    for server in servers:
        await records.announce(server, ttl_s=TTL_S)
    async with registry.watch() as watch:
        snapshot = await next_event(watch)
        assert list(snapshot.servers) == servers
        await records.withdraw("s000")
        assert (await next_event(watch)).server_id == "s000"
    async with registry.watch(cursor=snapshot.cursor) as watch:
        assert (await next_event(watch)).server_id == "s000"
    assert await registry.list_servers() == servers[1:]


@pytest.mark.parametrize(
    ("server", "ttl_s", "said"),
    [
        (make_server("a"), 0.5, "a lease lives 1 to 300 s"),
        (make_server("a"), 301.0, "a lease lives 1 to 300 s"),
        (make_server(""), TTL_S, "can't be empty"),
        (make_server("a", block_digests=("one",)), TTL_S, "1 digests for 4 blocks"),
    ],
)
async def test_what_cannot_be_announced_is_the_callers_fault(registry, server, ttl_s, said):
    with pytest.raises(RequestError, match=said) as caught:
        await registry.announce(server, ttl_s=ttl_s)
    assert caught.value.reason == "BAD_REQUEST"
    assert await registry.list_servers() == []


async def test_several_watches_see_the_same(registry):
    async with AsyncExitStack() as stack:
        watches = [await stack.enter_async_context(registry.watch()) for _ in range(3)]
        first = [await next_event(watch) for watch in watches]
        await registry.announce(make_server("a"), ttl_s=TTL_S)
        second = [await next_event(watch) for watch in watches]
    assert first[0] == first[1] == first[2]
    assert second[0] == second[1] == second[2]


async def test_leaving_a_watch_frees_it(registry, records):
    async with registry.watch() as watch:
        await next_event(watch)
        assert records.num_watches == 1
    with anyio.fail_after(LIMIT_S):
        while records.num_watches:  # noqa: ASYNC110 the server learns it a little later
            await anyio.sleep(0.01)


async def run_records(records, stop, *, task_status):
    async with records:
        task_status.started()
        await stop.wait()


async def test_a_watch_ends_when_the_registry_closes(transport):
    records, stop = MemoryRegistry(), anyio.Event()
    async with anyio.create_task_group() as tasks, transport(records) as registry:
        await tasks.start(run_records, records, stop)
        async with registry.watch() as watch:
            await next_event(watch)
            tasks.start_soon(wait_and_set, stop)
            with pytest.raises(RegistryUnavailableError):
                await next_event(watch)
        for call in (registry.list_servers, registry.watch().__aenter__):
            with pytest.raises(RegistryUnavailableError):
                await call()
        for call in (registry.renew, registry.withdraw):
            with pytest.raises(RegistryUnavailableError):
                await call("a")


async def wait_and_set(event):
    await anyio.sleep(0.02)
    event.set()
