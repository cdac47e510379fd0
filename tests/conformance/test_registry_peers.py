"""The registry's client against a peer that breaks the protocol, stays silent, or is no registry."""

import anyio
import grpc
import pytest
from server_records import make_server

from petals_async.core.lease import RegistrySnapshot, ServerRemoved, WatchCursor
from petals_async.errors import RegistryUnavailableError
from petals_async.rpc.info_codec import server_info_to_proto
from petals_async.rpc.registry_client import CALL_TIMEOUT_S, GrpcRegistry
from petals_async.v1 import registry_service_pb2 as pb
from petals_async.v1 import registry_service_pb2_grpc as pb_grpc

RECORD = server_info_to_proto(make_server("a"))


def unreadable():
    """A record from a newer version: its state isn't known here."""
    record = server_info_to_proto(make_server("newer"))
    record.state = 99
    return record


class Peer(pb_grpc.RegistryServiceServicer):
    """Answers every listing with one page, and a watch with the events given."""

    def __init__(self):
        self.page = pb.ListServersResponse()
        self.events = []
        self.silent = False
        self.stays = False

    async def ListServers(self, request, context):
        return self.page

    async def WatchServers(self, request, context):
        if not self.silent:
            await context.send_initial_metadata(())
        for event in self.events:
            await context.write(event)
        if self.silent or self.stays:
            await anyio.sleep_forever()


@pytest.fixture
async def peer():
    return Peer()


@pytest.fixture
async def registry(peer):
    server = grpc.aio.server()
    pb_grpc.add_RegistryServiceServicer_to_server(peer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with GrpcRegistry(f"127.0.0.1:{port}") as registry:
        yield registry
    await server.stop(0)


async def test_it_knows_its_address(registry):
    assert registry.address.startswith("127.0.0.1:")


async def test_a_record_of_a_newer_version_is_left_out(registry, peer):
    peer.page = pb.ListServersResponse(servers=[unreadable(), RECORD])
    assert [server.server_id for server in await registry.list_servers()] == ["a"]
    snapshot = pb.ServerSnapshot(servers=[RECORD, unreadable()])
    peer.events = [
        pb.WatchServersResponse(instance_id="i", revision=2, snapshot=snapshot),
        pb.WatchServersResponse(instance_id="i", revision=3, put=unreadable()),
    ]
    async with registry.watch() as watch:
        first, second = await watch.receive(), await watch.receive()
    assert first == RegistrySnapshot(WatchCursor("i", 2), (make_server("a"),))
    assert second == ServerRemoved(WatchCursor("i", 3), "newer")


async def test_a_listing_that_does_not_end(registry, peer):
    peer.page = pb.ListServersResponse(servers=[RECORD] * 1000, next_page_token="more")
    with pytest.raises(RegistryUnavailableError, match="lists more than 10000 servers"):
        await registry.list_servers()
    peer.page = pb.ListServersResponse(next_page_token="more")
    with pytest.raises(RegistryUnavailableError, match="or an empty page"):
        await registry.list_servers()


@pytest.mark.parametrize(
    ("events", "said"),
    [
        ([pb.WatchServersResponse(instance_id="i", revision=1)], "an event of an unknown kind"),
        ([pb.WatchServersResponse(snapshot=pb.ServerSnapshot())] * 2, "a snapshot that doesn't end"),
        ([], "the watch is over"),
    ],
)
async def test_watches_that_cannot_be(registry, peer, events, said):
    peer.events = events
    async with registry.watch() as watch:
        with pytest.raises(RegistryUnavailableError, match=said):
            await watch.receive()


async def test_a_watch_that_is_never_answered(registry, peer):
    peer.silent = True
    with anyio.fail_after(CALL_TIMEOUT_S + 1), pytest.raises(RegistryUnavailableError, match="no answer within 2 s"):
        async with registry.watch():
            pass


async def test_what_answers_is_no_registry(registry):
    with pytest.raises(RegistryUnavailableError, match="what answers there is no registry"):
        await registry.announce(make_server("a"), ttl_s=10.0)


async def test_a_watch_ends_when_its_client_closes(registry, peer):
    peer.stays = True
    peer.events = [pb.WatchServersResponse(instance_id="i", revision=1, snapshot=pb.ServerSnapshot())]
    async with registry.watch() as watch:
        await watch.receive()
        await registry.__aexit__(None, None, None)
        with pytest.raises(RegistryUnavailableError):
            await watch.receive()


async def test_closing_in_another_task_does_not_cancel_the_one_that_waits(registry, peer):
    ended = []

    async def wait(watch):
        with pytest.raises(RegistryUnavailableError):
            await watch.receive()
        ended.append(True)

    peer.stays = True
    peer.events = [pb.WatchServersResponse(instance_id="i", revision=1, snapshot=pb.ServerSnapshot())]
    async with registry.watch() as watch:
        await watch.receive()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait, watch)
            await anyio.sleep(0.02)
            await registry.__aexit__(None, None, None)
    assert ended == [True]
