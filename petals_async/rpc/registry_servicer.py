"""RegistryService over any `abc.Registry`, and a server that serves it.

A large snapshot travels in pieces, so that no message nears the limit: `snapshot` with the first servers,
then one `put` for each further one. All but the last piece carry revision 0, "nothing seen": a watch that is
cut in the middle of it starts from a snapshot again. `rpc/registry_client.py` puts the pieces together.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from types import TracebackType
from typing import Any

from petals_async.abc import Registry
from petals_async.core.lease import (
    RegistryEvent,
    RegistrySnapshot,
    ServerPut,
    ServerRemoved,
    WatchCursor,
    listing_order,
)
from petals_async.core.server_info import ServerInfo
from petals_async.errors import PetalsAsyncError, RequestError
from petals_async.rpc.guard import guarded
from petals_async.rpc.info_codec import server_info_from_proto, server_info_to_proto
from petals_async.rpc.scalars import seconds
from petals_async.rpc.server import serve_grpc
from petals_async.rpc.status import abort_with
from petals_async.v1 import registry_service_pb2 as pb
from petals_async.v1 import registry_service_pb2_grpc as pb_grpc
from petals_async.v1 import server_info_pb2 as info_pb

MAX_PAGE_SIZE = 1000
"""Servers on one page of a listing; also the default."""

MAX_PIECE_BYTES = 1024 * 1024
"""Records in one message, in bytes, except that one record is always taken."""

SERVICE_NAME = "petals_async.v1.RegistryService"

_Key = tuple[int, int, str, str]


class RegistryServicer(pb_grpc.RegistryServiceServicer):
    """Serves a registry over gRPC.

    Args:
        registry: What to serve; opened and closed by the caller.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def AnnounceServer(  # noqa: N802
        self, request: pb.AnnounceServerRequest, context: Any
    ) -> pb.AnnounceServerResponse:
        """Put a server's record under a lease."""
        async with _Translated(context):
            server = server_info_from_proto(request.server)
            await self._registry.announce(server, ttl_s=seconds(request.ttl))
        return pb.AnnounceServerResponse()

    async def RenewLease(  # noqa: N802
        self, request: pb.RenewLeaseRequest, context: Any
    ) -> pb.RenewLeaseResponse:
        """Extend a lease; NOT_FOUND if it is not known."""
        async with _Translated(context):
            if not await self._registry.renew(request.server_id):
                raise RequestError(f"no lease of server {request.server_id[:64]!r}", reason="NOT_FOUND")
        return pb.RenewLeaseResponse()

    async def WithdrawServer(  # noqa: N802
        self, request: pb.WithdrawServerRequest, context: Any
    ) -> pb.WithdrawServerResponse:
        """Remove a server's record."""
        async with _Translated(context):
            await self._registry.withdraw(request.server_id)
        return pb.WithdrawServerResponse()

    async def ListServers(  # noqa: N802
        self, request: pb.ListServersRequest, context: Any
    ) -> pb.ListServersResponse:
        """List servers, a page at a time."""
        async with _Translated(context):
            after, size = _page_wanted(request)
            servers = await self._registry.list_servers(request.model_fingerprint or None)
            return _page(servers, after, size)

    async def WatchServers(  # type: ignore[override]  # noqa: N802
        self, request: pb.WatchServersRequest, context: Any
    ) -> None:
        """Send what changes until the client leaves, or the registry closes."""
        cursor = WatchCursor(request.instance_id, request.revision) if request.revision else None
        async with (
            _Translated(context),
            self._registry.watch(request.model_fingerprint or None, cursor=cursor) as watch,
        ):
            await guarded(context.send_initial_metadata(()))
            while True:
                for message in event_to_proto(await watch.receive()):
                    await guarded(context.write(message))


@asynccontextmanager
async def serve_registry(registry: Registry, host: str, port: int) -> AsyncIterator[int]:
    """Serve a registry over gRPC, with health and reflection, as long as the context is open.

    Args:
        registry: What to serve; opened and closed by the caller.
        host: Name or address to listen on, an IPv6 one in brackets.
        port: Port to listen on; 0 for any free one.

    Yields:
        The port that was really bound.

    Raises:
        ConfigurationError: The address can't be listened on: the port is in use, or it isn't this machine's.
    """
    add = partial(pb_grpc.add_RegistryServiceServicer_to_server, RegistryServicer(registry))
    async with serve_grpc(host, port, add, (SERVICE_NAME,)) as server:
        yield server.port


def event_to_proto(event: RegistryEvent) -> Iterator[pb.WatchServersResponse]:
    """Yield an event's messages: one, or the pieces of a large snapshot."""
    instance_id, revision = event.cursor.instance_id, event.cursor.revision
    match event:
        case ServerPut(_, server):
            record = server_info_to_proto(server)
            yield pb.WatchServersResponse(instance_id=instance_id, revision=revision, put=record)
        case ServerRemoved(_, server_id):
            yield pb.WatchServersResponse(instance_id=instance_id, revision=revision, removed_server_id=server_id)
        case RegistrySnapshot():
            yield from _snapshot_to_proto(event)


def _snapshot_to_proto(snapshot: RegistrySnapshot) -> Iterator[pb.WatchServersResponse]:
    instance_id, revision = snapshot.cursor.instance_id, snapshot.cursor.revision
    records = [server_info_to_proto(server) for server in snapshot.servers]
    first = _fitting(records)
    rest = records[len(first) :]
    yield pb.WatchServersResponse(
        revision=0 if rest else revision, instance_id=instance_id, snapshot=pb.ServerSnapshot(servers=first)
    )
    for left, record in zip(reversed(range(len(rest))), rest, strict=True):
        yield pb.WatchServersResponse(revision=0 if left else revision, instance_id=instance_id, put=record)


def _fitting(records: Iterable[info_pb.ServerInfo]) -> list[info_pb.ServerInfo]:
    """Return the first records that fit into one message; at least one, if there are any."""
    fitting: list[info_pb.ServerInfo] = []
    room = MAX_PIECE_BYTES
    for record in records:
        room -= record.ByteSize()
        if fitting and room < 0:
            break
        fitting.append(record)
    return fitting


def _page_wanted(request: pb.ListServersRequest) -> tuple[_Key | None, int]:
    """Return the sort key after which the page starts, and its size.

    Raises:
        RequestError: The size is negative, or the token is not one of ours.
    """
    if request.page_size < 0:
        raise RequestError(f"page_size is from 0 on, got {request.page_size}")
    after = _read_token(request.page_token) if request.page_token else None
    return after, min(request.page_size or MAX_PAGE_SIZE, MAX_PAGE_SIZE)


def _page(servers: Sequence[ServerInfo], after: _Key | None, size: int) -> pb.ListServersResponse:
    ordered = sorted(servers, key=listing_order)
    left = [server for server in ordered if after is None or listing_order(server) > after]
    records = _fitting(server_info_to_proto(server) for server in left[:size])
    more = len(records) < len(left)
    token = _token(listing_order(left[len(records) - 1])) if more else ""
    return pb.ListServersResponse(servers=records, next_page_token=token)


def _token(key: _Key) -> str:
    return base64.urlsafe_b64encode(json.dumps(key).encode()).decode()


def _read_token(token: str) -> _Key:
    try:
        key = json.loads(base64.urlsafe_b64decode(token))
    except (binascii.Error, ValueError, RecursionError) as error:
        raise RequestError("page_token is not one of this registry") from error
    match key:
        case [int(start), int(end), str(name), str(server_id)]:
            return (start, end, name, server_id)
        case _:
            raise RequestError("page_token is not one of this registry")


class _Translated(AbstractAsyncContextManager["_Translated"]):
    """Ends the RPC with the status of an error of our tree."""

    def __init__(self, context: Any) -> None:
        self._context = context

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, PetalsAsyncError):
            await abort_with(self._context, error)
