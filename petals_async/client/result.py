"""What a generation gives back: its text and tokens, why it ended, and what it survived."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from petals_async.core.span import Span

FinishReason = Literal["stop", "length", "eos"]
"""`stop`: a stop string or a stopping criterion; `length`: max_new_tokens; `eos`: an end token came."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens read and tokens written.

    Attributes:
        prompt_tokens: Tokens of the prompt, those of earlier turns in the same session included.
        completion_tokens: New tokens, an end token included.
    """

    prompt_tokens: int
    completion_tokens: int


@dataclass(frozen=True, slots=True)
class Recovery:
    """One loss of a server that a session got over.

    Attributes:
        at: Position of the session when it happened, in tokens.
        span: The blocks that were lost.
        lost: The server that was lost, as "name id address".
        replacements: The servers that took over, in the order of their blocks.
        reason: The stable word of the error that told of the loss, as `errors.py` has it.
        replayed_tokens: Tokens that were sent again.
        duration_s: From the loss to the first output after it, in seconds.
    """

    at: int
    span: Span
    lost: str
    replacements: tuple[str, ...]
    reason: str
    replayed_tokens: int
    duration_s: float


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a stream.

    Attributes:
        text: Text that may be shown now; may be empty in the last piece, and without a tokenizer always is.
        token_ids: The new tokens since the piece before; all pieces together hold those of the result.
    """

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """A finished generation.

    Attributes:
        text: The new text, without special tokens, ending before the stop string if one came.
        token_ids: The new tokens, an end token and those of a stop string included.
        finish_reason: `stop`, `length` or `eos`.
        usage: Tokens read and written.
        recoveries: What the session got over meanwhile, oldest first; empty if nothing was lost.
        exact: Whether every replay was of the kind that gives the same bits as an undisturbed run.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    recoveries: tuple[Recovery, ...] = ()
    exact: bool = True
