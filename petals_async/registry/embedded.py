"""The embedded registry: one process that serves a MemoryRegistry over gRPC."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self

from petals_async.core.server_info import ServerInfo
from petals_async.errors import ClosedError
from petals_async.registry.address import parse_host_port
from petals_async.registry.memory import MemoryRegistry
from petals_async.rpc.registry_servicer import serve_registry


class Registry:
    """A registry that block servers announce themselves to, and clients watch.

        async with petals_async.Registry(listen="127.0.0.1:7600") as registry:
            print(registry.address)

    It keeps its records in memory: after a restart the servers announce themselves again.

    Args:
        listen: HOST:PORT to listen on; port 0 for any free one.

    Raises:
        ConfigurationError: The address is wrong; or, in `async with`, it can't be listened on.
    """

    def __init__(self, listen: str = "127.0.0.1:7600") -> None:
        self._host, self._port = parse_host_port(listen, allow_zero=True)
        self._records = MemoryRegistry()
        self._stack = AsyncExitStack()
        self._address = ""

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            records = MemoryRegistry()
            port = await stack.enter_async_context(serve_registry(records, self._host, self._port))
            await stack.enter_async_context(records)  # closed first, which ends the watches
            self._stack = stack.pop_all()
        self._records, self._address = records, f"{self._host}:{port}"
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._address = ""
        await self._stack.aclose()

    @property
    def address(self) -> str:
        """HOST:PORT that is really listened on.

        Raises:
            ClosedError: Not inside `async with`.
        """
        if not self._address:
            raise ClosedError("the registry listens inside `async with` only")
        return self._address

    async def list_servers(self, model_fingerprint: str | None = None) -> Sequence[ServerInfo]:
        """Return the servers of one model, or of all, by block and name. Raises RegistryUnavailableError."""
        return await self._records.list_servers(model_fingerprint)
