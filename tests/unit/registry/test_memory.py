"""The registry in memory, in virtual time on trio: hours of leases in milliseconds."""

import anyio
import pytest
from server_records import make_server
from trio.testing import MockClock

from petals_async.core.lease import ServerRemoved
from petals_async.errors import RegistryUnavailableError
from petals_async.registry.memory import MemoryRegistry


@pytest.fixture
def anyio_backend():
    return ("trio", {"clock": MockClock(autojump_threshold=0)})


LIMIT_S = 1000.0
"""Seconds of virtual time after which a test gives up."""


async def next_event(watch):
    with anyio.fail_after(LIMIT_S):
        return await watch.receive()


@pytest.fixture
async def registry():
    async with MemoryRegistry() as registry:
        yield registry


async def test_a_lease_ends_exactly_at_its_time(registry):
    start = anyio.current_time()
    await registry.announce(make_server("a"), ttl_s=300.0)
    async with registry.watch() as watch:
        await next_event(watch)
        assert isinstance(await next_event(watch), ServerRemoved)
    assert anyio.current_time() - start == pytest.approx(300.0)


async def test_a_renewed_lease_lives_on_for_an_hour(registry):
    await registry.announce(make_server("a"), ttl_s=10.0)
    for _ in range(720):
        await anyio.sleep(5.0)
        assert await registry.renew("a")
    await anyio.sleep(10.01)
    assert await registry.list_servers() == []


async def test_a_shorter_lease_that_comes_later_ends_first(registry):
    start = anyio.current_time()
    await registry.announce(make_server("long"), ttl_s=300.0)
    await anyio.sleep(10.0)
    await registry.announce(make_server("short"), ttl_s=2.0)
    async with registry.watch() as watch:
        await next_event(watch)
        assert (await next_event(watch)).server_id == "short"
    assert anyio.current_time() - start == pytest.approx(12.0)


async def test_a_cancelled_receive_loses_nothing(registry):
    async with registry.watch() as watch:
        await next_event(watch)
        with anyio.move_on_after(1.0) as scope:
            await watch.receive()
        assert scope.cancelled_caught
        await registry.announce(make_server("a"), ttl_s=10.0)
        assert (await next_event(watch)).server.server_id == "a"


async def test_it_answers_only_while_it_is_open():
    registry = MemoryRegistry()
    with pytest.raises(RegistryUnavailableError, match="not open"):
        await registry.list_servers()
    async with registry:
        await registry.announce(make_server("a"), ttl_s=10.0)
    with pytest.raises(RegistryUnavailableError, match="not open"):
        await registry.renew("a")


async def test_an_error_inside_comes_out_as_it_is():
    with pytest.raises(ZeroDivisionError):
        async with MemoryRegistry():
            raise ZeroDivisionError
