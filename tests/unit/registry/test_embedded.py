"""The registry that is a server: its address, its end, and its return."""

import anyio
import pytest
from server_records import make_server

from petals_async.core.lease import RegistrySnapshot
from petals_async.errors import ClosedError, ConfigurationError, RegistryUnavailableError
from petals_async.registry.address import connect_registry
from petals_async.registry.embedded import Registry
from petals_async.rpc.server import STOP_GRACE_S

LIMIT_S = 10.0


async def watched(client, cursor=None):
    """Watch until the registry answers, and return the first event."""
    with anyio.fail_after(LIMIT_S):
        while True:
            try:
                async with client.watch(cursor=cursor) as watch:
                    return await watch.receive()
            except RegistryUnavailableError:
                await anyio.sleep(0.05)


async def test_it_serves_at_the_address_it_states():
    async with Registry("127.0.0.1:0") as registry:
        assert not registry.address.endswith(":0")
        async with connect_registry(registry.address) as client:
            await client.announce(make_server("a"), ttl_s=10.0)
        assert [server.server_id for server in await registry.list_servers()] == ["a"]
    with pytest.raises(ClosedError):
        _ = registry.address


async def test_a_port_in_use_is_one_clear_line():
    async with Registry("127.0.0.1:0") as registry:
        with pytest.raises(ConfigurationError) as caught:
            await Registry(registry.address).__aenter__()
        assert str(caught.value) == (
            f"can't listen on {registry.address}: the port is in use, or the address is not this machine's"
        )


async def test_a_wrong_address_is_refused_before_anything_is_opened():
    with pytest.raises(ConfigurationError, match="a port is a number from 0"):
        Registry("127.0.0.1:port")


async def run_registry(stop, *, task_status):
    async with Registry("127.0.0.1:0") as registry:
        task_status.started(registry.address)
        await stop.wait()


async def test_a_watch_ends_when_it_stops_and_a_restarted_one_gives_a_snapshot():
    stop = anyio.Event()
    async with anyio.create_task_group() as tasks:
        address = await tasks.start(run_registry, stop)
        async with connect_registry(address) as client:
            await client.announce(make_server("a"), ttl_s=10.0)
            async with client.watch() as watch:
                before = await watch.receive()
                stop.set()
                with anyio.fail_after(LIMIT_S), pytest.raises(RegistryUnavailableError, match=address):
                    await watch.receive()
            with pytest.raises(RegistryUnavailableError, match=f"the registry at {address} is not available"):
                await client.list_servers()
            async with Registry(address):
                after = await watched(client, before.cursor)
    assert isinstance(after, RegistrySnapshot)
    assert after.servers == ()
    assert after.cursor.instance_id != before.cursor.instance_id


async def test_stopping_does_not_wait_for_idle_watches():
    stop = anyio.Event()
    with anyio.fail_after(STOP_GRACE_S * 0.9):
        async with anyio.create_task_group() as tasks:
            address = await tasks.start(run_registry, stop)
            async with connect_registry(address) as client, client.watch() as watch:
                await watch.receive()
                stop.set()
                with pytest.raises(RegistryUnavailableError):
                    await watch.receive()


async def test_an_error_inside_comes_out_as_it_is():
    with pytest.raises(ZeroDivisionError):
        async with Registry("127.0.0.1:0"):
            raise ZeroDivisionError


async def test_nobody_listening_names_the_address():
    async with Registry("127.0.0.1:0") as registry:
        address = registry.address
    async with connect_registry(address) as client:
        with pytest.raises(RegistryUnavailableError, match=address):
            await client.renew("a")
        with pytest.raises(RegistryUnavailableError, match=address):
            async with client.watch():
                pass


async def test_a_peer_that_never_answers_costs_no_more_than_the_time_limit():
    async with await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0) as listener:
        port = listener.extra(anyio.abc.SocketAttribute.local_port)
        async with connect_registry(f"127.0.0.1:{port}") as client:
            with anyio.fail_after(3.0), pytest.raises(RegistryUnavailableError, match=f"127.0.0.1:{port}"):
                await client.list_servers()


async def test_a_client_that_is_not_open_says_so():
    client = connect_registry("127.0.0.1:7600")
    with pytest.raises(RegistryUnavailableError, match="not open"):
        await client.list_servers()


async def test_a_cancelled_call_leaves_the_client_usable():
    async with Registry("127.0.0.1:0") as registry, connect_registry(registry.address) as client:
        with anyio.CancelScope() as scope:
            scope.cancel()
            await client.list_servers()
        assert scope.cancelled_caught
        async with client.watch() as watch:
            await watch.receive()
            with anyio.move_on_after(0.05) as waiting:
                await watch.receive()
            assert waiting.cancelled_caught
        assert await client.list_servers() == []
