"""The replay log: all inputs that crossed one boundary of a session's route. It is the truth.

Theory. A server can lose its KV at any time; the log can build it again, byte for byte. So it keeps

- the very bytes that were sent, in the chunks in which they were first sent: matrix kernels round differently
  for other row counts, and a replay in the same chunks gives the same bits on like hardware;
- a tentative tail: what is being sent is appended at once, but counts only when the whole call has succeeded
  (`commit`); a call that failed or was cancelled is cut off again (`rollback_tail`);
- the rows' ancestry: a row permutation (beam search) is written down and composed lazily at replay, so that a
  replay sends rows already gathered and never carries permutations. A permutation belongs to the step at its
  offset: truncating to that offset or below undoes it. A log that was itself filled by a replay has its rows gathered
  up to `gathered_at`, and nothing left of their old order: truncating it to there or below leaves it empty, to be
  made again from the log before it.

The bytes held by all logs of a session share one budget.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from petals_async.core.byte_budget import ByteBudget
from petals_async.core.hidden import HiddenStates
from petals_async.errors import RequestError

DEFAULT_REPLAY_LOG_BYTES = 4 * 1024**3
"""Bytes that all replay logs of one session may hold together."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Hidden states as they were sent at one offset."""

    token_offset: int
    hidden: HiddenStates

    @property
    def end(self) -> int:
        """Index after the last token."""
        return self.token_offset + self.hidden.num_tokens


@dataclass(frozen=True, slots=True)
class Permutation:
    """Each row goes on from the row that `row_indices` names, from `token_offset` on."""

    token_offset: int
    row_indices: tuple[int, ...]


class ReplayLog:
    """The inputs at one boundary, committed ones and a tentative tail.

    Args:
        budget: Bytes that this log shares with the others of its session.

    Attributes:
        committed: Tokens that count.
        gathered_at: Offset of the last permutation whose rows came in gathered; 0 for none.
        cut: Whether a chunk was truncated in its middle: its replay has fewer rows than it was computed in.
    """

    def __init__(self, budget: ByteBudget | None = None) -> None:
        self._budget = budget or ByteBudget(DEFAULT_REPLAY_LOG_BYTES, "the replay log (replay_log_bytes)")
        self._chunks: list[Chunk] = []
        self._permutations: list[Permutation] = []
        self.committed = 0
        self.gathered_at = 0
        self.cut = False

    @property
    def end(self) -> int:
        """Tokens in the log, the tentative tail included."""
        return self._chunks[-1].end if self._chunks else 0

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return sum(chunk.hidden.num_bytes for chunk in self._chunks)

    def append(self, token_offset: int, hidden: HiddenStates, row_indices: Sequence[int] = ()) -> None:
        """Append what is sent at the log's end, as part of the tentative tail.

        Raises:
            RequestError: The offset is not the log's end.
            LengthExceededError: The byte budget is used up; the log is unchanged.
        """
        if token_offset != self.end:
            raise RequestError(f"the log ends at {self.end}, a chunk at {token_offset} does not follow")
        self._budget.take(hidden.num_bytes)
        if row_indices:
            self._permutations.append(Permutation(token_offset, tuple(row_indices)))
        self._chunks.append(Chunk(token_offset, hidden))

    def commit(self, position: int) -> None:
        """Make everything up to a position count.

        Raises:
            RequestError: The log doesn't reach it.
        """
        if position > self.end:
            raise RequestError(f"the log ends at {self.end}, {position} can't be committed")
        self.committed = position

    def rollback_tail(self) -> None:
        """Cut the tentative tail off."""
        self.truncate(self.committed)

    def truncate(self, position: int) -> None:
        """Forget all tokens from a position on, and the permutations that belong to them; see the head of the file."""
        if position <= self.gathered_at:
            position = self.gathered_at = 0
        while self._chunks and self._chunks[-1].end > position:
            chunk = self._chunks.pop()
            self._budget.give_back(chunk.hidden.num_bytes)
            if chunk.token_offset < position:
                self.cut = True
                kept = chunk.hidden.slice_tokens(0, position - chunk.token_offset)
                self._budget.take(kept.num_bytes)
                self._chunks.append(Chunk(chunk.token_offset, kept))
        while self._permutations and self._permutations[-1].token_offset >= position:
            self._permutations.pop()
        self.committed = min(self.committed, position)

    def read(self, start: int, end: int) -> Iterator[Chunk]:
        """Give `[start, end)` in the chunks in which it was sent, rows gathered by their ancestry."""
        for chunk in self._chunks:
            first, last = max(start, chunk.token_offset), min(end, chunk.end)
            if first < last:
                piece = chunk.hidden.slice_tokens(first - chunk.token_offset, last - chunk.token_offset)
                yield Chunk(first, piece.take_rows(self._ancestry(chunk.token_offset, piece.batch_size, end)))

    def _ancestry(self, token_offset: int, batch_size: int, end: int) -> list[int]:
        """Compose the permutations that came after a chunk: the row each present row descends from."""
        rows = list(range(batch_size))
        for permutation in self._permutations:
            if token_offset < permutation.token_offset < end:
                rows = [rows[index] for index in permutation.row_indices]
        return rows

    def last_permutation(self, end: int) -> int:
        """Return the offset of the last permutation that a replay up to `end` has gathered in; 0 if there is none."""
        return max((p.token_offset for p in self._permutations if p.token_offset < end), default=self.gathered_at)

    def close(self) -> None:
        """Forget everything and give the bytes back."""
        self.truncate(0)
