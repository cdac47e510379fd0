"""The decoding loop: a prompt through the session, then token by token; and the stream that shows it meanwhile.

All decoding state (tokens, generator, penalties, stop strings) lives here at the client, so that a generation whose
servers were replaced goes on with the same tokens.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Any, Protocol, Self, TypeVar

import anyio
import torch
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from torch import Tensor
from transformers import StoppingCriteriaList

from petals_async.client.result import FinishReason, GenerationResult, Piece, Recovery, Usage
from petals_async.client.sampling import Sampler
from petals_async.client.settings import GenerationSettings
from petals_async.client.text import TextAssembler
from petals_async.core.hidden import HiddenStates
from petals_async.errors import ClosedError, LengthExceededError, RequestError
from petals_async.scopes import open_tasks

MAX_CONCURRENT_PROMPTS = 64
"""Prompts of one list that are worked on at the same time; each holds a session on the servers."""

STREAM_PIECES = 0
"""Pieces that wait for a slow consumer: none, so the next token but one waits until it has taken the last piece."""

T = TypeVar("T")

OnPiece = Callable[[Piece], Awaitable[None]]
"""Takes a piece of a stream; the generation waits for it."""

Offload = Callable[[Callable[[], T]], Awaitable[T]]
"""Runs a function elsewhere than on the event loop, such as `Executor.call`."""


class SessionLike(Protocol):
    """What the loop needs of a session: single-row steps, and what it survived."""

    position: int

    @property
    def recoveries(self) -> Sequence[Recovery]:
        """What was lost and replaced so far, oldest first."""

    @property
    def exact(self) -> bool:
        """Whether all replays repeated the very same computation."""

    async def step(self, hidden: HiddenStates, *, num_outputs: int | None = None) -> HiddenStates:
        """Run new tokens (1, n, hidden_size) through all blocks; return the last `num_outputs` outputs."""


class AsyncEdges(Protocol):
    """Embeddings and head, off the event loop."""

    async def embed(self, token_ids: Sequence[int], *, position: int) -> HiddenStates:
        """Return the hidden states (1, n, hidden_size) of tokens that start at `position`."""

    async def logits(self, hidden: HiddenStates) -> Tensor:
        """Return the logits (batch, n, vocab_size)."""


async def _inline(function: Callable[[], T]) -> T:
    return function()


def check_length(prompt_tokens: int, max_new_tokens: int, limit: int) -> None:
    """Check that a prompt and its longest continuation fit.

    Args:
        prompt_tokens: Tokens of the prompt.
        max_new_tokens: New tokens at most.
        limit: Tokens that the model and the servers allow, prompt and new ones together.

    Raises:
        LengthExceededError: They don't; the message holds all three.
    """
    wanted = prompt_tokens + max_new_tokens
    if wanted > limit:
        raise LengthExceededError(
            f"a prompt of {prompt_tokens} tokens and max_new_tokens={max_new_tokens} make {wanted} tokens, "
            f"at most {limit} are allowed"
        )


class Generation:
    """One prompt's continuation, token by token. Use it once.

    Args:
        session: A session of one row. If it holds tokens already (an earlier turn), they are the first
            `session.position` of `prompt_ids`, and only the others are sent.
        edges: Embeddings and head.
        settings: How to decode.
        prompt_ids: All tokens before the first new one, those that the session holds included.
        tokenizer: From transformers; None for no text.
        offload: Where tokens are picked, which takes milliseconds for a large vocabulary; inline by default.

    Raises:
        RequestError: No token of the prompt is left to send, or stop strings without a tokenizer.
    """

    def __init__(
        self,
        session: SessionLike,
        edges: AsyncEdges,
        settings: GenerationSettings,
        prompt_ids: Sequence[int],
        *,
        tokenizer: Any = None,
        offload: Offload[Any] = _inline,
    ) -> None:
        if len(prompt_ids) <= session.position:
            raise RequestError(
                f"the prompt has {len(prompt_ids)} tokens and the session holds {session.position}: nothing is new"
            )
        self._session = session
        self._edges = edges
        self._settings = settings
        self._prompt_ids = list(prompt_ids)
        self._offload = offload
        self._sampler = Sampler(settings, prompt_ids)
        self._text = TextAssembler(tokenizer, settings.stop_strings, prompt_ids)
        self._criteria = StoppingCriteriaList(settings.stopping_criteria)
        self._token_ids: list[int] = []
        self._past_recoveries = len(session.recoveries)

    async def run(self, on_piece: OnPiece | None = None) -> GenerationResult:
        """Generate to the end.

        The last token is not sent through the blocks: the session ends one token short of prompt and result.

        Args:
            on_piece: Takes each piece of new text, and at the end what is left; the next token waits for it.

        Raises:
            NoRouteError: Some blocks had no server in time.
            LengthExceededError: The session is too short.
            ComputeError: The logits hold NaN or infinity (NON_FINITE).
            RequestError: Logits processors left nothing to pick.
        """
        pieces = _Pieces(on_piece, textless=self._text.textless)
        inputs = self._prompt_ids[self._session.position :]
        while True:
            token = await self._next_token(inputs)
            self._token_ids.append(token)
            await pieces.add(token, self._text.push(token))
            reason = self._finish_reason(token)
            if reason is not None:
                break
            inputs = [token]
        await pieces.flush(self._text.finish())
        return self._result(reason)

    async def _next_token(self, inputs: Sequence[int]) -> int:
        hidden = await self._edges.embed(inputs, position=self._session.position)  # (1, n, D)
        outputs = await self._session.step(hidden, num_outputs=1)  # (1, 1, D)
        logits = await self._edges.logits(outputs)  # (1, 1, V)
        token: int = await self._offload(lambda: self._sampler.pick(logits[:, -1]))
        return token

    def _finish_reason(self, token: int) -> FinishReason | None:
        if token in self._settings.eos_token_ids:
            return "eos"
        if self._text.stopped or self._criteria_met():
            return "stop"
        return "length" if len(self._token_ids) >= self._settings.max_new_tokens else None

    def _criteria_met(self) -> bool:
        """Ask the caller's criteria, in transformers' convention: all tokens (1, n), and no scores."""
        return bool(self._criteria) and bool(torch.all(self._criteria(self._sampler.input_ids, None)))

    def _result(self, reason: FinishReason) -> GenerationResult:
        if reason == "length" and self._text.stopped:  # the text held back to the last ended in a stop string
            reason = "stop"
        return GenerationResult(
            text=self._text.text,
            token_ids=tuple(self._token_ids),
            finish_reason=reason,
            usage=Usage(prompt_tokens=len(self._prompt_ids), completion_tokens=len(self._token_ids)),
            recoveries=tuple(self._session.recoveries[self._past_recoveries :]),
            exact=self._session.exact,
        )


class _Pieces:
    """Gathers tokens until there is text to show, and hands both on.

    Args:
        on_piece: Takes the pieces, if anybody does.
        textless: There never is any text: each token is handed on at once.
    """

    def __init__(self, on_piece: OnPiece | None, *, textless: bool) -> None:
        self._on_piece = on_piece
        self._textless = textless
        self._token_ids: list[int] = []

    async def add(self, token: int, text: str) -> None:
        self._token_ids.append(token)
        if text or self._textless:
            await self.flush(text)

    async def flush(self, text: str) -> None:
        token_ids, self._token_ids = tuple(self._token_ids), []
        if self._on_piece is not None and (text or token_ids):
            await self._on_piece(Piece(text, token_ids))


class GenerationStream:
    """A generation that is shown while it runs.

        async with client.stream("Once upon a time") as stream:
            async for piece in stream:
                print(piece.text, end="")
        print(stream.result.finish_reason)

    The generation runs in a task of the context: leaving early cancels it, and a slow consumer holds it up. Its
    errors come out of the loop as they were raised, or out of the context if nobody was in the loop any more. Errors
    of the body come out as they were raised, and win over those of the generation.

    Args:
        produce: Runs the generation, hands each piece to the function that it is given, and returns the result.
    """

    def __init__(self, produce: Callable[[OnPiece], Awaitable[GenerationResult]]) -> None:
        self._produce = produce
        self._tasks: TaskGroup | None = None
        self._receive: MemoryObjectReceiveStream[Piece] | None = None
        self._ends: tuple[MemoryObjectSendStream[Piece] | MemoryObjectReceiveStream[Piece], ...] = ()
        self._result: GenerationResult | None = None
        self._failure: Exception | None = None

    @property
    def result(self) -> GenerationResult:
        """The result; there after the last piece, in and after the context.

        Raises:
            ClosedError: The generation hasn't ended, or never came to its end.
        """
        if self._result is None:
            raise ClosedError("a stream has its result after the last piece only")
        return self._result

    async def __aenter__(self) -> Self:
        if self._tasks is not None:
            raise ClosedError("a stream is used once")
        self._tasks = await anyio.create_task_group().__aenter__()
        send, self._receive = anyio.create_memory_object_stream[Piece](STREAM_PIECES)
        self._ends = (send, self._receive)
        self._tasks.start_soon(self._run, send)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if self._tasks is None or self._receive is None:
            raise ClosedError("a stream is left once, after it was entered")
        self._receive = None
        self._tasks.cancel_scope.cancel()
        try:
            swallowed = await _leave(self._tasks, kind, error, trace)
        finally:
            for end in self._ends:  # a task that was cancelled before it began has closed nothing
                end.close()
        failure, self._failure = self._failure, None
        if error is None and failure is not None:
            raise failure
        return swallowed

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Piece:
        if self._receive is None:
            raise ClosedError("a stream works inside `async with` only")
        try:
            return await self._receive.receive()
        except anyio.EndOfStream:
            failure, self._failure = self._failure, None
        if failure is not None:
            raise failure
        raise StopAsyncIteration

    async def _run(self, send: MemoryObjectSendStream[Piece]) -> None:
        """Produce; an error is no end of the task group but is handed over, to be raised where the consumer is."""
        with send:
            try:
                self._result = await self._produce(send.send)
            except Exception as error:  # noqa: BLE001 - not handled here, but raised in the consumer's task
                self._failure = error


async def _leave(
    tasks: TaskGroup, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
) -> bool | None:
    """Leave a cancelled task group. It must see a cancellation, but would wrap any other error of the body."""
    if isinstance(error, anyio.get_cancelled_exc_class()):
        return await tasks.__aexit__(kind, error, trace)
    await tasks.__aexit__(None, None, None)
    return None


async def generate_many(
    prompts: Sequence[T],
    generate_one: Callable[[T], Awaitable[GenerationResult]],
    *,
    max_concurrent: int = MAX_CONCURRENT_PROMPTS,
) -> list[GenerationResult]:
    """Continue several prompts at the same time, each on its own, and return the results in their order.

    Args:
        prompts: The prompts, in any form.
        generate_one: Continues one, in a session of its own.
        max_concurrent: Prompts that are worked on at the same time, at least 1; the others wait.

    Raises:
        Exception: The first error of any prompt, as it was raised; the others are cancelled.
    """
    results: dict[int, GenerationResult] = {}
    waiting = iter(enumerate(prompts))

    async def work() -> None:
        for index, prompt in waiting:
            results[index] = await generate_one(prompt)

    async with open_tasks() as tasks:
        for _ in range(min(max_concurrent, len(prompts))):
            tasks.start_soon(work)
    return [results[index] for index in range(len(prompts))]
