"""The block server: binds its port, loads its blocks, serves them, keeps itself in the registry, drains."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import anyio

from petals_async.core.server_info import ServerInfo, ServerState
from petals_async.core.sizes import format_bytes
from petals_async.core.span import Span
from petals_async.engine.worker import ComputeThread, compute_thread
from petals_async.errors import ClosedError, ConfigurationError, RequestError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.resolve import resolve
from petals_async.registry.address import connect_registry, parse_host_port
from petals_async.rpc.block_servicer import BlockServicer
from petals_async.rpc.server import GrpcServer, serve_blocks
from petals_async.scopes import open_tasks
from petals_async.server.announcer import Announcer
from petals_async.server.host import BlockHost, HostOptions
from petals_async.server.loading import LoadedBlocks, load_blocks
from petals_async.server.options import ServerOptions
from petals_async.version import __version__

log = logging.getLogger(__name__)

ANNOUNCE_TIMEOUT_S = 2.0
"""How long becoming ready waits for the registry; the server serves without it as well."""

STOP_GRACE_S = 1.0
"""How long running calls may go on after a drain."""


class BlockServer:
    """Serves consecutive blocks of a model, for as long as the context is open.

        async with petals_async.BlockServer("demo", blocks="0:10", registry="127.0.0.1:7600") as server:
            print(server.address, server.info.span)

    Entering the context returns when the server is ready; `on_progress` is told how far it is.

    Args:
        model: A directory, a Hub id, a .gguf file, or "demo".
        blocks: The blocks to hold, as "START:END" or a Span; None for all.
        on_progress: Takes lines for a person while the server starts.
        options: The other settings of `ServerOptions`, by name.

    Raises:
        ConfigurationError: An option that can't work, or a port in use.
        CheckpointError: A wrong model path, or a missing or damaged file; in `async with`.
        UnsupportedModelError: An architecture that can't be cut; in `async with`.
        RequestError: Blocks outside the model (BAD_SPAN); in `async with`.
    """

    def __init__(
        self,
        model: str,
        blocks: str | Span | None = None,
        *,
        on_progress: Callable[[str], None] | None = None,
        **options: Any,
    ) -> None:
        span = Span.parse(blocks) if isinstance(blocks, str) else blocks
        try:
            self.options = ServerOptions(str(model), span, **options)
        except TypeError as error:
            raise ConfigurationError(f"BlockServer: {error}") from error
        self._report = on_progress or log.info
        self._stack = AsyncExitStack()
        self._info: ServerInfo | None = None
        self._host: BlockHost | None = None
        self._announcer: Announcer | None = None
        self._server: GrpcServer | None = None

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            await self._start(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    # -- starting

    async def _start(self, stack: AsyncExitStack) -> None:
        options = self.options
        host, port = parse_host_port(options.listen, allow_zero=True)
        servicer = BlockServicer()
        self._server = await stack.enter_async_context(serve_blocks(servicer, host, port))
        worker = await stack.enter_async_context(compute_thread())
        checkpoint = await worker.call(self._open_checkpoint)
        address = options.public_address or f"{host}:{self._server.port}"
        self._info = self._describe(checkpoint, address)
        tasks = await stack.enter_async_context(open_tasks())
        stack.callback(tasks.cancel_scope.cancel)
        if options.registry is not None:
            registry = await stack.enter_async_context(connect_registry(options.registry))
            self._announcer = Announcer(registry, lambda: self.info, options.ttl_s)
            tasks.start_soon(self._announcer.run)
            stack.push_async_callback(self._announcer.withdraw)
        loaded = await self._load(worker, checkpoint)
        self._host = self._make_host(loaded, worker)
        tasks.start_soon(self._host.run)
        servicer.service = self._host
        await self._server.set_serving(True)
        if self._announcer is not None and not await self._announcer.announce_now(ANNOUNCE_TIMEOUT_S):
            log.warning("the registry has not taken the announcement yet; serving without it")

    def _open_checkpoint(self) -> Checkpoint:
        options = self.options
        checkpoint = Checkpoint.open(resolve(options.model, blocks=options.blocks, progress=self._report))
        if options.blocks is not None and options.blocks.end > checkpoint.num_blocks:
            raise RequestError(
                f"{checkpoint.name} has blocks 0:{checkpoint.num_blocks}, {options.blocks} was asked for",
                reason="BAD_SPAN",
            )
        return checkpoint

    def _describe(self, checkpoint: Checkpoint, address: str) -> ServerInfo:
        options = self.options
        span = options.blocks or Span(0, checkpoint.num_blocks)
        limits = options.limits
        if checkpoint.max_position is not None and checkpoint.max_position < limits.max_session_tokens:
            limits = replace(limits, max_session_tokens=checkpoint.max_position)
        return ServerInfo(
            server_id=secrets.token_hex(8),
            name=options.stable_name(span),
            address=address,
            version=__version__,
            model=options.model if options.model == "demo" else checkpoint.name,
            model_fingerprint=checkpoint.fingerprint,
            num_blocks=checkpoint.num_blocks,
            hidden_size=checkpoint.hidden_size,
            span=span,
            dtype=options.dtype,
            limits=limits,
        )

    async def _load(self, worker: ComputeThread, checkpoint: Checkpoint) -> LoadedBlocks:
        """Load on the compute thread, which owns the blocks from then on."""
        loaded = await worker.call(lambda: load_blocks(checkpoint, self.info.span, self.options, self._report))
        worker.adopt(loaded.backend)
        return loaded

    def _make_host(self, loaded: LoadedBlocks, worker: ComputeThread) -> BlockHost:
        options, backend = self.options, loaded.backend
        info = replace(
            self.info,
            state=ServerState.SERVING,
            block_digests=loaded.block_digests,
            numeric_fingerprint=loaded.numeric_fingerprint,
            exact=loaded.exact,
            block_step_s=loaded.block_step_s,
        )
        needed = backend.kv_bytes(info.span, 1, 1)
        if needed > options.kv_budget_bytes:
            raise ConfigurationError(
                f"one token of one session needs {needed} bytes of KV over blocks {info.span}, "
                f"the budget is {format_bytes(options.kv_budget_bytes)}"
            )
        return BlockHost(
            info,
            backend,
            worker,
            HostOptions(
                kv_budget_bytes=options.kv_budget_bytes,
                lease_s=options.lease_s,
                progress_interval_s=options.progress_interval_s,
            ),
        )

    # -- running

    @property
    def info(self) -> ServerInfo:
        """What the server is.

        Raises:
            ClosedError: Before `async with`.
        """
        if self._info is None:
            raise ClosedError("a block server is described once it is started with `async with`")
        return self._host.get_server_info() if self._host is not None else self._info

    @property
    def address(self) -> str:
        """HOST:PORT that clients reach it under."""
        return self.info.address

    @property
    def host(self) -> BlockHost:
        """The sessions that it holds, for tests and operators."""
        if self._host is None:
            raise ClosedError("a block server holds sessions once it is ready")
        return self._host

    async def drain(self, deadline_s: float | None = None) -> None:
        """Take no new sessions, leave the registry, tell the clients, and wait until they have left.

        Args:
            deadline_s: How long at most, in seconds; `drain_s` of the options when None.
        """
        if self._server is not None:
            await self._server.set_serving(False)
        if self._announcer is not None:
            await self._announcer.withdraw()
        if self._host is not None:
            await self._host.drain(self.options.drain_s if deadline_s is None else deadline_s)
        with anyio.move_on_after(STOP_GRACE_S, shield=True):
            if self._server is not None:
                await self._server.stop(STOP_GRACE_S)
