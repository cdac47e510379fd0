"""The server's step ledger: what one session holds, and which step it will run next.

Theory. A server's KV cache is only a cache; the client holds the truth. So a server never guesses: each step
says at which token offset it belongs, and the ledger compares that with what is really held.

Rules (protocol, "RunSession, the rules" 1-4):

- Ids count from 1. Only `next_step_id` is run; a refusal does not advance it. A higher id is OUT_OF_ORDER, so
  after one refusal everything behind it in flight is refused as well, and never appended over stale tokens.
- An offset above the position is a gap: OFFSET_GAP, or EVICTED if tokens were dropped since. Below: truncate.
- The same id again gets the kept reply. The last `max_kept_replies` are kept, as far as they fit into
  `MAX_KEPT_BYTES` (the last one always is); an older id is STALE_STEP.
- A row permutation can't be undone by truncation. A later step at or before its offset would need the old
  order: ROWS_CHANGED, and the position is 0 from then on. Offset 0 needs no old order and is always fine.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from petals_async.core.messages import Refused, Result

MAX_KEPT_BYTES = 32 * 1024**2
"""Bytes of outputs in one session's kept replies; of larger ones only the last is kept."""


@dataclass(frozen=True, slots=True)
class Run:
    """The step is the next one: run it at its offset."""


@dataclass(frozen=True, slots=True)
class Resend:
    """The step was run before: send this reply again, without computing."""

    reply: Result


Decision = Run | Resend | Refused


class StepLedger:
    """The position, the next step id, and the kept replies of one incarnation of a session's KV.

    Args:
        max_kept_replies: Replies kept for a resume; the same number as steps in flight.
        position: Tokens held at the start; above 0 after a fork.
    """

    def __init__(self, *, max_kept_replies: int, position: int = 0) -> None:
        self._max_kept_replies = max_kept_replies
        self._replies: OrderedDict[int, Result] = OrderedDict()
        self._kept_bytes = 0
        self._permuted_at: int | None = None
        self._evicted = False
        self.position = position
        self.next_step_id = 1

    def decide(self, step_id: int, token_offset: int) -> Decision:
        """Say what to do with a step: run it, send its kept reply again, or refuse it."""
        if step_id in self._replies:
            return Resend(self._replies[step_id])
        if step_id < self.next_step_id:
            return self.refuse(step_id, "STALE_STEP", f"step {step_id} was run, and its reply is gone")
        if step_id > self.next_step_id:
            return self.refuse(step_id, "OUT_OF_ORDER", f"the next step is {self.next_step_id}")
        if token_offset > self.position:
            reason = "EVICTED" if self._evicted else "OFFSET_GAP"
            return self.refuse(step_id, reason, f"step at offset {token_offset}, but {self.position} tokens are held")
        if self._needs_old_rows(token_offset):
            self.drop_to(0)
            return self.refuse(step_id, "ROWS_CHANGED", f"rows were permuted at or after offset {token_offset}")
        return Run()

    def _needs_old_rows(self, token_offset: int) -> bool:
        return self._permuted_at is not None and 0 < token_offset <= self._permuted_at

    def record(self, reply: Result, *, permuted: bool) -> None:
        """Note that the next step was run, and keep its reply.

        Args:
            reply: What it answered; its `position` is the new one.
            permuted: Whether it permuted the rows.
        """
        self.position = reply.position
        self.next_step_id = reply.step_id + 1
        if permuted:
            self._permuted_at = reply.token_offset
        elif reply.token_offset == 0:
            self._permuted_at = None
        self._evicted = False
        self._replies[reply.step_id] = reply
        self._kept_bytes += len(reply.data or b"")
        while len(self._replies) > 1 and self._keeps_too_much():
            _, oldest = self._replies.popitem(last=False)
            self._kept_bytes -= len(oldest.data or b"")

    def _keeps_too_much(self) -> bool:
        return len(self._replies) > self._max_kept_replies or self._kept_bytes > MAX_KEPT_BYTES

    def fork(self, max_tokens: int) -> StepLedger:
        """Return the ledger of a session that begins with this one's first tokens, at most `max_tokens`.

        Rows that were permuted at or after that point can't be had in their old order: such a fork begins at 0.
        """
        position = min(self.position, max_tokens)
        if self._needs_old_rows(position):
            position = 0
        forked = StepLedger(max_kept_replies=self._max_kept_replies, position=position)
        forked._permuted_at = self._permuted_at if position else None
        return forked

    def drop_to(self, position: int) -> None:
        """Note that only the first `position` tokens are still held."""
        self.position = min(self.position, position)
        if self.position == 0:
            self._permuted_at = None

    def evict(self, position: int = 0) -> None:
        """Note that the server dropped tokens under memory pressure."""
        if position < self.position:
            self._evicted = True
            self.drop_to(position)

    def refuse(self, step_id: int, reason: str, message: str, *, retry_after_s: float = 0.0) -> Refused:
        """Build a refusal with the true position and next id."""
        return Refused(step_id, reason, message, self.position, self.next_step_id, retry_after_s)
