"""RegistryService as another program sees it: status codes, pages, health and reflection."""

import grpc
import pytest
from google.protobuf import duration_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from server_records import make_server

from petals_async.registry.memory import MemoryRegistry
from petals_async.rpc.info_codec import server_info_to_proto
from petals_async.rpc.registry_servicer import MAX_PIECE_BYTES, SERVICE_NAME, serve_registry
from petals_async.v1 import registry_service_pb2 as pb
from petals_async.v1 import registry_service_pb2_grpc as pb_grpc

TIMEOUT_S = 5.0
TTL = duration_pb2.Duration(seconds=30)
INVALID = grpc.StatusCode.INVALID_ARGUMENT


@pytest.fixture
async def records():
    async with MemoryRegistry() as records:
        yield records


@pytest.fixture
async def channel(records):
    async with (
        serve_registry(records, "127.0.0.1", 0) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield channel


@pytest.fixture
def stub(channel):
    return pb_grpc.RegistryServiceStub(channel)


async def code_of(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code()


async def announce(records, count):
    servers = [make_server(f"s{number:02}") for number in range(count)]
    for server in servers:
        await records.announce(server, ttl_s=30.0)
    return [server.server_id for server in servers]


async def pages(stub, page_size):
    token, found = "", []
    while True:
        request = pb.ListServersRequest(page_size=page_size, page_token=token)
        page = await stub.ListServers(request, timeout=TIMEOUT_S)
        found.append([server.server_id for server in page.servers])
        token = page.next_page_token
        if not token:
            return found


async def test_pages(records, stub):
    ids = await announce(records, 5)
    assert await pages(stub, 2) == [ids[:2], ids[2:4], ids[4:]]
    assert await pages(stub, 5) == [ids]
    assert await pages(stub, 0) == [ids]
    assert await pages(stub, 2**31 - 1) == [ids]


async def test_a_page_goes_on_after_its_last_server_whatever_happened_meanwhile(records, stub):
    ids = await announce(records, 5)
    page = await stub.ListServers(pb.ListServersRequest(page_size=2), timeout=TIMEOUT_S)
    await records.withdraw(ids[0])
    await records.withdraw(ids[1])
    rest = await stub.ListServers(pb.ListServersRequest(page_token=page.next_page_token), timeout=TIMEOUT_S)
    assert [server.server_id for server in rest.servers] == ids[2:]


@pytest.mark.parametrize(
    "request_",
    [
        pb.ListServersRequest(page_size=-1),
        pb.ListServersRequest(page_token="no token"),
        pb.ListServersRequest(page_token="é"),
        pb.ListServersRequest(page_token="WzFd"),
        pb.ListServersRequest(page_token="W1tbW1tb" * 5000),
    ],
)
async def test_listings_that_cannot_be(stub, request_):
    assert await code_of(stub.ListServers(request_, timeout=TIMEOUT_S)) is INVALID


async def test_announcements_that_cannot_be(stub):
    sound = server_info_to_proto(make_server("a"))
    for request in (
        pb.AnnounceServerRequest(server=sound),
        pb.AnnounceServerRequest(server=sound, ttl=duration_pb2.Duration(seconds=301)),
        pb.AnnounceServerRequest(server=sound, ttl=duration_pb2.Duration(seconds=-5)),
        pb.AnnounceServerRequest(ttl=TTL),
        pb.AnnounceServerRequest(),
    ):
        assert await code_of(stub.AnnounceServer(request, timeout=TIMEOUT_S)) in (
            INVALID,
            grpc.StatusCode.OUT_OF_RANGE,
        )


async def test_an_unknown_lease_is_not_found(stub):
    request = pb.RenewLeaseRequest(server_id="unknown")
    assert await code_of(stub.RenewLease(request, timeout=TIMEOUT_S)) is grpc.StatusCode.NOT_FOUND


async def test_a_large_snapshot_comes_in_pieces_of_which_only_the_last_has_a_revision(records, stub):
    digests = ("x" * 64,) * 1000
    for number in range(40):
        server = make_server(f"s{number:02}", "0:1000", num_blocks=1000, block_digests=digests)
        await records.announce(server, ttl_s=30.0)
    call = stub.WatchServers(pb.WatchServersRequest(), timeout=TIMEOUT_S)
    pieces = [await call.read()]
    while pieces[-1].revision == 0:
        pieces.append(await call.read())
    assert len(pieces) > 1
    assert max(piece.ByteSize() for piece in pieces) <= MAX_PIECE_BYTES + 1000
    assert len(pieces[0].snapshot.servers) + len(pieces) - 1 == 40
    assert [piece.WhichOneof("event") for piece in pieces] == ["snapshot"] + ["put"] * (len(pieces) - 1)
    call.cancel()


async def test_health(channel):
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", SERVICE_NAME):
        answer = await health.Check(health_pb2.HealthCheckRequest(service=name), timeout=TIMEOUT_S)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_reflection(channel):
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(timeout=TIMEOUT_S)
    await call.write(request)
    answer = await call.read()
    await call.done_writing()
    assert SERVICE_NAME in {service.name for service in answer.list_services_response.service}
    call.cancel()
