"""A gRPC server of ours: binding, health for each service, reflection, and stopping within a bound."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial

import anyio
import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from petals_async.errors import ConfigurationError
from petals_async.rpc.block_servicer import BlockServicer
from petals_async.rpc.guard import guarded
from petals_async.rpc.options import SERVER_OPTIONS
from petals_async.v1 import block_service_pb2_grpc as block_grpc

BLOCK_SERVICE = "petals_async.v1.BlockService"

STOP_GRACE_S = 0.5
"""How long calls in progress may take when the server stops, in seconds."""

STOP_MARGIN_S = 1.5
"""How long stopping may take beyond the grace, in seconds; handlers that are still busy then are left behind."""


class GrpcServer:
    """A server that runs, as `serve_grpc` yields it.

    Args:
        server: The server, bound and started.
        checks: Its health service.
        services: Full names of the services whose health follows `set_serving`.
        port: The port that was really bound.
    """

    def __init__(
        self, server: grpc.aio.Server, checks: health.aio.HealthServicer, services: Sequence[str], port: int
    ) -> None:
        self._server = server
        self._checks = checks
        self._services = ("", *services)
        self.port = port

    async def set_serving(self, serving: bool) -> None:
        """Say in `grpc.health.v1.Health` whether our services take calls; after `stop` it stays NOT_SERVING."""
        kinds = health_pb2.HealthCheckResponse
        for name in self._services:
            await self._checks.set(name, kinds.SERVING if serving else kinds.NOT_SERVING)

    async def stop(self, grace_s: float = STOP_GRACE_S) -> None:
        """Take no new calls, give those in progress `grace_s` seconds, then end them. May be called again.

        Returns within `grace_s + STOP_MARGIN_S` seconds, and can't be cancelled before. A stream that idles
        keeps it waiting for the whole grace: say that you are draining in-band first.
        """
        with anyio.move_on_after(grace_s + STOP_MARGIN_S, shield=True):
            await self._checks.enter_graceful_shutdown()
            await guarded(self._server.stop(grace_s))


@asynccontextmanager
async def serve_grpc(
    host: str,
    port: int,
    add: Callable[[grpc.aio.Server], None],
    services: Sequence[str],
    *,
    serving: bool = True,
) -> AsyncIterator[GrpcServer]:
    """Serve over gRPC, with health and reflection, as long as the context is open.

    Args:
        host: Name or address to listen on, an IPv6 one in brackets.
        port: Port to listen on; 0 for any free one.
        add: Puts our servicers into the server, before it starts.
        services: Full names of these services.
        serving: Whether their health is SERVING from the start.

    Raises:
        ConfigurationError: The address can't be listened on: the port is in use, or it isn't this machine's.
    """
    server = grpc.aio.server(options=SERVER_OPTIONS)
    add(server)
    checks = health.aio.HealthServicer()
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    reflection.enable_server_reflection((*services, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
    running = GrpcServer(server, checks, services, _bind(server, f"{host}:{port}"))
    await running.set_serving(serving)
    try:
        await guarded(server.start())
        yield running
    finally:
        await running.stop()


def serve_blocks(servicer: BlockServicer, host: str, port: int) -> AbstractAsyncContextManager[GrpcServer]:
    """Serve BlockService over gRPC; its health is NOT_SERVING until `set_serving(True)`.

    Args:
        servicer: What answers; without a `service` in it, it refuses every call as NOT_SERVING.
        host: Name or address to listen on, an IPv6 one in brackets.
        port: Port to listen on; 0 for any free one.

    Raises:
        ConfigurationError: The address can't be listened on: the port is in use, or it isn't this machine's.
    """
    add = partial(block_grpc.add_BlockServiceServicer_to_server, servicer)
    return serve_grpc(host, port, add, (BLOCK_SERVICE,), serving=False)


def _bind(server: grpc.aio.Server, address: str) -> int:
    try:
        return server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigurationError(
            f"can't listen on {address}: the port is in use, or the address is not this machine's"
        ) from error
