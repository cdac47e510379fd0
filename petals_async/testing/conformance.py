"""Conformance checks of RunSession: does a block server keep the rules of the wire contract?

Every check is `async def check_xxx(target)`; `CHECKS` lists them all, each named after what it shows, with the
rule's number in its docstring. They speak raw messages of `core/messages.py` over `abc.SessionStream`, so that
they run against any server to which there is a connector; they are plain AnyIO. Expectations come from a small
model of the rules (`_Model`): the tokens that should be held, and the only step id that should run next.

What a check needs beyond the wire (evicting a session, stopping the computing) is a hook of `Target`. A target
that doesn't offer it makes the check raise `NotOfferedError`, which a test shows as skipped.
"""

from __future__ import annotations

import hashlib
import math
import secrets
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import anyio

from petals_async.abc import BlockChannel, Connector, SessionStream
from petals_async.core.hidden import ITEM_BYTES, HiddenStates, TensorSpec
from petals_async.core.messages import (
    MAX_INLINE_BYTES,
    SESSION_ID_BYTES,
    CloseSession,
    Draining,
    ForkSource,
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
from petals_async.core.server_info import ServerInfo, ServerState, SessionInfo
from petals_async.core.span import Span
from petals_async.errors import (
    LengthExceededError,
    PeerError,
    PetalsAsyncError,
    RequestError,
    ServerDrainingError,
    ServerOverloadedError,
)

LIMIT_S = 10.0
"""No answer may take longer."""

POLL_S = 0.01
"""What happens when a stream is gone is looked for at this interval, for `LIMIT_S` at most."""

SESSION_TOKENS = 32
"""Tokens for which the checks open their sessions, where the server allows as many."""

T = TypeVar("T")
E = TypeVar("E", bound=PetalsAsyncError)


class ConformanceError(AssertionError):
    """The server broke a rule; the message says which, and what came instead."""


class NotOfferedError(Exception):
    """The target doesn't offer what the check needs; the message says what."""


@dataclass(frozen=True)
class Target:
    """A block server to be checked; a fresh one for each check is best.

    Args:
        connector: How to reach it.
        address: Where it is.
        reference: The outputs that all tokens of a session must have, from their inputs (batch, n, hidden_size)
            and the span, computed without any cache. Without it they are computed by a fresh session.
        same: Whether two outputs are the same; by default bit for bit.
        evict: Drop a session's KV, given its id; returns whether it was dropped.
        advance: Let that many seconds pass for leases.
        hold_compute: While the context is open, steps that have begun computing don't end.
        fail_next_compute: Make the next step fail in computing.
        num_computed: Steps computed so far.
        start_draining: Begin to drain, with that many seconds as the deadline; returns at once.
    """

    connector: Connector
    address: str
    reference: Callable[[HiddenStates, Span], HiddenStates] | None = None
    same: Callable[[HiddenStates, HiddenStates], bool] = lambda mine, theirs: mine == theirs
    evict: Callable[[bytes], Awaitable[bool]] | None = None
    advance: Callable[[float], Awaitable[None]] | None = None
    hold_compute: Callable[[], AbstractAsyncContextManager[None]] | None = None
    fail_next_compute: Callable[[], None] | None = None
    num_computed: Callable[[], int] | None = None
    start_draining: Callable[[float], Awaitable[None]] | None = None


Check = Callable[[Target], Awaitable[None]]

CHECKS: list[Check] = []
"""All checks, in the order of the rules."""


def _listed(check: Check) -> Check:
    CHECKS.append(check)
    return check


def _need(hook: T | None, name: str) -> T:
    if hook is None:
        raise NotOfferedError(f"the target has no hook {name!r}")
    return hook


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise ConformanceError(what)


def _equal(got: object, wanted: object, what: str) -> None:
    _require(got == wanted, f"{what}: expected {wanted}, got {got}")


def make_states(dtype: str, batch_size: int, start: int, num_tokens: int, width: int, *, salt: int = 0) -> HiddenStates:
    """Return hidden states of whole numbers from 0 to 6, which differ by row, token and salt: (batch, n, width)."""
    numbers = [
        float((3 * row + 5 * token + 7 * column + 11 * salt + row * token * (column + 1)) % 7)
        for row in range(batch_size)
        for token in range(start, start + num_tokens)
        for column in range(width)
    ]
    return HiddenStates(dtype, (batch_size, num_tokens, width), pack(dtype, numbers))


def pack(dtype: str, numbers: Sequence[float]) -> bytes:
    """Return numbers as little-endian bytes of a dtype of the wire; bfloat16 by cutting off."""
    if dtype == "bfloat16":
        whole = struct.pack(f"<{len(numbers)}f", *numbers)
        return b"".join(whole[start + 2 : start + 4] for start in range(0, len(whole), 4))
    return struct.pack(f"<{len(numbers)}{'e' if dtype == 'float16' else 'f'}", *numbers)


# -- the model of the rules, and the client that checks against it


@dataclass
class _Model:
    """What a session should hold: its inputs in the chunks in which they came, and the next step id."""

    chunks: list[HiddenStates] = field(default_factory=list)
    next_step_id: int = 1

    @property
    def position(self) -> int:
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
        kept: list[HiddenStates] = []
        for chunk in self.chunks:
            room = position - sum(piece.num_tokens for piece in kept)
            if room > 0:
                kept.append(chunk.slice_tokens(0, min(room, chunk.num_tokens)))
        self.chunks = kept

    def copy(self) -> _Model:
        return _Model(list(self.chunks), self.next_step_id)


class _Wire:
    """A client of one stream that writes whatever it is told to, and checks what comes back against a model."""

    def __init__(self, bench: _Bench, stream: SessionStream, opening: OpenSession, model: _Model) -> None:
        self.bench = bench
        self.stream = stream
        self.opening = opening
        self.model = model
        self.progress: list[Progress] = []
        self.draining: list[Draining] = []

    @property
    def session_id(self) -> bytes:
        return self.opening.session_id

    async def receive(self) -> ServerMessage:
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
        _equal(stated, (step_id, token_offset, self.model.position), "the result's id, offset and position")
        await self._check_outputs(answer, hidden, num_outputs)
        return answer

    async def _check_outputs(self, result: Result, hidden: HiddenStates | None, num_outputs: int | None) -> None:
        num_tokens = hidden.num_tokens if hidden else 0
        wanted = num_tokens if num_outputs is None else num_outputs
        outputs = outputs_of(result)
        if wanted == 0:
            _require(
                outputs is None or outputs.num_tokens == 0, f"no outputs were wanted, got {outputs and outputs.shape}"
            )
            return
        expected = (await self.bench.expected(self.model.chunks, self.opening)).slice_tokens(
            num_tokens - wanted, num_tokens
        )
        if outputs is None:
            raise ConformanceError(f"{wanted} tokens' outputs were wanted, got none")
        _equal(outputs.spec, expected.spec, "the outputs' type and shape")
        _require(self.bench.target.same(outputs, expected), f"step {result.step_id}: wrong outputs")

    async def refusal(self, step_id: int, *reasons: str) -> Refused:
        """Take a refusal of a step, and check that it changed nothing; the model knows what is held."""
        answer = await self.answer()
        if not isinstance(answer, Refused):
            raise ConformanceError(f"step {step_id} must be refused with {reasons}, got {answer}")
        _equal(answer.step_id, step_id, "the id in the refusal")
        _require(
            answer.reason in reasons, f"the reason must be one of {reasons}, got {answer.reason}: {answer.message}"
        )
        stated = (answer.position, answer.next_step_id)
        _equal(stated, (self.model.position, self.model.next_step_id), f"position and next id after {answer.reason}")
        _require(bool(answer.message), f"{answer.reason} without a message")
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
class _Bench:
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
    async def stream(self, opening: OpenSession, model: _Model | None = None) -> AsyncIterator[_Wire]:
        """Open a stream without sending anything; leaving it breaks it off."""
        async with self.channel.open_stream() as stream:
            yield _Wire(self, stream, opening, model or _Model())

    @asynccontextmanager
    async def session(self, **changes: Any) -> AsyncIterator[_Wire]:
        """Open a new session, and check that it begins at 0 with id 1; leaving it breaks the stream off."""
        async with self.stream(self.opening(**changes)) as wire:
            opened = await wire.open()
            _equal((opened.position, opened.next_step_id), (0, 1), "a new session's position and next id")
            yield wire

    @asynccontextmanager
    async def resumed(self, wire: _Wire) -> AsyncIterator[_Wire]:
        """Resume a session on a new stream, and check that it goes on where the model is."""
        model = wire.model.copy()
        async with self.stream(replace(wire.opening, resume=True, fork=None), model) as again:
            opened = await again.open()
            stated = (opened.position, opened.next_step_id)
            _equal(stated, (model.position, model.next_step_id), "position and next id after a resume")
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
        _require(holds(found), f"{what}; it is listed as {found}")

    async def until_gone(self, session_id: bytes, what: str) -> None:
        await self.until(lambda found: found is None, session_id, f"{what}: the session must be freed at once")

    async def until_left(self, session_id: bytes) -> None:
        """Wait until the server has noticed that the stream is gone, and still holds the session."""
        what = "a session whose stream was lost must be kept for its lease"
        await self.until(lambda found: found is None or not found.connected, session_id, what)
        _require(await self.find(session_id) is not None, what)

    async def refused_opening(self, kind: type[E], *reasons: str, said: str = "", **changes: Any) -> E:
        """Open in vain, and check the error; no session may be left behind."""
        opening = self.opening(**changes)
        async with self.stream(opening) as wire:
            await wire.stream.send(opening)
            error = await wire.over(kind)
        _require(error.reason in reasons, f"the reason must be one of {reasons}, got {error.reason}: {error}")
        _require(said in error.message, f"the message must name {said!r}: {error.message}")
        _require(await self.find(opening.session_id) is None, "a refused opening left a session behind")
        return error


def handle_of(session_id: bytes) -> str:
    """Return what may be shown of a session id: the first 8 hex digits of its SHA-256."""
    return hashlib.sha256(session_id).hexdigest()[:8]


@asynccontextmanager
async def _bench(target: Target) -> AsyncIterator[_Bench]:
    async with target.connector.connect(target.address) as channel:
        with anyio.fail_after(LIMIT_S):
            info = await channel.get_server_info()
        yield _Bench(target, channel, info)


def _two_rows(bench: _Bench) -> int:
    if bench.info.limits.max_batch_size < 2:
        raise NotOfferedError("the server takes single rows only")
    return 2


# -- who the server is, and what it holds


@_listed
async def check_server_info(target: Target) -> None:
    """GetServerInfo: what it says of itself is sound."""
    async with _bench(target) as bench:
        info = bench.info
        _require(bool(info.server_id and info.model_fingerprint), f"id and fingerprint must be given: {info}")
        _require(info.span in Span(0, info.num_blocks), f"blocks {info.span} of {info.num_blocks}")
        _require(info.dtype in ITEM_BYTES and info.hidden_size > 0, f"states of {info.hidden_size} x {info.dtype}")
        _require(len(info.block_digests) in (0, len(info.span)), "one digest for each block, or none")
        limits = info.limits
        bounds = (limits.max_step_tokens, limits.max_session_tokens, limits.max_batch_size, limits.max_in_flight_steps)
        _require(min(bounds) >= 1, f"every limit is at least 1: {limits}")
        _equal(info.state, ServerState.SERVING, "the state of a server that takes sessions")
        _require(0 <= info.kv_free_tokens <= info.kv_capacity_tokens, f"{info.kv_free_tokens} KV tokens free")


@_listed
async def check_free_kv(target: Target) -> None:
    """GetServerInfo: an open session takes KV memory, and gives it back when it is closed."""
    async with _bench(target) as bench:
        if not bench.info.kv_capacity_tokens:
            raise NotOfferedError("the server doesn't state its KV capacity")
        free = bench.info.kv_free_tokens
        async with bench.session() as wire:
            info = await bench.channel.get_server_info()
            _equal(free - info.kv_free_tokens, wire.opening.max_tokens, "KV tokens that a session takes")
            await wire.goodbye()
        _equal((await bench.channel.get_server_info()).kv_free_tokens, free, "free KV tokens after closing")


@_listed
async def check_listing(target: Target) -> None:
    """ListSessions: shows what is held under a handle made from the id, and never the id."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        listed = await bench.channel.list_sessions()
        found = next((session for session in listed if session.handle == handle_of(wire.session_id)), None)
        if found is None:
            raise ConformanceError(f"the session isn't listed under {handle_of(wire.session_id)}: {listed}")
        stated = (found.span, found.batch_size, found.position, found.max_tokens, found.connected)
        _equal(stated, (bench.info.span, 1, 3, wire.opening.max_tokens, True), "the session as it is listed")
        _require(found.kv_bytes > 0, f"KV memory in bytes: {found.kv_bytes}")
        _require(found.age_s >= found.idle_s >= 0, f"age {found.age_s} s, idle {found.idle_s} s")
        for secret in (wire.session_id.hex(), repr(wire.session_id), str(int.from_bytes(wire.session_id))):
            _require(secret not in repr(listed), "a listing must not hold a session's id")


@_listed
async def check_listing_is_oldest_first(target: Target) -> None:
    """ListSessions: the oldest session comes first."""
    async with _bench(target) as bench, bench.session() as first, bench.session() as second:
        handles = [session.handle for session in await bench.channel.list_sessions()]
        mine = [handle for handle in handles if handle in (handle_of(first.session_id), handle_of(second.session_id))]
        _equal(mine, [handle_of(first.session_id), handle_of(second.session_id)], "the order of the listing")


# -- opening


@_listed
async def check_opened(target: Target) -> None:
    """Opening: a new session begins at 0 with step id 1, and states its lease and progress interval."""
    async with _bench(target) as bench, bench.stream(bench.opening()) as wire:
        opened = await wire.open()
        _equal((opened.position, opened.next_step_id), (0, 1), "a new session's position and next id")
        _require(opened.lease_s > 0 and opened.progress_interval_s > 0, f"lease and interval are positive: {opened}")


@_listed
async def check_wrong_model(target: Target) -> None:
    """Opening: another model's fingerprint is refused as WRONG_MODEL."""
    async with _bench(target) as bench:
        for fingerprint in ("0" * 64, "", bench.info.model_fingerprint + "0"):
            await bench.refused_opening(RequestError, "WRONG_MODEL", model_fingerprint=fingerprint)


@_listed
async def check_span_outside(target: Target) -> None:
    """Opening: blocks that aren't all held are refused as BAD_SPAN, and the message names those that are."""
    async with _bench(target) as bench:
        span = bench.info.span
        for asked in (Span(span.start, span.end + 1), Span(span.end, span.end + 1), Span(span.end + 5, span.end + 9)):
            await bench.refused_opening(RequestError, "BAD_SPAN", said=str(span), span=asked)
        if span.start:
            await bench.refused_opening(RequestError, "BAD_SPAN", said=str(span), span=Span(span.start - 1, span.end))


@_listed
async def check_part_of_the_span(target: Target) -> None:
    """Opening: any blocks inside the server's span may be asked for, and only those are run."""
    async with _bench(target) as bench:
        held = bench.info.span
        for span in {Span(held.start, held.start + 1), Span(held.end - 1, held.end)}:
            async with bench.session(span=span) as wire:
                await wire.step(0, wire.states(2))
                await wire.step(2, wire.states(1))


@_listed
async def check_bad_session_ids(target: Target) -> None:
    """Opening: a session id is 16 bytes."""
    async with _bench(target) as bench:
        for size in (0, SESSION_ID_BYTES - 1, SESSION_ID_BYTES + 1):
            await bench.refused_opening(
                RequestError, "BAD_REQUEST", said=str(SESSION_ID_BYTES), session_id=secrets.token_bytes(size)
            )


@_listed
async def check_unknown_adapter(target: Target) -> None:
    """Opening: an adapter that isn't there is refused as BAD_ADAPTER."""
    async with _bench(target) as bench:
        await bench.refused_opening(RequestError, "BAD_ADAPTER", said="no-such-adapter", adapter="no-such-adapter")


@_listed
async def check_wrong_wire_dtype(target: Target) -> None:
    """Opening: another type of hidden states is refused as BAD_DTYPE, and the message names the right one."""
    async with _bench(target) as bench:
        for dtype in sorted({*ITEM_BYTES, "int8"} - {bench.info.dtype}):
            await bench.refused_opening(RequestError, "BAD_DTYPE", said=bench.info.dtype, wire_dtype=dtype)


@_listed
async def check_opening_limits(target: Target) -> None:
    """Opening: too many rows or tokens, or none, are refused, and the message names the limit."""
    async with _bench(target) as bench:
        rows, tokens = bench.info.limits.max_batch_size, bench.info.limits.max_session_tokens
        for asked in (-1, 0, rows + 1):
            await bench.refused_opening(RequestError, "BAD_SHAPE", said=str(rows), batch_size=asked)
        for asked in (-1, 0, tokens + 1):
            await bench.refused_opening(LengthExceededError, "LENGTH_EXCEEDED", said=str(tokens), max_tokens=asked)


@_listed
async def check_a_stream_begins_with_open(target: Target) -> None:
    """Opening: any other first message ends the stream with the client's fault."""
    async with _bench(target) as bench:
        for message in (CloseSession(), Part(0, b"1234"), Step(1, 0, 0)):
            async with bench.stream(bench.opening()) as wire:
                await wire.stream.send(message)
                await wire.over(RequestError)


@_listed
async def check_one_open_a_stream(target: Target) -> None:
    """Opening: a second `open` on one stream ends it with the client's fault."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.stream.send(bench.opening())
        await wire.over(RequestError)


# -- rule 1: step ids


@_listed
async def check_steps_in_order(target: Target) -> None:
    """Rule 1: steps 1, 2, 3 run, each appended at the position, and give their outputs."""
    async with _bench(target) as bench, bench.session() as wire:
        for num_tokens in (4, 1, 2, 1):
            await wire.step(wire.model.position, wire.states(num_tokens))


@_listed
async def check_sessions_do_not_mix(target: Target) -> None:
    """Rule 1: sessions have their own ids, positions and tokens, however their steps interleave."""
    async with _bench(target) as bench, bench.session() as first, bench.session() as second:
        for number in range(3):
            await first.step(first.model.position, first.states(2, salt=1))
            await second.step(second.model.position, second.states(1 + number, salt=2))


@_listed
async def check_only_the_next_id_runs(target: Target) -> None:
    """Rule 1: a higher id is OUT_OF_ORDER, a lower one that was never a step is STALE_STEP; neither advances."""
    async with _bench(target) as bench, bench.session() as wire:
        for step_id in (2, 3, 2**40):
            await wire.post(step_id, 0, wire.states(2))
            await wire.refusal(step_id, "OUT_OF_ORDER")
        for step_id in (0, -1):
            await wire.post(step_id, 0, wire.states(2))
            await wire.refusal(step_id, "STALE_STEP")
        await wire.step(0, wire.states(2))


@_listed
async def check_all_behind_a_refusal_is_refused(target: Target) -> None:
    """Rule 1: steps in flight behind a refused one are refused, and the stated id at the stated position runs."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(2))
        in_flight = min(3, bench.info.limits.max_in_flight_steps)
        for number in range(in_flight):
            await wire.post(2 + number, 5 + number, wire.states(1, at=5 + number))
        await wire.refusal(2, "OFFSET_GAP")
        for number in range(1, in_flight):
            await wire.refusal(2 + number, "OUT_OF_ORDER")
        await wire.step(2, wire.states(1))


@_listed
async def check_steps_in_flight(target: Target) -> None:
    """Rule 1: `max_in_flight_steps` may be sent before the first answer; answers come in their order."""
    async with _bench(target) as bench, bench.session() as wire:
        count = min(bench.info.limits.max_in_flight_steps, wire.opening.max_tokens)
        sent = [wire.states(1, at=offset) for offset in range(count)]
        for offset, hidden in enumerate(sent):
            await wire.post(1 + offset, offset, hidden)
        for offset, hidden in enumerate(sent):
            await wire.result(offset, hidden)


@_listed
async def check_too_many_in_flight(target: Target) -> None:
    """Rule 1: one more than `max_in_flight_steps` is refused QUEUE_FULL; those before it run."""
    hold = _need(target.hold_compute, "hold_compute")
    async with _bench(target) as bench, bench.session() as wire:
        count = bench.info.limits.max_in_flight_steps
        sent = [wire.states(1, at=offset) for offset in range(count + 1)]
        async with hold():
            for offset, hidden in enumerate(sent):
                await wire.post(1 + offset, offset, hidden)
            refused = await wire.refusal(1 + count, "QUEUE_FULL")
            _require(str(count) in refused.message, f"the message must name {count}: {refused.message}")
        for offset, hidden in enumerate(sent[:-1]):
            await wire.result(offset, hidden)
        await wire.step(count, sent[-1])


@_listed
async def check_a_new_opening_counts_anew(target: Target) -> None:
    """Rule 1: an `open` that is no resume begins a new incarnation, at 0 with id 1, under a held id as well."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        async with bench.session(session_id=wire.session_id) as again:
            await again.step(0, again.states(2, salt=5))


# -- rule 2: offsets


@_listed
async def check_offset_gap(target: Target) -> None:
    """Rule 2: an offset above the position is OFFSET_GAP; a hole is never computed over."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.post(1, 1, wire.states(1, at=1))
        await wire.refusal(1, "OFFSET_GAP")
        await wire.step(0, wire.states(2))
        for offset in (3, wire.opening.max_tokens - 1):
            await wire.post(2, offset, wire.states(1, at=offset))
            await wire.refusal(2, "OFFSET_GAP")
        await wire.post(2, 3, None)
        await wire.refusal(2, "OFFSET_GAP")
        await wire.step(2, wire.states(1))


@_listed
async def check_rollback(target: Target) -> None:
    """Rule 2: an offset below the position truncates to it, then appends; 0 begins again."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(5))
        await wire.step(5, wire.states(1))
        await wire.step(3, wire.states(2, at=3, salt=1))
        await wire.step(5, wire.states(1, salt=2))
        await wire.step(0, wire.states(3, at=0, salt=3))
        await wire.step(3, wire.states(1, salt=4))


@_listed
async def check_truncation_only(target: Target) -> None:
    """Rule 2: a step of zero tokens only truncates."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(5))
        await wire.step(2, None)
        await wire.step(2, wire.states(1, salt=1))
        await wire.step(3, None)
        await wire.step(0, None)
        await wire.step(0, wire.states(1, salt=2))


@_listed
async def check_wanted_outputs(target: Target) -> None:
    """The result holds the outputs that were wanted: all, the last m, or none; the tokens are held anyway."""
    async with _bench(target) as bench, bench.session() as wire:
        for num_outputs in (None, 0, 1, 2, 3):
            await wire.step(wire.model.position, wire.states(3), num_outputs=num_outputs)
        for num_outputs in (-1, 4):
            await wire.post(6, 15, wire.states(3), num_outputs=num_outputs)
            await wire.refusal(6, "BAD_REQUEST")
        await wire.step(15, wire.states(1))


# -- rule 3: the same id again


@_listed
async def check_same_id_again(target: Target) -> None:
    """Rule 3: the same id again gets the same reply, without computing, and nothing is appended twice."""
    async with _bench(target) as bench, bench.session() as wire:
        first = await wire.step(0, wire.states(3))
        second = await wire.step(3, wire.states(1))
        computed = target.num_computed() if target.num_computed else 0
        for step_id, offset, reply in ((2, 3, second), (1, 0, first), (2, 3, second)):
            await wire.post(step_id, offset, wire.states(1, at=offset, salt=9))
            _equal(await wire.answer(), reply, "the reply to an id that was run before")
        if target.num_computed:
            _equal(target.num_computed(), computed, "steps computed after the same ids again")
        await wire.step(4, wire.states(1))


@_listed
async def check_stale_step(target: Target) -> None:
    """Rule 3: the last `max_in_flight_steps` replies are kept; an older id is STALE_STEP."""
    async with _bench(target) as bench, bench.session() as wire:
        kept = bench.info.limits.max_in_flight_steps
        if kept + 2 > wire.opening.max_tokens:
            raise NotOfferedError("sessions are too short for so many steps")
        replies = [await wire.step(offset, wire.states(1)) for offset in range(kept + 2)]
        for step_id in (1, 2):
            await wire.post(step_id, step_id - 1, wire.states(1, at=step_id - 1))
            await wire.refusal(step_id, "STALE_STEP")
        for step_id in (3, kept + 2):
            await wire.post(step_id, step_id - 1, wire.states(1, at=step_id - 1))
            _equal(await wire.answer(), replies[step_id - 1], "a reply that is still kept")


@_listed
async def check_kept_reply_after_a_resume(target: Target) -> None:
    """Rule 3: after a resume the kept replies are still there: a lost reply is had without computing."""
    async with _bench(target) as bench:
        async with bench.session() as wire:
            reply = await wire.step(0, wire.states(3))
        computed = target.num_computed() if target.num_computed else 0
        async with bench.resumed(wire) as again:
            await again.post(1, 0, again.states(3, at=0))
            _equal(await again.answer(), reply, "the kept reply after a resume")
            if target.num_computed:
                _equal(target.num_computed(), computed, "steps computed after the same id again")
            await again.step(3, again.states(1))


# -- rule 4: row permutations


@_listed
async def check_row_permutations(target: Target) -> None:
    """Rule 4: `row_indices` names for each row the one it goes on from, before the append."""
    async with _bench(target) as bench, bench.session(batch_size=_two_rows(bench)) as wire:
        await wire.step(0, wire.states(3))
        for rows in ((1, 0), (1, 1), (0, 1), (0, 0)):
            await wire.step(wire.model.position, wire.states(1), rows=rows)
        await wire.step(wire.model.position, wire.states(1))


async def _old_order_wanted(wire: _Wire, token_offset: int, before: _Model) -> None:
    """Post a step at or before the last permutation: refused with position 0, or run on the old order."""
    hidden = wire.states(1, at=token_offset, salt=8)
    await wire.post(wire.model.next_step_id, token_offset, hidden)
    answer = await wire.answer()
    if isinstance(answer, Refused):
        stated = (answer.reason, answer.position, answer.next_step_id)
        _equal(stated, ("ROWS_CHANGED", 0, wire.model.next_step_id), "reason, position and next id")
        wire.model.truncate(0)
        return
    before.run(token_offset, hidden, ())
    expected = await wire.bench.expected(before.chunks, wire.opening)
    outputs = outputs_of(answer)
    _require(outputs is not None and wire.bench.target.same(outputs, expected), "the old order was not restored")
    wire.model.run(token_offset, hidden, ())
    wire.model.chunks = before.chunks


@_listed
async def check_rows_changed(target: Target) -> None:
    """Rule 4: a step at or before the last permutation is ROWS_CHANGED with position 0; above it all is well."""
    async with _bench(target) as bench:
        for offset in (3, 2):
            async with bench.session(batch_size=_two_rows(bench)) as wire:
                await wire.step(0, wire.states(3))
                before = wire.model.copy()
                await wire.step(3, wire.states(2), rows=(1, 0))
                await wire.step(5, wire.states(1))
                await wire.step(4, wire.states(2, at=4, salt=1))
                await _old_order_wanted(wire, offset, before)
                await wire.step(0, wire.states(4, at=0, salt=2))
                await wire.step(2, wire.states(1, at=2, salt=3))


@_listed
async def check_position_0_needs_no_old_rows(target: Target) -> None:
    """Rule 4: a step at offset 0 after a permutation runs: a replay sends rows already gathered."""
    async with _bench(target) as bench, bench.session(batch_size=_two_rows(bench)) as wire:
        await wire.step(0, wire.states(3))
        await wire.step(3, wire.states(1), rows=(1, 1))
        gathered = HiddenStates.concat_tokens(wire.model.chunks)
        await wire.step(0, gathered)
        await wire.step(2, wire.states(1, at=2, salt=1))


# -- rule 5: closing


@_listed
async def check_close_frees_at_once(target: Target) -> None:
    """Rule 5: `close` frees the session, ends the stream, and leaves nothing to resume."""
    async with _bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(2))
            await wire.goodbye()
            _require(await bench.find(wire.session_id) is None, "a closed session is still listed")
        wire.model = _Model()
        async with bench.resumed(wire) as again:
            await again.step(0, again.states(1))


@_listed
async def check_lease_keeps_the_session(target: Target) -> None:
    """Rule 5: a stream that ends without `close` keeps the KV, to be taken up by a resume."""
    async with _bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(3))
        await bench.until_left(wire.session_id)
        async with bench.resumed(wire) as again:
            await again.step(3, again.states(1))
            found = await bench.find(wire.session_id)
            _require(found is not None and found.connected, "a resumed session is connected")


@_listed
async def check_lease_runs_out(target: Target) -> None:
    """Rule 5: when the lease is over the session is freed; a resume in time ends it."""
    advance = _need(target.advance, "advance")
    async with _bench(target) as bench:
        async with bench.stream(bench.opening()) as wire:
            lease_s = (await wire.open()).lease_s
            await wire.step(0, wire.states(3))
        await bench.until_left(wire.session_id)
        await advance(0.6 * lease_s)
        async with bench.resumed(wire) as again:
            await again.step(3, again.states(1))
            await advance(1.2 * lease_s)
            await again.step(4, again.states(1))
        await bench.until_left(wire.session_id)
        await advance(0.6 * lease_s)
        _require(await bench.find(wire.session_id) is not None, "a resume must begin a new lease")
        await advance(0.6 * lease_s)
        await bench.until_gone(wire.session_id, "the lease is over")


@_listed
async def check_session_without_a_step_is_freed(target: Target) -> None:
    """Rule 5: a session that never completed a step is freed as soon as its stream ends."""
    async with _bench(target) as bench:
        async with bench.session() as silent:
            pass
        async with bench.session() as refused:
            await refused.post(1, 3, refused.states(1))
            await refused.refusal(1, "OFFSET_GAP")
        for wire in (silent, refused):
            await bench.until_gone(wire.session_id, "it never completed a step")


@_listed
async def check_close_session(target: Target) -> None:
    """Rule 5: CloseSession frees by id, with or without a stream; an unknown id is no error."""
    async with _bench(target) as bench:
        await bench.channel.close_session(secrets.token_bytes(SESSION_ID_BYTES))
        async with bench.session() as wire:
            await wire.step(0, wire.states(2))
            await bench.channel.close_session(wire.session_id)
            _require(await bench.find(wire.session_id) is None, "CloseSession must free the session")
            await wire.over(PeerError)
        async with bench.session() as wire:
            await wire.step(0, wire.states(2))
        await bench.until_left(wire.session_id)
        await bench.channel.close_session(wire.session_id)
        _require(await bench.find(wire.session_id) is None, "CloseSession must free the session")
        await bench.channel.close_session(wire.session_id)


# -- rule 6: cancelling at the client, as the server sees it


@_listed
async def check_stream_lost_while_computing(target: Target) -> None:
    """Rule 6: a step that was running when the stream was lost ends; its reply is kept for the resume."""
    hold = _need(target.hold_compute, "hold_compute")
    async with _bench(target) as bench, AsyncExitStack() as held:
        async with bench.session() as wire:
            first, second = wire.states(2), wire.states(1, at=2)
            await wire.step(0, first)
            await held.enter_async_context(hold())
            await wire.post(2, 2, second)
            await _progress_until(wire, 2, StepState.RUNNING)
        await held.aclose()
        wire.model.run(2, second, ())
        async with bench.resumed(wire) as again:
            again.model.chunks.pop()
            again.model.next_step_id = 2
            await again.step(2, second)
            await again.step(3, again.states(1))


# -- rule 7: resume


@_listed
async def check_resume_supersedes(target: Target) -> None:
    """Rule 7: a resume ends the old stream as SUPERSEDED, and states position and next id."""
    async with _bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(3))
        async with bench.resumed(old) as again:
            error = await old.over(PeerError)
            _equal(error.reason, "SUPERSEDED", "how the old stream ends")
            await again.step(3, again.states(1))
            async with bench.resumed(again) as third:
                await third.step(4, third.states(1))


@_listed
async def check_resume_before_any_step(target: Target) -> None:
    """Rule 7: a session without a step is taken up as well, while its stream is there."""
    async with _bench(target) as bench, bench.session() as old, bench.resumed(old) as again:
        _equal((await old.over(PeerError)).reason, "SUPERSEDED", "how the old stream ends")
        await again.step(0, again.states(1))
        found = await bench.find(again.session_id)
        _require(found is not None and found.connected and found.position == 1, f"it is listed as {found}")


@_listed
async def check_resume_waits_for_the_running_step(target: Target) -> None:
    """Rule 7: a running step finishes, then `opened` states what is held; steps queued behind it are dropped."""
    hold = _need(target.hold_compute, "hold_compute")
    async with _bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(2))
        second = old.states(1, at=2)
        resume = replace(old.opening, resume=True)
        async with AsyncExitStack() as held, bench.stream(resume, old.model.copy()) as again:
            await held.enter_async_context(hold())
            await old.post(2, 2, second)
            await old.post(3, 3, old.states(1, at=3))
            await _progress_until(old, 2, StepState.RUNNING)
            await again.stream.send(resume)
            await _until_superseded(old)
            await held.aclose()
            opened = await again.receive()
            if not isinstance(opened, Opened):
                raise ConformanceError(f"`open` must be answered with `opened`, got {opened}")
            _equal((opened.position, opened.next_step_id), (3, 3), "position and next id after the running step")
            again.model.run(2, second, ())
            await again.step(3, again.states(1, salt=3))


async def _until_superseded(old: _Wire) -> None:
    """Give a resume time to arrive, while the running step is held: the listing shows that it has."""
    with anyio.move_on_after(0.5):
        while (found := await old.bench.find(old.session_id)) is not None and found.connected:  # noqa: ASYNC110
            await anyio.sleep(POLL_S)


@_listed
async def check_two_resumes_at_once(target: Target) -> None:
    """Rule 7: of two streams that resume one session at the same time one is superseded by the other."""
    async with _bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(2))
        resume = replace(old.opening, resume=True)
        async with bench.stream(resume) as one, bench.stream(resume) as other:
            await one.stream.send(resume)
            await other.stream.send(resume)
            reasons = await _first_to_end(one, other)
            _equal(reasons, ["SUPERSEDED"], "how one of the two streams ends")
        async with bench.resumed(old) as again:
            await again.step(2, again.states(1))


async def _first_to_end(*wires: _Wire) -> list[str]:
    """Read several streams until one is over; returns the reasons of those that are. The others are lost by it."""
    reasons: list[str] = []
    over = anyio.Event()

    async def read(wire: _Wire) -> None:
        reasons.append((await wire.over(PeerError)).reason)
        over.set()

    with anyio.move_on_after(LIMIT_S / 2):
        async with anyio.create_task_group() as tasks:
            for wire in wires:
                tasks.start_soon(read, wire)
            await over.wait()
            tasks.cancel_scope.cancel()
    return reasons


@_listed
async def check_resume_of_an_unknown_session(target: Target) -> None:
    """Rule 7: a resume of a session that isn't held opens a new one at 0."""
    async with _bench(target) as bench, bench.session(resume=True) as wire:
        await wire.step(0, wire.states(2))


@_listed
async def check_resume_cannot_change_the_session(target: Target) -> None:
    """Rule 7: a resume for another size is the client's fault, and leaves the old stream alone."""
    async with _bench(target) as bench, bench.session() as old:
        await old.step(0, old.states(2))
        async with bench.stream(replace(old.opening, resume=True, max_tokens=old.opening.max_tokens - 1)) as wire:
            await wire.stream.send(wire.opening)
            await wire.over(RequestError)
        await old.step(2, old.states(1))


# -- rule 8: eviction


@_listed
async def check_evicted(target: Target) -> None:
    """Rule 8: an evicted session's next step is EVICTED with position 0, under the same id; a replay mends it."""
    evict = _need(target.evict, "evict")
    async with _bench(target) as bench, bench.session() as wire:
        first = wire.states(3)
        await wire.step(0, first)
        await wire.step(3, wire.states(1))
        _require(await evict(wire.session_id), "a session without a step in flight can be evicted")
        found = await bench.find(wire.session_id)
        _require(found is not None and (found.position, found.kv_bytes) == (0, 0), f"it is listed as {found}")
        wire.model.truncate(0)
        await wire.post(3, 4, wire.states(1, at=4))
        await wire.refusal(3, "EVICTED")
        await wire.step(0, first)
        await wire.step(3, wire.states(1, salt=1))


@_listed
async def check_resume_after_eviction(target: Target) -> None:
    """Rule 8: a resume of an evicted session opens at 0, with the next id as it was."""
    evict = _need(target.evict, "evict")
    async with _bench(target) as bench:
        async with bench.session() as wire:
            await wire.step(0, wire.states(3))
        await bench.until_left(wire.session_id)
        _require(await evict(wire.session_id), "a session without a stream can be evicted")
        wire.model.truncate(0)
        async with bench.resumed(wire) as again:
            await again.step(0, again.states(2, salt=1))


@_listed
async def check_no_eviction_under_a_step(target: Target) -> None:
    """Rule 8: the pages of a session with an accepted, unanswered step are never taken."""
    evict, hold = _need(target.evict, "evict"), _need(target.hold_compute, "hold_compute")
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(3))
        hidden = wire.states(1)
        async with hold():
            await wire.post(2, 3, hidden)
            await _progress_until(wire, 2, StepState.RUNNING)
            _require(not await evict(wire.session_id), "a session with a step in flight must not be evicted")
        await wire.result(3, hidden)


def _more_than_half(bench: _Bench) -> tuple[int, int]:
    """Return rows and tokens of a session such that two don't fit into the KV memory."""
    info, limits = bench.info, bench.info.limits
    wanted = info.kv_capacity_tokens // 2 + 1
    tokens = min(wanted, limits.max_session_tokens)
    rows = math.ceil(wanted / tokens) if wanted > 1 else 0
    if not 0 < rows <= limits.max_batch_size or rows * tokens > info.kv_capacity_tokens:
        raise NotOfferedError(f"no session can take more than half of {info.kv_capacity_tokens} KV tokens")
    return rows, tokens


@_listed
async def check_kv_exhausted(target: Target) -> None:
    """Rule 8: an opening that would need the pages under a step is KV_EXHAUSTED, and says when to try again."""
    hold = _need(target.hold_compute, "hold_compute")
    async with _bench(target) as bench:
        rows, tokens = _more_than_half(bench)
        async with bench.session(batch_size=rows, max_tokens=tokens) as wire:
            hidden = wire.states(1)
            async with hold():
                await wire.post(1, 0, hidden)
                await _progress_until(wire, 1, StepState.RUNNING)
                error = await bench.refused_opening(
                    ServerOverloadedError, "KV_EXHAUSTED", batch_size=rows, max_tokens=tokens
                )
                _require(error.retry_after_s > 0, "KV_EXHAUSTED must say when to try again")
            await wire.result(0, hidden)
            await wire.step(1, wire.states(1))


@_listed
async def check_orphans_are_evicted_first(target: Target) -> None:
    """Rules 5 and 8: a session without a stream is first in line: a new one gets its memory at once."""
    async with _bench(target) as bench:
        rows, tokens = _more_than_half(bench)
        async with bench.session(batch_size=rows, max_tokens=tokens) as wire:
            await wire.step(0, wire.states(2))
        await bench.until_left(wire.session_id)
        async with bench.session(batch_size=rows, max_tokens=tokens) as other:
            await other.step(0, other.states(1))
            await other.goodbye()
        wire.model.truncate(0)
        async with bench.resumed(wire) as again:
            await again.step(0, again.states(2, salt=1))


# -- rule 9: fork


@_listed
async def check_fork(target: Target) -> None:
    """Rule 9: a fork begins with the source's first tokens; what either does later doesn't touch the other."""
    async with _bench(target) as bench, bench.session() as source:
        await source.step(0, source.states(4))
        await source.step(4, source.states(1))
        for asked, shared in ((3, 3), (5, 5), (9, 5), (0, 0)):
            opening = bench.opening(fork=ForkSource(source.session_id, asked))
            async with bench.stream(opening, _Model(list(source.model.chunks))) as fork:
                fork.model.truncate(shared)
                opened = await fork.open()
                _equal((opened.position, opened.next_step_id), (shared, 1), f"a fork at {asked} of 5 tokens")
                await fork.step(shared, fork.states(1, salt=3))
                await source.step(5, source.states(1, at=5, salt=asked))
                await source.step(5, None)
                await fork.step(shared + 1, fork.states(2, salt=4))
                await fork.step(max(shared - 1, 0), fork.states(1, at=max(shared - 1, 0), salt=5))
        await source.step(5, source.states(1))


@_listed
async def check_fork_outlives_its_source(target: Target) -> None:
    """Rule 9: closing or truncating the source takes nothing from the fork."""
    async with _bench(target) as bench, bench.session() as source:
        await source.step(0, source.states(4))
        opening = bench.opening(fork=ForkSource(source.session_id, 4))
        async with bench.stream(opening, _Model(list(source.model.chunks))) as fork:
            await fork.open()
            await source.step(1, source.states(2, at=1, salt=6))
            await fork.step(4, fork.states(1))
            await source.goodbye()
            await fork.step(5, fork.states(1))


@_listed
async def check_fork_without_a_source(target: Target) -> None:
    """Rule 9: a source that isn't held, or holds other rows, opens at 0, which is no error."""
    async with _bench(target) as bench:
        async with bench.session(fork=ForkSource(secrets.token_bytes(SESSION_ID_BYTES), 4)) as wire:
            await wire.step(0, wire.states(2))
        async with bench.session() as source:
            await source.step(0, source.states(3))
            fork = ForkSource(source.session_id, 3)
            async with bench.session(fork=fork, batch_size=_two_rows(bench)) as wire:
                await wire.step(0, wire.states(2))


@_listed
async def check_fork_of_permuted_rows(target: Target) -> None:
    """Rules 4 and 9: a fork above a permutation has it; one at or below can't have the old order, and begins at 0."""
    async with _bench(target) as bench, bench.session(batch_size=_two_rows(bench)) as source:
        await source.step(0, source.states(3))
        before = source.model.copy()
        await source.step(3, source.states(2), rows=(1, 1))
        for asked in (5, 4):
            opening = bench.opening(fork=ForkSource(source.session_id, asked), batch_size=2)
            async with bench.stream(opening, _Model(list(source.model.chunks))) as fork:
                fork.model.truncate(asked)
                _equal((await fork.open()).position, asked, "a fork above the permutation")
                await fork.step(asked, fork.states(1, salt=1))
                await _old_order_wanted(fork, 3, before.copy())
        opening = bench.opening(fork=ForkSource(source.session_id, 3), batch_size=2)
        async with bench.stream(opening, before.copy()) as fork:
            opened = await fork.open()
            _require(opened.position in (0, 3), f"a fork at the permutation begins at 0 or 3, got {opened.position}")
            fork.model = _Model(list(before.chunks))
            fork.model.truncate(opened.position)
            await fork.step(opened.position, fork.states(1, salt=1))


# -- rule 10: signs of life


async def _progress_until(wire: _Wire, step_id: int, *states: StepState) -> Progress:
    """Read signs of life until one of a step shows one of these states; no answer may come before."""
    while True:
        message = await wire.receive()
        if not isinstance(message, Progress):
            raise ConformanceError(f"signs of life of step {step_id} must come, got {message}")
        wire.progress.append(message)
        if message.step_id == step_id and message.state in states:
            return message


@_listed
async def check_progress_while_computing(target: Target) -> None:
    """Rule 10: each step without an answer gives a sign of life every interval: RUNNING, and QUEUED behind it."""
    hold = _need(target.hold_compute, "hold_compute")
    async with _bench(target) as bench, bench.stream(bench.opening()) as wire:
        interval_s = (await wire.open()).progress_interval_s
        first, second = wire.states(1), wire.states(1, at=1)
        async with hold():
            await wire.post(1, 0, first)
            await wire.post(2, 1, second)
            await _progress_until(wire, 1, StepState.RUNNING)
            await _progress_until(wire, 2, StepState.QUEUED)
            for _ in range(2):
                with anyio.fail_after(3 * interval_s):
                    await _progress_until(wire, 1, StepState.RUNNING)
        await wire.result(0, first)
        await wire.result(1, second)
        _require({sign.step_id for sign in wire.progress} == {1, 2}, f"signs of other steps: {wire.progress}")


@_listed
async def check_progress_while_receiving(target: Target) -> None:
    """Rule 10: a step whose parts are still arriving is RECEIVING, and says how many tokens are there."""
    async with _bench(target) as bench, bench.session() as wire:
        hidden = wire.states(4)
        half = hidden.num_bytes // 2
        await wire.post(1, 0, hidden, parts=[Part(0, hidden.data[:half])])
        sign = await _progress_until(wire, 1, StepState.RECEIVING)
        while sign.tokens_done < 2:
            sign = await _progress_until(wire, 1, StepState.RECEIVING)
        _equal(sign.tokens_done, 2, "tokens received of 4, after half of the bytes")
        await wire.stream.send(Part(half, hidden.data[half:]))
        await wire.result(0, hidden)


# -- rule 11: steps that fail in computing


@_listed
async def check_compute_failed(target: Target) -> None:
    """Rule 11: a step that fails in computing is COMPUTE_FAILED with the position as before, and may be sent again."""
    fail = _need(target.fail_next_compute, "fail_next_compute")
    async with _bench(target) as bench, bench.session() as wire:
        fail()
        await wire.post(1, 0, wire.states(2))
        await wire.refusal(1, "COMPUTE_FAILED")
        await wire.step(0, wire.states(3))
        for offset in (3, 1):
            fail()
            await wire.post(2, offset, wire.states(2, at=offset, salt=1))
            await wire.refusal(2, "COMPUTE_FAILED")
        await wire.step(3, wire.states(1))


@_listed
async def check_compute_failed_with_rows(target: Target) -> None:
    """Rule 11: a permutation of a step that failed is put back as well."""
    fail = _need(target.fail_next_compute, "fail_next_compute")
    async with _bench(target) as bench, bench.session(batch_size=_two_rows(bench)) as wire:
        await wire.step(0, wire.states(3))
        fail()
        await wire.post(2, 2, wire.states(1, at=2), rows=(1, 1))
        await wire.refusal(2, "COMPUTE_FAILED")
        await wire.step(3, wire.states(1))
        await wire.step(2, wire.states(1, at=2, salt=1))


@_listed
async def check_all_behind_a_failed_step_is_refused(target: Target) -> None:
    """Rules 1 and 11: what was in flight behind a failed step is OUT_OF_ORDER."""
    fail = _need(target.fail_next_compute, "fail_next_compute")
    async with _bench(target) as bench, bench.session() as wire:
        fail()
        await wire.post(1, 0, wire.states(1))
        await wire.post(2, 1, wire.states(1, at=1))
        await wire.refusal(1, "COMPUTE_FAILED")
        await wire.refusal(2, "OUT_OF_ORDER")
        await wire.step(0, wire.states(1))


@_listed
async def check_not_a_number(target: Target) -> None:
    """Rule 11: inputs that aren't finite are refused, and nothing of them stays in the cache."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(2))
        sound = wire.states(1)
        size = ITEM_BYTES[sound.dtype]
        for number in (math.nan, math.inf, -math.inf):
            data = sound.data[:-size] + pack(sound.dtype, [number])
            await wire.post(2, 2, HiddenStates(sound.dtype, sound.shape, data))
            await wire.refusal(2, "NON_FINITE", "NON_FINITE_INPUT", "COMPUTE_FAILED")
        await wire.step(2, sound)


# -- what is checked of a step


async def _refused_step(wire: _Wire, step: Step, *reasons: str, said: str = "") -> None:
    await wire.stream.send(step)
    refused = await wire.refusal(step.step_id, *reasons)
    _require(said in refused.message, f"the message must name {said!r}: {refused.message}")


@_listed
async def check_wrong_shapes(target: Target) -> None:
    """A tensor of another shape is BAD_SHAPE, before any part of it is waited for."""
    async with _bench(target) as bench, bench.session() as wire:
        width, dtype = bench.info.hidden_size, bench.info.dtype
        await wire.step(0, wire.states(2))
        for shape in (
            (1, 2, width + 1),
            (1, 2, width - 1),
            (2, 2, width),
            (1, 3, width),
            (1, 1, width),
            (2, width),
            (1, 1, 2, width),
            (),
            (-1, -2, width),
            (1, 2**31, width),
        ):
            spec = TensorSpec(dtype, shape)
            await _refused_step(wire, Step(2, 2, 2, spec, None), "BAD_SHAPE", said=str((1, 2, width)))
            await _refused_step(wire, Step(2, 2, 2, spec, b"\0" * 8), "BAD_SHAPE", said=str((1, 2, width)))
        await wire.step(2, wire.states(2))


@_listed
async def check_missing_tensor(target: Target) -> None:
    """Tokens without a tensor, and a tensor without tokens, are BAD_SHAPE."""
    async with _bench(target) as bench, bench.session() as wire:
        width, dtype = bench.info.hidden_size, bench.info.dtype
        await _refused_step(wire, Step(1, 0, 2), "BAD_SHAPE")
        await _refused_step(wire, Step(1, 0, 0, TensorSpec(dtype, (1, 0, width)), b""), "BAD_SHAPE")
        await _refused_step(wire, Step(1, 0, 0, TensorSpec(dtype, (1, 1, width)), None), "BAD_SHAPE")
        await wire.step(0, wire.states(1))


@_listed
async def check_wrong_dtypes(target: Target) -> None:
    """A tensor of another type is BAD_DTYPE, and the message names the right one."""
    async with _bench(target) as bench, bench.session() as wire:
        for dtype in sorted({*ITEM_BYTES, "int8"} - {bench.info.dtype}):
            spec = TensorSpec(dtype, (1, 1, bench.info.hidden_size))
            await _refused_step(wire, Step(1, 0, 1, spec, b"\0\0\0\0"), "BAD_DTYPE", said=bench.info.dtype)
        await wire.step(0, wire.states(1))


@_listed
async def check_wrong_byte_length(target: Target) -> None:
    """Bytes that don't fit type and shape are BAD_SHAPE, and the message says how many were expected."""
    async with _bench(target) as bench, bench.session() as wire:
        sound = wire.states(2)
        for data in (b"", sound.data[:-1], sound.data + b"\0", sound.data * 2):
            step = Step(1, 0, 2, sound.spec, data)
            await _refused_step(wire, step, "BAD_SHAPE", said=str(sound.num_bytes))
        await wire.step(0, sound)


@_listed
async def check_bad_rows(target: Target) -> None:
    """`row_indices` of another number, or that name no row, are BAD_ROWS."""
    async with _bench(target) as bench, bench.session(batch_size=_two_rows(bench)) as wire:
        await wire.step(0, wire.states(2))
        hidden = wire.states(1)
        for rows in ((0,), (0, 1, 0), (0, 2), (-1, 0)):
            await wire.post(2, 2, hidden, rows=rows)
            await wire.refusal(2, "BAD_ROWS")
        await wire.step(2, hidden)


@_listed
async def check_too_many_tokens(target: Target) -> None:
    """A step beyond the step's or the session's limit is LENGTH_EXCEEDED, and the message names the limit."""
    async with _bench(target) as bench, bench.session() as wire:
        limit, tokens = bench.info.limits.max_step_tokens, wire.opening.max_tokens
        spec = TensorSpec(bench.info.dtype, (1, limit + 1, bench.info.hidden_size))
        await _refused_step(wire, Step(1, 0, limit + 1, spec, None), "LENGTH_EXCEEDED", said=str(limit))
        filled = min(limit, tokens)
        while wire.model.position + filled <= tokens:
            await wire.step(wire.model.position, wire.states(filled), num_outputs=1)
        left = tokens - wire.model.position
        await wire.post(wire.model.next_step_id, wire.model.position, wire.states(left + 1))
        refused = await wire.refusal(wire.model.next_step_id, "LENGTH_EXCEEDED")
        _require(str(tokens) in refused.message, f"the message must name {tokens}: {refused.message}")
        if left:
            await wire.step(wire.model.position, wire.states(left))
        await wire.step(tokens - 1, wire.states(1, at=tokens - 1, salt=1))


@_listed
async def check_negative_numbers(target: Target) -> None:
    """A negative offset or number of tokens is BAD_REQUEST."""
    async with _bench(target) as bench, bench.session() as wire:
        sound = wire.states(1)
        await wire.step(0, sound)
        await _refused_step(wire, Step(2, -1, 1, sound.spec, sound.data), "BAD_REQUEST")
        await _refused_step(wire, Step(2, 0, -1), "BAD_REQUEST")
        await _refused_step(wire, Step(2, -5, 0), "BAD_REQUEST")
        await wire.step(1, wire.states(1))


# -- parts


@_listed
async def check_small_tensor_in_parts(target: Target) -> None:
    """A tensor without its bytes comes in parts of any size, `close` and nothing else between them."""
    async with _bench(target) as bench:
        async with bench.session() as wire:
            hidden = wire.states(3)
            pieces = [Part(start, hidden.data[start : start + 7]) for start in range(0, hidden.num_bytes, 7)]
            await wire.step(0, hidden, parts=pieces)
            await wire.step(3, wire.states(1))
            await wire.post(3, 4, wire.states(2), parts=[Part(0, b"\0")])
            await wire.goodbye()
        _require(await bench.find(wire.session_id) is None, "`close` between parts must free the session")


@_listed
async def check_large_tensors(target: Target) -> None:
    """Tensors above 256 KiB travel in parts, both ways, whole."""
    async with _bench(target) as bench:
        limits = bench.info.limits
        per_token = bench.info.hidden_size * ITEM_BYTES[bench.info.dtype]
        tokens = min(limits.max_step_tokens, limits.max_session_tokens, math.ceil((MAX_INLINE_BYTES + 1) / per_token))
        rows = math.ceil((MAX_INLINE_BYTES + 1) / (per_token * tokens))
        if rows > limits.max_batch_size:
            raise NotOfferedError(f"no step of this server is larger than {MAX_INLINE_BYTES} bytes")
        async with bench.session(batch_size=rows, max_tokens=tokens) as wire:
            hidden = wire.states(tokens)
            _require(not travels_inline(hidden.num_bytes), "the tensor is too small for this check")
            await wire.step(0, hidden)
            await wire.step(tokens - 1, wire.states(1, at=tokens - 1, salt=1))


@_listed
async def check_parts_out_of_order(target: Target) -> None:
    """A part that doesn't follow, or is empty or too long, makes its step BAD_PART; the stream lives on."""
    async with _bench(target) as bench, bench.session() as wire:
        hidden = wire.states(2)
        data, size = hidden.data, hidden.num_bytes
        for parts in (
            [Part(1, data[1:])],
            [Part(-1, data)],
            [Part(0, data[:4]), Part(8, data[8:])],
            [Part(0, data[:4]), Part(0, data[:4])],
            [Part(0, data[:8]), Part(4, data[4:])],
            [Part(0, data[:4]), Part(4, b"")],
            [Part(0, data + b"\0")],
            [Part(0, data[:4]), Part(4, data)],
            [Part(size, data)],
        ):
            await wire.post(1, 0, hidden, parts=parts)
            await wire.refusal(1, "BAD_PART")
        await wire.step(0, hidden)


@_listed
async def check_parts_behind_a_refusal(target: Target) -> None:
    """Parts that were in flight when their step was refused are dropped, and disturb no other step."""
    async with _bench(target) as bench, bench.session() as wire:
        hidden = wire.states(2)
        pieces = [Part(start, hidden.data[start : start + 4]) for start in range(0, hidden.num_bytes, 4)]
        await wire.post(1, 0, hidden, parts=[Part(4, b"\0"), *pieces])
        await wire.refusal(1, "BAD_PART")
        await wire.post(5, 0, hidden, parts=pieces)
        await wire.refusal(5, "OUT_OF_ORDER")
        wide = TensorSpec(hidden.dtype, (1, 2, bench.info.hidden_size + 1))
        await wire.stream.send(Step(1, 0, 2, wide, None))
        for piece in pieces:
            await wire.stream.send(piece)
        await wire.refusal(1, "BAD_SHAPE")
        await wire.step(0, hidden, parts=pieces)
        await wire.step(2, wire.states(1))


@_listed
async def check_step_before_the_last_part(target: Target) -> None:
    """A step that comes before the last part of the one before makes that one BAD_PART, and is OUT_OF_ORDER."""
    async with _bench(target) as bench, bench.session() as wire:
        hidden = wire.states(2)
        await wire.post(1, 0, hidden, parts=[Part(0, hidden.data[:4])])
        await wire.post(2, 2, wire.states(1, at=2))
        await wire.refusal(1, "BAD_PART")
        await wire.refusal(2, "OUT_OF_ORDER")
        await wire.step(0, hidden)


@_listed
async def check_part_before_any_step(target: Target) -> None:
    """A part before any step ends the stream with BAD_PART."""
    async with _bench(target) as bench, bench.session() as wire:
        await wire.stream.send(Part(0, b"\0\0\0\0"))
        _equal((await wire.over(RequestError)).reason, "BAD_PART", "how the stream ends")


# -- draining


@_listed
async def check_draining(target: Target) -> None:
    """A draining server says so on every stream, goes on with sessions it has, and takes no new ones."""
    start_draining = _need(target.start_draining, "start_draining")
    async with _bench(target) as bench, bench.session() as wire:
        await wire.step(0, wire.states(2))
        await start_draining(30.0)
        message = await wire.receive()
        _require(isinstance(message, Draining) and message.deadline_s > 0, f"`draining` must come, got {message}")
        _equal((await bench.channel.get_server_info()).state, ServerState.DRAINING, "the state")
        await bench.refused_opening(ServerDrainingError, "DRAINING")
        await bench.refused_opening(ServerDrainingError, "DRAINING", resume=True)
        await wire.step(2, wire.states(1))
        async with bench.resumed(wire) as again:
            await again.step(3, again.states(1))
