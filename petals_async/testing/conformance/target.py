"""What a conformance check is run against, and how it says what is wrong."""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import TypeVar

from petals_async.abc import Connector
from petals_async.core.hidden import HiddenStates
from petals_async.core.span import Span
from petals_async.errors import (
    PetalsAsyncError,
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


def listed(check: Check) -> Check:
    """Add a check to `CHECKS`."""
    CHECKS.append(check)
    return check


def need(hook: T | None, name: str) -> T:
    """Return a hook of the target. Raises NotOfferedError if it has none."""
    if hook is None:
        raise NotOfferedError(f"the target has no hook {name!r}")
    return hook


def require(holds: bool, what: str) -> None:
    """Raise ConformanceError unless something holds."""
    if not holds:
        raise ConformanceError(what)


def equal(got: object, wanted: object, what: str) -> None:
    """Raise ConformanceError unless two values are equal."""
    require(got == wanted, f"{what}: expected {wanted}, got {got}")


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
