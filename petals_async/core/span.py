"""Spans: half-open intervals of transformer blocks."""

from __future__ import annotations

from dataclasses import dataclass

from petals_async.errors import RequestError


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """The blocks `start, start + 1, ..., end - 1`; never empty.

    Raises:
        RequestError: `start` is negative, or `end` is not above it (BAD_SPAN).
    """

    start: int
    end: int

    def __post_init__(self) -> None:
        if not 0 <= self.start < self.end:
            raise RequestError(f"a span needs 0 <= start < end, got {self.start}:{self.end}", reason="BAD_SPAN")

    def __len__(self) -> int:
        return self.end - self.start

    def __contains__(self, other: Span | int) -> bool:
        """Whether a block, or every block of another span, lies in this span."""
        if isinstance(other, Span):
            return self.start <= other.start and other.end <= self.end
        return self.start <= other < self.end

    def __str__(self) -> str:
        return f"{self.start}:{self.end}"

    def overlap(self, other: Span) -> Span | None:
        """Return the blocks in both spans, or None if there are none."""
        start, end = max(self.start, other.start), min(self.end, other.end)
        return Span(start, end) if start < end else None

    @classmethod
    def parse(cls, text: str) -> Span:
        """Read "START:END".

        Raises:
            RequestError: The text isn't of that form (BAD_SPAN).
        """
        start, colon, end = text.partition(":")
        if not (colon and start.strip().isdecimal() and end.strip().isdecimal()):
            raise RequestError(f"blocks must be START:END, such as 0:10, got {text!r}", reason="BAD_SPAN")
        return cls(int(start), int(end))
