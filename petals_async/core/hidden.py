"""Hidden states as plain bytes, so that the wire, the replay log and the simulator need no torch.

The bytes are little-endian, in C order, of shape (batch, tokens, hidden_size).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from petals_async.errors import RequestError

ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one number, for each dtype that crosses the wire."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """What a tensor is, without its numbers: a dtype name and a shape."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in C order.

        Raises:
            RequestError: The dtype is not one of `ITEM_BYTES` (BAD_DTYPE).
        """
        if self.dtype not in ITEM_BYTES:
            raise RequestError(f"dtype must be one of {', '.join(ITEM_BYTES)}, got {self.dtype!r}", reason="BAD_DTYPE")
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """Activations between two blocks: dtype, shape (batch, tokens, hidden_size), raw bytes.

    Raises:
        RequestError: The shape is not three non-negative numbers, or the bytes don't fit it (BAD_SHAPE),
            or the dtype is unknown (BAD_DTYPE).
    """

    dtype: str
    shape: tuple[int, int, int]
    data: bytes

    def __post_init__(self) -> None:
        if len(self.shape) != 3 or min(self.shape) < 0:
            raise RequestError(
                f"hidden states are (batch, tokens, hidden_size), got shape {self.shape}", reason="BAD_SHAPE"
            )
        expected = TensorSpec(self.dtype, self.shape).num_bytes
        if len(self.data) != expected:
            raise RequestError(
                f"{self.dtype} {self.shape} is {expected} bytes, got {len(self.data)}", reason="BAD_SHAPE"
            )

    @property
    def spec(self) -> TensorSpec:
        """Dtype and shape."""
        return TensorSpec(self.dtype, self.shape)

    @property
    def batch_size(self) -> int:
        """Rows."""
        return self.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens of each row."""
        return self.shape[1]

    @property
    def num_bytes(self) -> int:
        """Bytes held."""
        return len(self.data)

    def slice_tokens(self, start: int, end: int) -> HiddenStates:
        """Return the tokens `[start, end)` of each row."""
        batch, tokens, width = self.shape
        if (start, end) == (0, tokens):
            return self
        if not 0 <= start <= end <= tokens:
            raise RequestError(f"tokens {start}:{end} of {tokens} can't be taken", reason="BAD_SHAPE")
        per_token = width * ITEM_BYTES[self.dtype]
        rows = [
            self.data[(row * tokens + start) * per_token : (row * tokens + end) * per_token] for row in range(batch)
        ]
        return HiddenStates(self.dtype, (batch, end - start, width), b"".join(rows))

    def take_rows(self, rows: Sequence[int]) -> HiddenStates:
        """Return the named rows, in that order; a row may be taken more than once."""
        batch, tokens, width = self.shape
        if tuple(rows) == tuple(range(batch)):
            return self
        if rows and not 0 <= min(rows) <= max(rows) < batch:
            raise RequestError(f"rows {list(rows)} of {batch} can't be taken", reason="BAD_ROWS")
        per_row = tokens * width * ITEM_BYTES[self.dtype]
        data = b"".join(self.data[row * per_row : (row + 1) * per_row] for row in rows)
        return HiddenStates(self.dtype, (len(rows), tokens, width), data)

    @staticmethod
    def concat_tokens(pieces: Sequence[HiddenStates]) -> HiddenStates:
        """Join pieces of the same rows along the token axis.

        Raises:
            RequestError: No pieces, or of different dtype, batch or width (BAD_SHAPE).
        """
        if not pieces:
            raise RequestError("nothing to join", reason="BAD_SHAPE")
        first = pieces[0]
        batch, _, width = first.shape
        if any((p.dtype, p.shape[0], p.shape[2]) != (first.dtype, batch, width) for p in pieces):
            raise RequestError("pieces differ in dtype, batch or width", reason="BAD_SHAPE")
        if len(pieces) == 1:
            return first
        tokens = sum(piece.num_tokens for piece in pieces)
        per_token = width * ITEM_BYTES[first.dtype]
        rows = (
            piece.data[row * piece.num_tokens * per_token : (row + 1) * piece.num_tokens * per_token]
            for row in range(batch)
            for piece in pieces
        )
        return HiddenStates(first.dtype, (batch, tokens, width), b"".join(rows))
