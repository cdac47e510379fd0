"""The client: embeddings and head here, blocks on the servers, and generation that survives them."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from petals_async.abc import Connector, Registry
from petals_async.client.model_files import ModelFiles, ThreadedEdges, load_model_files, open_checkpoint
from petals_async.client.result import GenerationResult
from petals_async.client.route import DEFAULT_MAX_RETRIES, DEFAULT_TIMEOUT_S, RouteOptions
from petals_async.client.session import Session, open_session
from petals_async.client.swarm import Needs, open_swarm
from petals_async.core.byte_budget import ByteBudget
from petals_async.core.replay import DEFAULT_REPLAY_LOG_BYTES
from petals_async.core.server_info import ServerInfo
from petals_async.core.span import Span
from petals_async.engine.thread import Executor, worker_thread
from petals_async.errors import ClosedError, ConfigurationError, LengthExceededError, NoRouteError, RequestError
from petals_async.models.checkpoint import Checkpoint
from petals_async.registry.address import connect_registry, parse_registry
from petals_async.rpc.block_channel import GrpcConnector

if TYPE_CHECKING:
    from petals_async.client.generation import GenerationStream, OnPiece
    from petals_async.client.settings import GenerationSettings

log = logging.getLogger(__name__)

DEFAULT_CHUNK_TOKENS = 512
"""Long inputs are sent in steps of at most this many tokens, if the servers allow it."""


def generation() -> Any:
    """Return the generation module; it imports torch, which opening a client has done already."""
    from petals_async.client import generation as module

    return module


class Client:
    """A model whose blocks run on a swarm of block servers.

        async with petals_async.Client("demo", registry="127.0.0.1:7600") as client:
            result = await client.generate("Once upon a time", max_new_tokens=64)

    Nothing is opened before `async with`; leaving it leaves no task, socket, thread or remote KV behind.

    Args:
        model: A directory, a Hub id, a .gguf file, or "demo".
        registry: HOST:PORT, static:HOST:PORT,HOST:PORT, or an opened `abc.Registry`.
        dtype: float32, bfloat16 or float16; None for what the swarm computes in.
        timeout_s: How long one step may wait for servers, in seconds.
        max_retries: Failed attempts of one recovery, at most.
        replay: "exact" gives a replayed prefix the bits that it had: merged for servers that can do both (`exact` in
            ServerInfo), in the chunks in which it was first sent for others. "fast" merges for all, which may round
            differently (in 16 bits it can change tokens).
        replay_log_bytes: Bytes that the replay logs of one session may hold.
        chunk_tokens: Tokens of one step at most.
        threads: Threads for embeddings and head; None leaves it to torch.
        on_progress: Takes lines for a person while the client starts.
        connector: How block servers are reached; None for gRPC.
        executor: Where embeddings and head run; None for a thread of the client's own.

    Raises:
        ConfigurationError: An option that can't work.
        CheckpointError: A wrong model path or damaged files; in `async with`.
        RegistryUnavailableError: No registry answers; in `async with`.
        NoRouteError: No server of this model within `timeout_s`; in `async with`.
    """

    def __init__(
        self,
        model: str | Path,
        registry: str | Registry = "127.0.0.1:7600",
        *,
        dtype: str | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        max_retries: int = DEFAULT_MAX_RETRIES,
        replay: str = "exact",
        replay_log_bytes: int = DEFAULT_REPLAY_LOG_BYTES,
        chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
        threads: int | None = None,
        on_progress: Callable[[str], None] | None = None,
        connector: Connector | None = None,
        executor: Executor | None = None,
    ) -> None:
        if replay not in ("exact", "fast"):
            raise ConfigurationError(f"replay must be exact or fast, got {replay!r}")
        if min(timeout_s, replay_log_bytes, chunk_tokens) <= 0 or max_retries < 0:
            raise ConfigurationError("timeout_s, replay_log_bytes and chunk_tokens must be above 0, max_retries >= 0")
        if isinstance(registry, str):
            parse_registry(registry)
        self._model = str(model)
        self._registry = registry
        self._dtype = dtype
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._replay = replay
        self._replay_log_bytes = replay_log_bytes
        self._chunk_tokens = chunk_tokens
        self._threads = threads
        self._report = on_progress or log.info
        self._connector = connector or GrpcConnector()
        self._executor = executor
        self._stack: AsyncExitStack | None = None

    # -- life

    async def __aenter__(self) -> Self:
        if self._stack is not None:
            raise ClosedError("the client is open already")
        async with AsyncExitStack() as stack:
            await self._open(stack)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        stack, self._stack = self._stack, None
        return await stack.__aexit__(kind, error, trace) if stack is not None else None

    async def _open(self, stack: AsyncExitStack) -> None:
        registry = await self._open_registry(stack)
        executor = self._executor
        if executor is None:
            executor = await stack.enter_async_context(worker_thread("petals-async edges"))
        self._checkpoint = await executor.call(lambda: open_checkpoint(self._model, self._report))
        await registry.list_servers(self._checkpoint.fingerprint)
        self._swarm = await stack.enter_async_context(
            open_swarm(registry, self._connector, model_fingerprint=self._checkpoint.fingerprint, dtype=self._dtype)
        )
        dtype = await self._swarm.settle_dtype(self._timeout_s)
        self._report("loading embeddings and head")
        self._files = await executor.call(lambda: load_model_files(self._checkpoint, dtype, self._threads))
        self._edges = ThreadedEdges(self._files.edges, executor)

    async def _open_registry(self, stack: AsyncExitStack) -> Registry:
        if not isinstance(self._registry, str):
            return self._registry
        return await stack.enter_async_context(connect_registry(self._registry, connector=self._connector))

    def _check_open(self) -> None:
        if self._stack is None:
            raise ClosedError("a client works inside `async with` only")

    # -- what it is

    @property
    def checkpoint(self) -> Checkpoint:
        """The model's configuration and files."""
        self._check_open()
        return self._checkpoint

    @property
    def files(self) -> ModelFiles:
        """Edges, tokenizer (None if the model has none) and generation defaults."""
        self._check_open()
        return self._files

    @property
    def dtype(self) -> str:
        """The dtype of the hidden states."""
        self._check_open()
        return self._swarm.dtype or ""

    @property
    def servers(self) -> list[ServerInfo]:
        """The block servers of this model that are known now."""
        self._check_open()
        return self._swarm.servers()

    def max_session_tokens(self, batch_size: int = 1) -> int:
        """Return the longest session that the model and the servers known now allow, in tokens.

        Raises:
            NoRouteError: No server of this model is known now.
        """
        self._check_open()
        allowed = [
            server.limits.max_session_tokens
            for server in self._swarm.servers()
            if server.limits.max_batch_size >= batch_size
        ]
        if not allowed:
            raise NoRouteError(f"no server takes sessions of {batch_size} rows now")
        return min(max(allowed), self._checkpoint.max_position or max(allowed))

    # -- generation

    async def generate(
        self,
        prompt: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> Any:
        """Continue a prompt, or several at the same time.

        Args:
            prompt: A `str` (tokenised as it stands), token ids, chat messages (dicts with `role` and `content`),
                or a list of these, which may differ in length.
            generation_config: A transformers `GenerationConfig`; the model directory's own when None.
            input_ids: Another name for token ids as `prompt`.
            timeout_s: How long one step may wait for servers, in seconds; the client's own when None.
            **options: `max_new_tokens`, `min_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`,
                `repetition_penalty`, `stop_strings`, `eos_token_id`, `seed`, `logits_processor`,
                `stopping_criteria`. Others are refused.

        Returns:
            A `GenerationResult`, or a list of them for a list of prompts.

        Raises:
            RequestError: A prompt or an option that can't be; nothing was sent.
            LengthExceededError: Prompt and new tokens are more than the model or the servers allow; nothing was sent.
            NoRouteError: Some blocks had no server in time; lists each attempt.
        """
        prompts, many, settings = self._prepare(prompt, input_ids, generation_config, options)

        async def continue_one(prompt_ids: Sequence[int]) -> GenerationResult:
            return await self._continue(prompt_ids, settings, timeout_s)

        results = await generation().generate_many(prompts, continue_one)
        return results if many else results[0]

    def stream(
        self,
        prompt: Any = None,
        generation_config: Any = None,
        *,
        input_ids: Any = None,
        timeout_s: float | None = None,
        **options: Any,
    ) -> GenerationStream:
        """Continue one prompt, and show the text while it grows; see `generate` for the arguments.

        Returns:
            A context manager to iterate over; `result` is there after the last piece.

        Raises:
            RequestError: A prompt or an option that can't be, or several prompts.
            LengthExceededError: Prompt and new tokens are more than the model or the servers allow.
        """
        prompts, many, settings = self._prepare(prompt, input_ids, generation_config, options)
        if many:
            raise RequestError(f"a stream continues one prompt, got {len(prompts)}; use generate, or several streams")
        make: Callable[..., GenerationStream] = generation().GenerationStream
        return make(lambda on_piece: self._continue(prompts[0], settings, timeout_s, on_piece))

    def _prepare(
        self, prompt: Any, input_ids: Any, generation_config: Any, options: dict[str, Any]
    ) -> tuple[list[list[int]], bool, GenerationSettings]:
        """Check everything that can be checked before a session is opened."""
        from petals_async.client.prompt import encode_prompts
        from petals_async.client.settings import resolve_settings

        self._check_open()
        if (prompt is None) == (input_ids is None):
            raise RequestError("give a prompt, or input_ids, and not both")
        files = self._files
        settings = resolve_settings(files.generation_defaults, generation_config, options)
        if settings.stop_strings and files.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and the model directory has none")
        given = input_ids if prompt is None else prompt
        prompts, many = encode_prompts(given, files.tokenizer, self._checkpoint.vocab_size)
        limit = self.max_session_tokens() if self._swarm.servers() else self._checkpoint.max_position
        for prompt_ids in prompts:
            if limit is not None:
                generation().check_length(len(prompt_ids), settings.max_new_tokens, limit)
        return prompts, many, settings

    async def _continue(
        self,
        prompt_ids: Sequence[int],
        settings: GenerationSettings,
        timeout_s: float | None,
        on_piece: OnPiece | None = None,
    ) -> GenerationResult:
        """Continue one prompt in a session of its own."""
        max_tokens = len(prompt_ids) + settings.max_new_tokens
        async with self.session(max_tokens=max_tokens, timeout_s=timeout_s) as session:
            run = generation().Generation(
                session,
                self._edges,
                settings,
                prompt_ids,
                tokenizer=self._files.tokenizer,
                offload=self._edges.executor.call,
            )
            result: GenerationResult = await run.run(on_piece)
            return result

    # -- sessions

    @asynccontextmanager
    async def session(
        self, *, batch_size: int = 1, max_tokens: int, timeout_s: float | None = None
    ) -> AsyncIterator[Session]:
        """Open a session over all blocks, for hidden states; closing it frees the servers' KV.

        Args:
            batch_size: Rows, which share their positions.
            max_tokens: Tokens that each row may have.
            timeout_s: How long one step may wait for servers, in seconds; the client's own when None.

        Raises:
            RequestError: A batch size or number of tokens that can't be.
            LengthExceededError: Longer than the model or the servers allow; nothing was sent.
            NoRouteError: Some blocks have no server in time.
        """
        self._check_open()
        if batch_size < 1 or max_tokens < 1:
            raise RequestError(f"batch_size and max_tokens must be at least 1, got {batch_size} and {max_tokens}")
        options = self._route_options(batch_size, max_tokens, timeout_s)
        async with open_session(
            self._swarm,
            options,
            span=Span(0, self._checkpoint.num_blocks),
            hidden_size=self._checkpoint.hidden_size,
            log_budget=ByteBudget(self._replay_log_bytes, "the replay logs of this session (replay_log_bytes)"),
        ) as session:
            yield session

    def _route_options(self, batch_size: int, max_tokens: int, timeout_s: float | None) -> RouteOptions:
        servers = self._swarm.servers()
        if servers and max_tokens > (limit := self.max_session_tokens(batch_size)):
            raise LengthExceededError(f"a session of {max_tokens} tokens was asked for, the limit is {limit}")
        fitting = [s for s in servers if Needs(batch_size, max_tokens).met_by(s) and s.dtype == self._swarm.dtype]
        chunk_tokens = min([self._chunk_tokens, *(server.limits.max_step_tokens for server in fitting)])
        return RouteOptions(
            model_fingerprint=self._checkpoint.fingerprint,
            batch_size=batch_size,
            max_tokens=max_tokens,
            dtype=self._swarm.dtype or "",
            chunk_tokens=max(chunk_tokens, 1),
            timeout_s=self._timeout_s if timeout_s is None else timeout_s,
            max_retries=self._max_retries,
            fast_replay=self._replay == "fast",
        )
