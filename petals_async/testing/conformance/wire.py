"""The client that the checks speak with: raw messages, held against a small model of the rules."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import anyio

from petals_async.abc import BlockChannel, SessionStream
from petals_async.core.hidden import HiddenStates, TensorSpec
from petals_async.core.messages import (
    SESSION_ID_BYTES,
    CloseSession,
    Draining,
    Opened,
    OpenSession,
    Part,
    Progress,
    Refused,
    Result,
    ServerMessage,
    Step,
    StepState,
    outputs_of,
)
from petals_async.core.parts import PartAssembler, cut, travels_inline
from petals_async.core.server_info import ServerInfo, SessionInfo
from petals_async.errors import (
    PeerError,
    PetalsAsyncError,
)
from petals_async.testing.conformance.target import (
    LIMIT_S,
    POLL_S,
    SESSION_TOKENS,
    ConformanceError,
    E,
    NotOfferedError,
    Target,
    equal,
    make_states,
    require,
)

# -- the model of the rules, and the client that checks against it


@dataclass
class Model:
    """What a session should hold: its inputs in the chunks in which they came, and the next step id."""

    chunks: list[HiddenStates] = field(default_factory=list)
    next_step_id: int = 1

    @property
    def position(self) -> int:
        """Tokens that should be held."""
        return sum(chunk.num_tokens for chunk in self.chunks)

    def run(self, token_offset: int, hidden: HiddenStates | None, rows: Sequence[int]) -> None:
        """Truncate, permute, append; the next id follows."""
        self.truncate(token_offset)
        if rows:
            self.chunks = [chunk.take_rows(rows) for chunk in self.chunks]
        if hidden is not None:
            self.chunks.append(hidden)
        self.next_step_id += 1

    def truncate(self, position: int) -> None:
        """Forget the tokens from a position on."""
        kept: list[HiddenStates] = []
        for chunk in self.chunks:
            room = position - sum(piece.num_tokens for piece in kept)
            if room > 0:
                kept.append(chunk.slice_tokens(0, min(room, chunk.num_tokens)))
        self.chunks = kept

    def copy(self) -> Model:
        """Return a copy that goes its own way."""
        return Model(list(self.chunks), self.next_step_id)


class Wire:
    """A client of one stream that writes whatever it is told to, and checks what comes back against a model."""

    def __init__(self, bench: Bench, stream: SessionStream, opening: OpenSession, model: Model) -> None:
        self.bench = bench
        self.stream = stream
        self.opening = opening
        self.model = model
        self.progress: list[Progress] = []
        self.draining: list[Draining] = []

    @property
    def session_id(self) -> bytes:
        """The id of the session on this stream."""
        return self.opening.session_id

    async def receive(self) -> ServerMessage:
        """Return the next message, within `LIMIT_S`."""
        with anyio.fail_after(LIMIT_S):
            return await self.stream.receive()

    async def open(self) -> Opened:
        """Send the opening; returns the answer."""
        await self.stream.send(self.opening)
        opened = await self.receive()
        if not isinstance(opened, Opened):
            raise ConformanceError(f"`open` must be answered with `opened`, got {opened}")
        return opened

    def states(self, num_tokens: int, *, at: int | None = None, salt: int = 0) -> HiddenStates:
        """Return inputs for the session's next tokens, or for those at an offset."""
        info = self.bench.info
        start = self.model.position if at is None else at
        return make_states(info.dtype, self.opening.batch_size, start, num_tokens, info.hidden_size, salt=salt)

    async def post(
        self,
        step_id: int,
        token_offset: int,
        hidden: HiddenStates | None,
        *,
        rows: tuple[int, ...] = (),
        num_outputs: int | None = None,
        parts: Sequence[Part] | None = None,
    ) -> None:
        """Write one step, its tensor inline, in the usual parts if it is large, or in the parts given."""
        await self.stream.send(self._header(step_id, token_offset, hidden, rows, num_outputs, parts is None))
        if hidden is not None and parts is None and not travels_inline(hidden.num_bytes):
            parts = list(cut(hidden.data))
        for part in parts or ():
            await self.stream.send(part)

    def _header(
        self,
        step_id: int,
        token_offset: int,
        hidden: HiddenStates | None,
        rows: tuple[int, ...],
        num_outputs: int | None,
        may_be_inline: bool,
    ) -> Step:
        if hidden is None:
            return Step(step_id, token_offset, 0, row_indices=rows, num_outputs=num_outputs)
        data = hidden.data if may_be_inline and travels_inline(hidden.num_bytes) else None
        return Step(step_id, token_offset, hidden.num_tokens, hidden.spec, data, rows, num_outputs)

    async def answer(self) -> Result | Refused:
        """Return the next answer to a step, a result's parts put together; signs of life are kept aside."""
        header: Result | None = None
        assembler = PartAssembler(0)
        while True:
            message = await self.receive()
            match message:
                case Progress():
                    self.progress.append(message)
                case Draining():
                    self.draining.append(message)
                case Result(tensor=TensorSpec() as spec, data=None) if header is None:
                    header, assembler = message, PartAssembler(spec.num_bytes)
                case Part() if header is not None:
                    assembler.add(message)
                    if assembler.complete:
                        return replace(header, data=assembler.join())
                case Result() | Refused() if header is None:
                    return message
                case _:
                    raise ConformanceError(f"{message} out of order")

    async def step(
        self,
        token_offset: int,
        hidden: HiddenStates | None,
        *,
        rows: tuple[int, ...] = (),
        num_outputs: int | None = None,
        parts: Sequence[Part] | None = None,
    ) -> Result:
        """Run the next step, and check its result against the model."""
        await self.post(self.model.next_step_id, token_offset, hidden, rows=rows, num_outputs=num_outputs, parts=parts)
        return await self.result(token_offset, hidden, rows=rows, num_outputs=num_outputs)

    async def result(
        self,
        token_offset: int,
        hidden: HiddenStates | None,
        *,
        rows: tuple[int, ...] = (),
        num_outputs: int | None = None,
    ) -> Result:
        """Take the result of a step that was posted under the next id, and check it against the model."""
        answer = await self.answer()
        if not isinstance(answer, Result):
            raise ConformanceError(f"step {self.model.next_step_id} at {token_offset} must run, got {answer}")
        step_id = self.model.next_step_id
        self.model.run(token_offset, hidden, rows)
        stated = (answer.step_id, answer.token_offset, answer.position)
        equal(stated, (step_id, token_offset, self.model.position), "the result's id, offset and position")
        await self._check_outputs(answer, hidden, num_outputs)
        return answer

    async def _check_outputs(self, result: Result, hidden: HiddenStates | None, num_outputs: int | None) -> None:
        num_tokens = hidden.num_tokens if hidden else 0
        wanted = num_tokens if num_outputs is None else num_outputs
        outputs = outputs_of(result)
        if wanted == 0:
            require(
                outputs is None or outputs.num_tokens == 0, f"no outputs were wanted, got {outputs and outputs.shape}"
            )
            return
        expected = (await self.bench.expected(self.model.chunks, self.opening)).slice_tokens(
            num_tokens - wanted, num_tokens
        )
        if outputs is None:
            raise ConformanceError(f"{wanted} tokens' outputs were wanted, got none")
        equal(outputs.spec, expected.spec, "the outputs' type and shape")
        require(self.bench.target.same(outputs, expected), f"step {result.step_id}: wrong outputs")

    async def refusal(self, step_id: int, *reasons: str) -> Refused:
        """Take a refusal of a step, and check that it changed nothing; the model knows what is held."""
        answer = await self.answer()
        if not isinstance(answer, Refused):
            raise ConformanceError(f"step {step_id} must be refused with {reasons}, got {answer}")
        equal(answer.step_id, step_id, "the id in the refusal")
        require(answer.reason in reasons, f"the reason must be one of {reasons}, got {answer.reason}: {answer.message}")
        stated = (answer.position, answer.next_step_id)
        equal(stated, (self.model.position, self.model.next_step_id), f"position and next id after {answer.reason}")
        require(bool(answer.message), f"{answer.reason} without a message")
        return answer

    async def over(self, kind: type[E]) -> E:
        """Read until the stream ends; returns the error with which it did."""
        try:
            while True:
                await self.receive()
        except kind as error:
            return error
        except PetalsAsyncError as error:
            raise ConformanceError(f"the stream must end with {kind.__name__}, got {error!r}") from error

    async def goodbye(self) -> None:
        """Close in-band, and wait for the end."""
        await self.stream.send(CloseSession())
        await self.over(PeerError)


@dataclass
class Bench:
    """One connection to the target, and what it says of itself."""

    target: Target
    channel: BlockChannel
    info: ServerInfo

    def opening(self, **changes: Any) -> OpenSession:
        """Return a sound opening of a new session, with some fields changed."""
        opening = OpenSession(
            session_id=secrets.token_bytes(SESSION_ID_BYTES),
            model_fingerprint=self.info.model_fingerprint,
            span=self.info.span,
            batch_size=1,
            max_tokens=min(SESSION_TOKENS, self.info.limits.max_session_tokens),
            wire_dtype=self.info.dtype,
        )
        return replace(opening, **changes)

    @asynccontextmanager
    async def stream(self, opening: OpenSession, model: Model | None = None) -> AsyncIterator[Wire]:
        """Open a stream without sending anything; leaving it breaks it off."""
        async with self.channel.open_stream() as stream:
            yield Wire(self, stream, opening, model or Model())

    @asynccontextmanager
    async def session(self, **changes: Any) -> AsyncIterator[Wire]:
        """Open a new session, and check that it begins at 0 with id 1; leaving it breaks the stream off."""
        async with self.stream(self.opening(**changes)) as wire:
            opened = await wire.open()
            equal((opened.position, opened.next_step_id), (0, 1), "a new session's position and next id")
            yield wire

    @asynccontextmanager
    async def resumed(self, wire: Wire) -> AsyncIterator[Wire]:
        """Resume a session on a new stream, and check that it goes on where the model is."""
        model = wire.model.copy()
        async with self.stream(replace(wire.opening, resume=True, fork=None), model) as again:
            opened = await again.open()
            stated = (opened.position, opened.next_step_id)
            equal(stated, (model.position, model.next_step_id), "position and next id after a resume")
            yield again

    async def expected(self, chunks: Sequence[HiddenStates], opening: OpenSession) -> HiddenStates:
        """Return the last chunk's outputs: from the reference, else from a fresh session that runs the chunks."""
        last = chunks[-1].num_tokens
        if self.target.reference is not None:
            outputs = self.target.reference(HiddenStates.concat_tokens(chunks), opening.span)
            return outputs.slice_tokens(outputs.num_tokens - last, outputs.num_tokens)
        fresh = replace(opening, session_id=secrets.token_bytes(SESSION_ID_BYTES), resume=False, fork=None)
        async with self.stream(fresh) as wire:
            await wire.open()
            offset = 0
            for number, chunk in enumerate(chunks, start=1):
                await wire.post(number, offset, chunk)
                offset += chunk.num_tokens
                answer = await wire.answer()
            await wire.goodbye()
        outputs_last = outputs_of(answer) if isinstance(answer, Result) else None
        if outputs_last is None:
            raise ConformanceError(f"a fresh session can't run the same chunks: {answer}")
        return outputs_last

    async def find(self, session_id: bytes) -> SessionInfo | None:
        """Return what the server lists under a session's handle."""
        handle = handle_of(session_id)
        with anyio.fail_after(LIMIT_S):
            sessions = await self.channel.list_sessions()
        return next((session for session in sessions if session.handle == handle), None)

    async def until(self, holds: Callable[[SessionInfo | None], bool], session_id: bytes, what: str) -> None:
        """Wait until the listing shows what is expected; far shorter than any lease."""
        found = await self.find(session_id)
        with anyio.move_on_after(LIMIT_S):
            while not holds(found):
                await anyio.sleep(POLL_S)
                found = await self.find(session_id)
        require(holds(found), f"{what}; it is listed as {found}")

    async def until_gone(self, session_id: bytes, what: str) -> None:
        """Wait until a session is listed no more."""
        await self.until(lambda found: found is None, session_id, f"{what}: the session must be freed at once")

    async def until_left(self, session_id: bytes) -> None:
        """Wait until the server has noticed that the stream is gone, and still holds the session."""
        what = "a session whose stream was lost must be kept for its lease"
        await self.until(lambda found: found is None or not found.connected, session_id, what)
        require(await self.find(session_id) is not None, what)

    async def refused_opening(self, kind: type[E], *reasons: str, said: str = "", **changes: Any) -> E:
        """Open in vain, and check the error; no session may be left behind."""
        opening = self.opening(**changes)
        async with self.stream(opening) as wire:
            await wire.stream.send(opening)
            error = await wire.over(kind)
        require(error.reason in reasons, f"the reason must be one of {reasons}, got {error.reason}: {error}")
        require(said in error.message, f"the message must name {said!r}: {error.message}")
        require(await self.find(opening.session_id) is None, "a refused opening left a session behind")
        return error


def handle_of(session_id: bytes) -> str:
    """Return what may be shown of a session id: the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(session_id).hexdigest()[:8]


@asynccontextmanager
async def open_bench(target: Target) -> AsyncIterator[Bench]:
    """Connect to the target, and ask what it is."""
    async with target.connector.connect(target.address) as channel:
        with anyio.fail_after(LIMIT_S):
            info = await channel.get_server_info()
        yield Bench(target, channel, info)


def two_rows(bench: Bench) -> int:
    """Return 2, if the server takes sessions of two rows."""
    if bench.info.limits.max_batch_size < 2:
        raise NotOfferedError("the server takes single rows only")
    return 2


async def progress_until(wire: Wire, step_id: int, *states: StepState) -> Progress:
    """Read signs of life until one of a step shows one of these states; no answer may come before."""
    while True:
        message = await wire.receive()
        if not isinstance(message, Progress):
            raise ConformanceError(f"signs of life of step {step_id} must come, got {message}")
        wire.progress.append(message)
        if message.step_id == step_id and message.state in states:
            return message


async def old_order_wanted(wire: Wire, token_offset: int, before: Model) -> None:
    """Post a step at or before the last permutation: refused with position 0, or run on the old order."""
    hidden = wire.states(1, at=token_offset, salt=8)
    await wire.post(wire.model.next_step_id, token_offset, hidden)
    answer = await wire.answer()
    if isinstance(answer, Refused):
        stated = (answer.reason, answer.position, answer.next_step_id)
        equal(stated, ("ROWS_CHANGED", 0, wire.model.next_step_id), "reason, position and next id")
        wire.model.truncate(0)
        return
    before.run(token_offset, hidden, ())
    expected = await wire.bench.expected(before.chunks, wire.opening)
    outputs = outputs_of(answer)
    require(outputs is not None and wire.bench.target.same(outputs, expected), "the old order was not restored")
    wire.model.run(token_offset, hidden, ())
    wire.model.chunks = before.chunks
