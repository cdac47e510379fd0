"""BlockService over gRPC: one stream handler that reads, and a generator that writes.

An async-generator handler is a third faster than one with `context.write`, so the handler's messages go
through a bounded outbox, which the generator drains.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import anyio
import grpc

from petals_async.abc import BlockService
from petals_async.core.messages import ClientMessage, ServerMessage
from petals_async.errors import PetalsAsyncError, RequestError, ServerUnavailableError
from petals_async.rpc.guard import RpcOverError, guarded
from petals_async.rpc.info_codec import server_info_to_proto, session_info_to_proto
from petals_async.rpc.session_codec import request_from_proto, response_to_proto
from petals_async.rpc.status import abort_with
from petals_async.v1 import block_service_pb2 as pb
from petals_async.v1 import block_service_pb2_grpc as pb_grpc

OUTBOX_MESSAGES = 16
"""Messages of one stream that wait for a slow client, at most; then its steps wait as well."""

DEFAULT_PAGE_SIZE = 100
MAX_PAGE_SIZE = 1000


class _GrpcServerStream:
    """The server's end of one stream."""

    principal = ""

    def __init__(self, requests: AsyncIterator[pb.RunSessionRequest]) -> None:
        self._requests = requests
        self._outbox: asyncio.Queue[ServerMessage | None] = asyncio.Queue(OUTBOX_MESSAGES)
        self.error: PetalsAsyncError | None = None

    async def receive(self) -> ClientMessage | None:
        try:
            message = await guarded(anext(self._requests))
        except (StopAsyncIteration, RpcOverError, grpc.aio.AioRpcError, grpc.RpcError):
            return None
        return request_from_proto(message)

    async def send(self, message: ServerMessage) -> None:
        await self._outbox.put(message)

    def send_nowait(self, message: ServerMessage) -> None:
        if not self._outbox.full():
            self._outbox.put_nowait(message)

    async def finish(self) -> None:
        await self._outbox.put(None)

    async def outgoing(self) -> ServerMessage | None:
        return await self._outbox.get()


class BlockServicer(pb_grpc.BlockServiceServicer):
    """Serves `abc.BlockService` over gRPC; before there is one, every call is refused as NOT_SERVING."""

    def __init__(self) -> None:
        self.service: BlockService | None = None

    async def _ready(self, context: Any) -> BlockService:
        if self.service is None:
            error = ServerUnavailableError("the server is loading its weights", reason="NOT_SERVING")
            await abort_with(context, error)
        return self.service

    async def GetServerInfo(  # noqa: N802
        self, request: pb.GetServerInfoRequest, context: Any
    ) -> pb.GetServerInfoResponse:
        """Say what this server is."""
        service = await self._ready(context)
        return pb.GetServerInfoResponse(server=server_info_to_proto(service.get_server_info()))

    async def CloseSession(  # noqa: N802
        self, request: pb.CloseSessionRequest, context: Any
    ) -> pb.CloseSessionResponse:
        """Free a session by its id."""
        service = await self._ready(context)
        await service.close_session(request.session_id)
        return pb.CloseSessionResponse()

    async def ListSessions(  # noqa: N802
        self, request: pb.ListSessionsRequest, context: Any
    ) -> pb.ListSessionsResponse:
        """List the sessions held."""
        service = await self._ready(context)
        token = request.page_token or "0"
        if request.page_size < 0 or not token.isdecimal():
            await abort_with(context, RequestError("page_size must be >= 0, page_token one of ours"))
        start, size = int(token), min(request.page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
        sessions = service.list_sessions()
        page = sessions[start : start + size]
        more = str(start + size) if start + size < len(sessions) else ""
        return pb.ListSessionsResponse(
            sessions=[session_info_to_proto(session) for session in page], next_page_token=more
        )

    async def GetSession(  # noqa: N802
        self, request: pb.GetSessionRequest, context: Any
    ) -> pb.GetSessionResponse:
        """Return one session held."""
        service = await self._ready(context)
        found = next((held for held in service.list_sessions() if held.handle == request.handle), None)
        if found is None:
            error = RequestError(f"no session with the handle {request.handle!r} is held", reason="NOT_FOUND")
            await abort_with(context, error)
        return pb.GetSessionResponse(session=session_info_to_proto(found))

    async def RunSession(  # noqa: N802
        self, request_iterator: AsyncIterator[pb.RunSessionRequest], context: Any
    ) -> AsyncIterator[pb.RunSessionResponse]:
        """Serve one session's stream."""
        service = await self._ready(context)
        stream = _GrpcServerStream(request_iterator)
        task = asyncio.create_task(_serve(service, stream))
        try:
            while (message := await stream.outgoing()) is not None:
                yield response_to_proto(message)
        finally:
            await _end(task)
        if stream.error is not None:
            await abort_with(context, stream.error)


async def _serve(service: BlockService, stream: _GrpcServerStream) -> None:
    try:
        await service.run_session(stream)
    except* PetalsAsyncError as group:
        stream.error = _first(group)
    except* Exception:
        await stream.finish()
        raise
    await stream.finish()


async def _end(task: asyncio.Task[None]) -> None:
    """Stop a stream's handler; a step that is being computed finishes first."""
    task.cancel()
    with anyio.CancelScope(shield=True):
        await asyncio.wait([task])
    if not task.cancelled() and (error := task.exception()) is not None:
        raise error


def _first(group: BaseExceptionGroup[PetalsAsyncError]) -> PetalsAsyncError:
    """Return the first error of a group of ours."""
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if not isinstance(error, PetalsAsyncError):
        raise error
    return error
