"""Connections to block servers over gRPC: `abc.Connector`, `abc.BlockChannel`, `abc.SessionStream`."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio
import grpc

from petals_async.core.messages import ClientMessage, ServerMessage
from petals_async.core.server_info import ServerInfo, SessionInfo
from petals_async.errors import PetalsAsyncError, RemoteProtocolError, RequestError
from petals_async.rpc.guard import RpcOverError, guarded
from petals_async.rpc.info_codec import server_info_from_proto, session_info_from_proto
from petals_async.rpc.options import CHANNEL_OPTIONS
from petals_async.rpc.session_codec import request_to_proto, response_from_proto
from petals_async.rpc.status import error_from, stream_over
from petals_async.v1 import block_service_pb2 as pb
from petals_async.v1 import block_service_pb2_grpc as pb_grpc

MAX_PAGES = 100
"""Pages of a list that are asked for, at most."""

UNARY_TIMEOUT_S = 5.0
"""Time limit of the short calls: GetServerInfo, CloseSession, ListSessions."""

CLOSE_TIMEOUT_S = 1.0
"""Time limit of closing a channel, in seconds."""

_Call = grpc.aio.StreamStreamCall[pb.RunSessionRequest, pb.RunSessionResponse]


class _GrpcSessionStream:
    """The client's end of one stream: one task reads, any number may send."""

    def __init__(self, call: _Call, address: str) -> None:
        self._open_call: _Call | None = call
        self._address = address

    @property
    def _call(self) -> _Call:
        if self._open_call is None:
            raise RpcOverError
        return self._open_call

    def end(self) -> None:
        """Cancel the call and let go of it: while one is held, its connection stays open though its channel is closed.

        Segments, their tasks and tracebacks are cycles, which are collected at some time.
        """
        call, self._open_call = self._open_call, None
        if call is not None:
            call.cancel()

    async def send(self, message: ClientMessage) -> None:
        try:
            await guarded(self._call.write(request_to_proto(message)))
        except RpcOverError:
            raise stream_over(self._address) from None
        except grpc.aio.AioRpcError as error:
            raise error_from(error, server=self._address) from error

    async def receive(self) -> ServerMessage:
        try:
            message = await guarded(self._call.read())
        except RpcOverError:
            raise await self._why_over() from None
        except grpc.aio.AioRpcError as error:
            raise error_from(error, server=self._address) from error
        if message is grpc.aio.EOF or not isinstance(message, pb.RunSessionResponse):
            raise await self._why_over()
        return response_from_proto(message)

    async def _why_over(self) -> PetalsAsyncError:
        """Return the error that the server gave; STREAM_LOST when it just ended."""
        try:
            code = await guarded(self._call.code())
            if code is grpc.StatusCode.OK:
                return stream_over(self._address)
            details = await guarded(self._call.details())
            trailing = await guarded(self._call.trailing_metadata())
        except RpcOverError:
            return stream_over(self._address)
        initial = grpc.aio.Metadata()
        return error_from(grpc.aio.AioRpcError(code, initial, trailing, details=details), server=self._address)


class GrpcBlockChannel:
    """A gRPC channel to one block server."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        self._stub: pb_grpc.BlockServiceAsyncStub = pb_grpc.BlockServiceStub(channel)
        self._address = address

    @property
    def address(self) -> str:
        """HOST:PORT of the server."""
        return self._address

    async def get_server_info(self) -> ServerInfo:
        """Ask the server what it is. Raises PeerError."""
        with _Translated(self._address):
            response = await guarded(self._stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=UNARY_TIMEOUT_S))
        try:
            return server_info_from_proto(response.server)
        except RequestError as error:
            raise RemoteProtocolError(error.message, server=self._address) from error

    @asynccontextmanager
    async def open_stream(self) -> AsyncIterator[_GrpcSessionStream]:
        """Open one RunSession stream; leaving the context cancels it."""
        stream = _GrpcSessionStream(self._stub.RunSession(), self._address)
        try:
            yield stream
        finally:
            stream.end()

    async def close_session(self, session_id: bytes) -> None:
        """Free a session by its id. Raises PeerError."""
        with _Translated(self._address):
            await guarded(
                self._stub.CloseSession(pb.CloseSessionRequest(session_id=session_id), timeout=UNARY_TIMEOUT_S)
            )

    async def list_sessions(self) -> Sequence[SessionInfo]:
        """Return all sessions held there. Raises PeerError."""
        sessions: list[SessionInfo] = []
        token = ""
        for _ in range(MAX_PAGES):
            request = pb.ListSessionsRequest(page_size=1000, page_token=token)
            with _Translated(self._address):
                response = await guarded(self._stub.ListSessions(request, timeout=UNARY_TIMEOUT_S))
            sessions.extend(session_info_from_proto(session) for session in response.sessions)
            token = response.next_page_token
            if not token:
                return sessions
        raise RemoteProtocolError(f"the list of sessions has more than {MAX_PAGES} pages", server=self._address)


class _Translated:
    """Turns the errors of one unary call into ours."""

    def __init__(self, address: str) -> None:
        self._address = address

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RpcOverError):
            raise stream_over(self._address) from None
        if isinstance(error, grpc.aio.AioRpcError):
            raise error_from(error, server=self._address) from error


class GrpcConnector:
    """Makes gRPC channels to block servers."""

    @asynccontextmanager
    async def connect(self, address: str) -> AsyncIterator[GrpcBlockChannel]:
        """Open a channel, without waiting for the peer; leaving the context closes it."""
        channel = grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS)
        try:
            yield GrpcBlockChannel(channel, address)
        finally:
            with anyio.move_on_after(CLOSE_TIMEOUT_S, shield=True):
                await guarded(channel.close())
