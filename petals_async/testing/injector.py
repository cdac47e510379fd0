"""Carries out a fault plan: watches the messages at each server's end, and strikes at the planned moments."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary

import anyio

from petals_async.abc import BackendStep
from petals_async.core.messages import (
    ClientMessage,
    OpenSession,
    Refused,
    Result,
    ServerMessage,
    Step,
)
from petals_async.core.span import Span
from petals_async.testing.faults import Fault, FaultKind, FaultPlan, Moment
from petals_async.testing.memory_stream import MemoryServerStream


class Target(Protocol):
    """What faults are done to: the swarm."""

    def kill(self, name: str) -> None:
        """Let a node die."""

    def restart(self, name: str, after_s: float = 0.0) -> None:
        """Let it die and come back."""

    def pause(self, name: str) -> None:
        """Stop it."""

    def resume(self, name: str) -> None:
        """Let it go on."""

    def black_hole(self, name: str) -> None:
        """Cut it off."""

    def reconnect(self, name: str) -> None:
        """End that."""

    def evict_session(self, name: str, session_id: bytes) -> bool:
        """Drop a session's KV."""

    def note(self, what: str) -> None:
        """Write a line into the trace."""

    def later(self, seconds: float, name: str, kind: FaultKind) -> None:
        """Do something after some time."""


class FaultInjector:
    """Strikes when a plan says so.

    Args:
        plan: What is to come.
        target: To whom.

    Attributes:
        fired: The faults that came true, in that order.
    """

    def __init__(self, plan: FaultPlan, target: Target) -> None:
        self._target = target
        self._left = list(plan.faults)
        self._reached: dict[str, dict[int, int]] = {}
        self.fired: list[Fault] = []

    def tap(self, node: str) -> NodeTap:
        """Return what watches one node in one life."""
        return NodeTap(self, self._target, node)

    @property
    def left(self) -> list[Fault]:
        """The faults that have not come true yet."""
        return list(self._left)

    def due(self, node: str, moment: Moment, tokens: range | None) -> Iterable[Fault]:
        """Take out and yield the faults of a moment."""
        for fault in list(self._left):
            if fault.node == node and fault.moment is moment and (tokens is None or fault.token in tokens):
                self._left.remove(fault)
                self.fired.append(fault)
                self._target.note(f"fault {fault}")
                yield fault

    def note_reached(self, client: str, span: Span, position: int) -> None:
        """Note that a client was given outputs up to a position for some blocks."""
        reached = self._reached.setdefault(client, {})
        for block in range(span.start, span.end):
            reached[block] = max(reached.get(block, 0), position)

    def was_reached(self, client: str, span: Span, position: int) -> bool:
        """Whether that happened before for one of these blocks."""
        reached = self._reached.get(client, {})
        return any(reached.get(block, 0) >= position for block in range(span.start, span.end))


class NodeTap:
    """Watches one node's messages: a `memory_stream.Tap`."""

    def __init__(self, injector: FaultInjector, target: Target, node: str) -> None:
        self._injector = injector
        self._target = target
        self._node = node
        self._positions: WeakKeyDictionary[MemoryServerStream, int] = WeakKeyDictionary()

    async def receiving(self, end: MemoryServerStream, message: ClientMessage) -> Sequence[ClientMessage]:
        """Let faults strike when a message arrives."""
        self._target.note(f"{self._node} < {describe(message)}")
        copies = 1
        for fault in list(self._arriving(end, message)):
            copies += fault.kind is FaultKind.DUPLICATE
            await self._strike(fault, end)
        return [message] * copies

    def _arriving(self, end: MemoryServerStream, message: ClientMessage) -> Iterable[Fault]:
        if isinstance(message, OpenSession):
            yield from self._injector.due(self._node, Moment.OPENING, None)
        if isinstance(message, Step) and message.num_tokens:
            tokens = range(message.token_offset, message.token_offset + message.num_tokens)
            if self._is_replay(end, tokens):
                yield from self._injector.due(self._node, Moment.REPLAYING, tokens)
            yield from self._injector.due(self._node, Moment.RECEIVING, tokens)

    def _is_replay(self, end: MemoryServerStream, tokens: range) -> bool:
        if end.opening is None or self._positions.get(end, 0) > tokens.start:
            return False
        return self._injector.was_reached(end.client, end.opening.span, tokens.stop)

    def computing(self, step: BackendStep) -> None:
        """Let faults strike in the middle of computing."""
        if step.hidden is not None:
            tokens = range(step.token_offset, step.token_offset + step.hidden.num_tokens)
            for fault in list(self._injector.due(self._node, Moment.COMPUTING, tokens)):
                self._do(fault, None)

    async def sending(self, end: MemoryServerStream, message: ServerMessage) -> bool:
        """Let faults strike before a reply is sent; False if it vanishes."""
        is_sent = True
        if isinstance(message, Result):
            for fault in list(self._injector.due(self._node, Moment.REPLYING, _tokens_of(message))):
                is_sent = is_sent and fault.kind is not FaultKind.LOSE_REPLY
                await self._strike(fault, end)
        self._target.note(f"{self._node} > {describe(message)}{'' if is_sent else ' lost'}")
        return is_sent

    def sent(self, end: MemoryServerStream, message: ServerMessage) -> None:
        """Let faults strike when a reply is on its way."""
        if isinstance(message, Refused):
            self._positions[end] = min(self._positions.get(end, 0), message.position)
        if isinstance(message, Result) and end.opening is not None:
            self._positions[end] = message.position
            self._injector.note_reached(end.client, end.opening.span, message.position)
            for fault in list(self._injector.due(self._node, Moment.BETWEEN, _tokens_of(message))):
                self._do(fault, end)

    async def _strike(self, fault: Fault, end: MemoryServerStream) -> None:
        """Do a fault to a message that is on its way; never returns if the process has died of it."""
        if fault.kind is FaultKind.DELAY:
            await anyio.sleep(fault.seconds)
            return
        self._do(fault, end)
        if fault.kind in (FaultKind.KILL, FaultKind.RESTART):
            await anyio.sleep_forever()
        await end.passed()

    def _do(self, fault: Fault, end: MemoryServerStream | None) -> None:
        target, node = self._target, self._node
        match fault.kind:
            case FaultKind.KILL:
                target.kill(node)
            case FaultKind.RESTART:
                target.restart(node, fault.seconds)
            case FaultKind.PAUSE:
                target.pause(node)
                target.later(fault.seconds, node, FaultKind.PAUSE)
            case FaultKind.CONTINUE:
                target.resume(node)
            case FaultKind.BLACK_HOLE:
                target.black_hole(node)
                target.later(fault.seconds, node, FaultKind.BLACK_HOLE)
            case FaultKind.EVICT if end is not None and end.opening is not None:
                target.evict_session(node, end.opening.session_id)
            case _:
                pass


def _tokens_of(result: Result) -> range:
    return range(result.token_offset, result.position)


def describe(message: ClientMessage | ServerMessage) -> str:
    """Return one line about a message: without session ids, which are random."""
    match message:
        case OpenSession():
            return f"open {message.span} x{message.batch_size}"
        case Step():
            rows = f" rows {list(message.row_indices)}" if message.row_indices else ""
            return f"step {message.step_id} {message.token_offset}+{message.num_tokens}{rows}"
        case Result():
            return f"result {message.step_id} {message.token_offset}-{message.position}"
        case Refused():
            return f"refused {message.step_id} {message.reason} at {message.position}"
        case _:
            return type(message).__name__.lower()
