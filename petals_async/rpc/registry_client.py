"""`abc.Registry` over gRPC: a client of the embedded registry."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self, TypeVar

import anyio
import grpc

from petals_async.core.lease import (
    MAX_SERVERS,
    RegistryEvent,
    RegistrySnapshot,
    ServerPut,
    ServerRemoved,
    WatchCursor,
)
from petals_async.core.server_info import ServerInfo
from petals_async.errors import AuthError, PetalsAsyncError, RegistryUnavailableError, RequestError
from petals_async.rpc.guard import RpcOverError, guarded
from petals_async.rpc.info_codec import server_info_from_proto, server_info_to_proto
from petals_async.rpc.options import CHANNEL_OPTIONS
from petals_async.rpc.scalars import duration
from petals_async.rpc.status import error_from
from petals_async.v1 import registry_service_pb2 as pb
from petals_async.v1 import registry_service_pb2_grpc as pb_grpc
from petals_async.v1 import server_info_pb2 as info_pb

CALL_TIMEOUT_S = 2.0
"""Time limit of each call, and of opening a watch, in seconds."""

CLOSE_TIMEOUT_S = 1.0
"""Time limit of closing the channel, in seconds."""

_Call = grpc.aio.UnaryStreamCall[pb.WatchServersRequest, pb.WatchServersResponse]
T = TypeVar("T")


class GrpcRegistry:
    """The registry at an address; nothing is opened before `async with`, and the peer isn't waited for.

    A registry that went away and came back is found again by itself, within about a second.

    Args:
        address: HOST:PORT.
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> Self:
        self._channel = grpc.aio.insecure_channel(self._address, options=CHANNEL_OPTIONS)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        channel, self._channel = self._channel, None
        if channel is not None:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await guarded(channel.close())

    @property
    def address(self) -> str:
        """HOST:PORT of the registry."""
        return self._address

    async def announce(self, server: ServerInfo, *, ttl_s: float) -> None:
        """Put a server's record, or put it anew, for `ttl_s` seconds.

        Raises:
            RequestError: The record or the time to live is not sound.
            RegistryUnavailableError: No registry answers, or it is full.
        """
        request = pb.AnnounceServerRequest(server=server_info_to_proto(server), ttl=duration(ttl_s))
        await self._answer(self._stub().AnnounceServer(request, timeout=CALL_TIMEOUT_S))

    async def renew(self, server_id: str) -> bool:
        """Extend a lease by its time to live; False if it is not known.

        Raises:
            RegistryUnavailableError: No registry answers.
        """
        request = pb.RenewLeaseRequest(server_id=server_id)
        try:
            await self._answer(self._stub().RenewLease(request, timeout=CALL_TIMEOUT_S))
        except _NotFoundError:
            return False
        return True

    async def withdraw(self, server_id: str) -> None:
        """Remove a server's record; an unknown one is no error. Raises RegistryUnavailableError."""
        request = pb.WithdrawServerRequest(server_id=server_id)
        await self._answer(self._stub().WithdrawServer(request, timeout=CALL_TIMEOUT_S))

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Return the servers of one model, or of all, by block and name. Raises RegistryUnavailableError."""
        records: list[info_pb.ServerInfo] = []
        token = ""
        while len(records) <= MAX_SERVERS:
            request = pb.ListServersRequest(model_fingerprint=model_fingerprint or "", page_token=token)
            page = await self._answer(self._stub().ListServers(request, timeout=CALL_TIMEOUT_S))
            records.extend(page.servers)
            token = page.next_page_token
            if not token:
                return _readable(records)
            if not page.servers:
                break
        raise self._unavailable(f"it lists more than {MAX_SERVERS} servers, or an empty page")

    @asynccontextmanager
    async def watch(
        self, model_fingerprint: str | None = None, *, cursor: WatchCursor | None = None
    ) -> AsyncIterator[GrpcWatch]:
        """Watch the servers of one model, or of all, from a cursor on if it is still known.

        Raises:
            RegistryUnavailableError: No registry answers.
        """
        request = pb.WatchServersRequest(model_fingerprint=model_fingerprint or "")
        if cursor is not None:
            request.revision, request.instance_id = cursor.revision, cursor.instance_id
        call: _Call = self._stub().WatchServers(request)
        try:
            await self._connected(call)
            yield GrpcWatch(self, call)
        finally:
            call.cancel()

    def _stub(self) -> pb_grpc.RegistryServiceAsyncStub:
        if self._channel is None:
            raise RegistryUnavailableError(f"the connection to the registry at {self._address} is not open")
        return pb_grpc.RegistryServiceStub(self._channel)

    async def _connected(self, call: _Call) -> None:
        try:
            with anyio.fail_after(CALL_TIMEOUT_S):
                await self._answer(call.wait_for_connection())
        except TimeoutError:
            raise self._unavailable(f"no answer within {CALL_TIMEOUT_S:g} s") from None

    async def _answer(self, operation: Awaitable[T]) -> T:
        """Await one operation of a call, and turn its errors into ours."""
        try:
            return await guarded(operation)
        except RpcOverError:
            raise self._unavailable("the call is over") from None
        except grpc.aio.AioRpcError as error:
            raise self._error(error) from error

    def _error(self, error: grpc.aio.AioRpcError) -> PetalsAsyncError:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            return _NotFoundError(error.details() or "not found", reason="NOT_FOUND")
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return self._unavailable("what answers there is no registry")
        ours = error_from(error)
        return ours if isinstance(ours, (RequestError, AuthError)) else self._unavailable(ours.message)

    def _unavailable(self, why: str) -> RegistryUnavailableError:
        return RegistryUnavailableError(f"the registry at {self._address} is not available: {why}")


class GrpcWatch:
    """One watch of a GrpcRegistry. Cancelling `receive` ends it: watch again, from the last event's cursor."""

    def __init__(self, registry: GrpcRegistry, call: _Call) -> None:
        self._registry = registry
        self._call = call

    async def receive(self) -> RegistryEvent:
        """Return the next event: a snapshot first, unless the cursor was still known.

        Raises:
            RegistryUnavailableError: The registry is gone, or breaks the protocol.
        """
        message = await self._read()
        cursor = WatchCursor(message.instance_id, message.revision)
        match message.WhichOneof("event"):
            case "snapshot":
                return await self._snapshot(message)
            case "put":
                servers = _readable([message.put])
                return ServerPut(cursor, servers[0]) if servers else ServerRemoved(cursor, message.put.server_id)
            case "removed_server_id":
                return ServerRemoved(cursor, message.removed_server_id)
            case _:
                raise self._registry._unavailable("it sent an event of an unknown kind")

    async def _snapshot(self, message: pb.WatchServersResponse) -> RegistrySnapshot:
        """Put a snapshot together; while its revision is 0, more of it follows, one server a message."""
        records = list(message.snapshot.servers)
        while message.revision == 0:
            message = await self._read()
            records.append(message.put)
            if message.WhichOneof("event") != "put" or len(records) > MAX_SERVERS:
                raise self._registry._unavailable("it sent a snapshot that doesn't end")
        return RegistrySnapshot(WatchCursor(message.instance_id, message.revision), tuple(_readable(records)))

    async def _read(self) -> pb.WatchServersResponse:
        message = await self._registry._answer(self._call.read())
        if not isinstance(message, pb.WatchServersResponse):
            raise self._registry._unavailable("the watch is over")
        return message


class _NotFoundError(RequestError):
    """The registry doesn't know what was asked for."""


def _readable(records: Iterable[info_pb.ServerInfo]) -> list[ServerInfo]:
    """Return the records that this version can read; one it can't is of a server it couldn't use either."""
    servers: list[ServerInfo] = []
    for record in records:
        try:
            servers.append(server_info_from_proto(record))
        except RequestError:
            continue
    return servers
