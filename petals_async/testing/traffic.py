"""Random traffic of one session over the toy model, and the naive model that says what must come out.

The naive model is a list of token ids for each row. It knows nothing of servers, logs or positions: after each call
the outputs must be those of the whole model run from scratch over these lists; a call that was cancelled must have
changed nothing. A row order belongs to the call that asked for it: rolling that call back undoes it.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import anyio

from petals_async.client.session import Session
from petals_async.errors import PetalsAsyncError
from petals_async.testing.toy import TOY_VOCAB_SIZE, ToyEdges, toy_reference, toy_vectors

MAX_NEW_TOKENS = 7
"""Tokens of one call at most."""

MAX_CANCEL_S = 0.03
"""A call is cancelled after at most this time (or much later, if it waits for a server)."""


class Call(Enum):
    """What a session is asked to do."""

    STEP = "step"
    PERMUTE = "permute"
    ROLLBACK = "rollback"
    WAIT = "wait"


class WrongOutputError(AssertionError):
    """The session's outputs or position differ from the naive model's."""


@dataclass(slots=True)
class Traffic:
    """Calls on one session, drawn from `draw`.

    Attributes:
        rows: The naive model: the tokens of each row.
        past: What `rows` was before each call that it holds the tokens of.
    """

    name: str
    draw: random.Random
    edges: ToyEdges
    batch_size: int
    max_tokens: int
    rows: list[list[int]] = field(default_factory=list)
    past: list[list[list[int]]] = field(default_factory=list)
    num_calls: int = 0
    num_cancelled: int = 0

    async def run(self, session: Session, num_calls: int) -> None:
        """Make calls, and compare after each.

        Raises:
            WrongOutputError: Something differs.
        """
        self.rows = [[] for _ in range(self.batch_size)]
        for _ in range(num_calls):
            call = self.draw.choices(list(Call), weights=self._weights())[0]
            await self._make(session, call)
            self.num_calls += 1
            self._compare_position(session)

    def _weights(self) -> list[int]:
        """How often each kind of call is made: several rows are there to be permuted, and rolled back."""
        return [5, 5, 4, 1] if self.batch_size > 1 else [8, 0, 3, 1]

    @property
    def _length(self) -> int:
        return len(self.rows[0])

    async def _make(self, session: Session, call: Call) -> None:
        with anyio.CancelScope() as scope:
            if self.draw.random() < 0.25:
                wait_s = self.draw.uniform(0, MAX_CANCEL_S) * self.draw.choice([1, 1, 99])
                scope.deadline = anyio.current_time() + wait_s
            match call:
                case Call.STEP:
                    await self._step(session, ())
                case Call.PERMUTE:
                    await self._step(session, self._order())
                case Call.ROLLBACK:
                    lowest = self.draw.choice([0, max(0, self._length - MAX_NEW_TOKENS)])
                    await self._rollback(session, self.draw.randint(lowest, self._length))
                case Call.WAIT:
                    await anyio.sleep(self.draw.choice([0.01, 0.5, 3.0]))
        self.num_cancelled += scope.cancelled_caught

    def _order(self) -> list[int]:
        """Draw an order of the rows: mostly one that keeps all, since rows that are gone can't be told apart."""
        if self.draw.random() < 0.7:
            return self.draw.sample(range(self.batch_size), self.batch_size)
        return [self.draw.randrange(self.batch_size) for _ in self.rows]

    async def _step(self, session: Session, order: Sequence[int]) -> None:
        room = self.max_tokens - self._length
        if room < 1:
            await self._rollback(session, self.draw.randint(0, self._length))
            return
        num_new = min(room, self.draw.choice([1, 1, 1, 2, 3, MAX_NEW_TOKENS]))
        new = [[self.draw.randrange(TOY_VOCAB_SIZE) for _ in range(num_new)] for _ in self.rows]
        num_outputs = self.draw.choice([None, 1, num_new])
        outputs = await session.step(self.edges.embed_rows(new), row_indices=order, num_outputs=num_outputs)
        before = [self.rows[row] for row in order] if order else self.rows
        self.past.append(self.rows)
        self.rows = [[*row, *tokens] for row, tokens in zip(before, new, strict=True)]
        self._compare_outputs(toy_vectors(outputs), num_outputs or num_new)

    async def _rollback(self, session: Session, position: int) -> None:
        try:
            await session.rollback(position)
        finally:
            if session.position == position:  # a cancelled one may have happened or not
                self._forget(position)

    def _forget(self, position: int) -> None:
        while self.past and len(self.past[-1][0]) >= position:
            self.rows = self.past.pop()
        self.rows = [row[:position] for row in self.rows]

    def _compare_outputs(self, got: list[list[bytes]], num_outputs: int) -> None:
        for number, (row, vectors) in enumerate(zip(self.rows, got, strict=True)):
            expected = toy_reference(row, self.edges.num_blocks)[-num_outputs:]
            if vectors != expected:
                first = next(i for i in range(num_outputs) if vectors[i : i + 1] != expected[i : i + 1])
                at = len(row) - num_outputs + first
                raise WrongOutputError(f"{self.name}: row {number} of {self.batch_size} is wrong from token {at} on")

    def _compare_position(self, session: Session) -> None:
        if session.position != self._length:
            raise WrongOutputError(f"{self.name}: position {session.position}, should be {self._length}")
        for recovery in session.recoveries:
            if recovery.replayed_tokens > recovery.at:
                raise WrongOutputError(f"{self.name}: {recovery.replayed_tokens} tokens replayed at {recovery.at}")


def problem_of(error: BaseException) -> str:
    """Return one line about an error that ended a run."""
    kind = error.reason if isinstance(error, PetalsAsyncError) else type(error).__name__
    return f"{kind}: {error}"
