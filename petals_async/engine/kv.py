"""One session's keys and values over some blocks: preallocated, truncated by moving a number, never by copying.

All tokens are kept, also for sliding-window layers: the model's masks leave out what lies outside the window, so
that a rollback finds again what the window had already passed. (`DynamicCache(config)` raises there, and
`StaticCache` is silently wrong: see the measured facts.)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from petals_async.core.span import Span
from petals_async.errors import LengthExceededError, RequestError
from petals_async.models.trials import KvShape


class KvLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped here
    """Keys and values of one block: (batch, heads, max_tokens, size), of which the first `length` tokens count."""

    is_sliding = False
    is_croppable = True

    def __init__(self, shape: KvShape, batch_size: int, max_tokens: int, device: str) -> None:
        super().__init__()
        self.max_tokens = max_tokens
        self.length = 0
        self.keys = torch.empty(
            batch_size, shape.key_heads, max_tokens, shape.key_size, dtype=shape.dtype, device=device
        )
        self.values = torch.empty(
            batch_size, shape.value_heads, max_tokens, shape.value_size, dtype=shape.dtype, device=device
        )
        self.device, self.dtype = self.keys.device, shape.dtype
        self.is_initialized = True

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return int(self.keys.nbytes + self.values.nbytes)

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append new keys and values, (batch, heads, n, size), and return all up to and with them.

        Raises:
            LengthExceededError: More tokens than were allocated; nothing was changed.
        """
        end = self.length + key_states.shape[2]
        if end > self.max_tokens:
            raise LengthExceededError(f"{end} tokens don't fit a cache of max_tokens {self.max_tokens}")
        self.keys[:, :, self.length : end] = key_states
        self.values[:, :, self.length : end] = value_states
        self.length = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def permute(self, rows: Tensor) -> None:
        """Put row `rows[i]` at row i; only the tokens that count are moved."""
        keys, values = self.keys[:, :, : self.length], self.values[:, :, : self.length]
        keys.copy_(keys.index_select(0, rows))
        values.copy_(values.index_select(0, rows))

    def copy_prefix(self, source: KvLayer, num_tokens: int) -> None:
        """Take the first tokens of another layer of the same shape; the length becomes `num_tokens`."""
        self.keys[:, :, :num_tokens] = source.keys[:, :, :num_tokens]
        self.values[:, :, :num_tokens] = source.values[:, :, :num_tokens]
        self.length = num_tokens

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: all was allocated at the start."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return (keys that attention will see, index of the first)."""
        return self.length + query_length, 0

    def get_seq_length(self) -> int:
        """Return the tokens held."""
        return self.length

    def get_max_length(self) -> int:
        """Return the tokens that fit."""
        return self.max_tokens

    def get_max_cache_shape(self) -> int:
        """Return the tokens that fit, under the name of older transformers."""
        return self.max_tokens


class _AbsentLayer(CacheLayerMixin):  # type: ignore[misc]
    """Stands for a block that runs elsewhere: masks are made from layer 0, whoever holds it."""

    is_sliding = False

    def __init__(self, present: KvLayer) -> None:
        super().__init__()
        self._present = present

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        raise RequestError("a block outside this cache's span was run", reason="BAD_SPAN")

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing."""

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._present.get_mask_sizes(query_length)

    def get_seq_length(self) -> int:
        return self._present.length

    def get_max_length(self) -> int:
        return self._present.max_tokens

    def get_max_cache_shape(self) -> int:
        return self._present.max_tokens


class KvCache(Cache):  # type: ignore[misc]
    """The KV cache of one session over the blocks `[start, end)`, for transformers' models.

    Args:
        span: The blocks that it holds.
        shapes: One for each of these blocks.
        batch_size: Rows.
        max_tokens: Tokens of each row; all memory is taken now.
        device: Where it lies, as torch names it.

    Raises:
        RequestError: A count is not positive, or shapes and span differ in number.
    """

    def __init__(
        self, span: Span, shapes: Sequence[KvShape], batch_size: int, max_tokens: int, *, device: str = "cpu"
    ) -> None:
        if batch_size < 1 or max_tokens < 1:
            raise RequestError(f"batch_size {batch_size} and max_tokens {max_tokens} must be positive")
        if len(shapes) != len(span):
            raise RequestError(f"{len(shapes)} shapes for blocks {span}", reason="BAD_SPAN")
        self.span = span
        self.num_rows = batch_size
        self.max_tokens = max_tokens
        self.held = [KvLayer(shape, batch_size, max_tokens, device) for shape in shapes]
        absent = [_AbsentLayer(self.held[0])] * span.start
        super().__init__(layers=[*absent, *self.held])

    @property
    def length(self) -> int:
        """Tokens held, the same in all blocks between steps."""
        return self.held[0].length

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(layer.nbytes for layer in self.held)

    def seek(self, offset: int) -> None:
        """Forget all tokens from `offset` on, in all blocks; also those that a failed step left in some.

        Args:
            offset: Tokens to keep.

        Raises:
            RequestError: Fewer tokens are held in some block; nothing was changed.
        """
        held = min(layer.length for layer in self.held)
        if not 0 <= offset <= held:
            raise RequestError(f"can't keep {offset} tokens of {held}", reason="OFFSET_GAP")
        for layer in self.held:
            layer.length = offset

    def permute(self, rows: Sequence[int]) -> None:
        """Put row `rows[i]` at row i, in all blocks (beam ancestry); a row may be taken more than once.

        Raises:
            RequestError: Not exactly one existing row for each row (BAD_ROWS); nothing was changed.
        """
        if len(rows) != self.num_rows or not all(0 <= row < self.num_rows for row in rows):
            raise RequestError(f"rows {list(rows)} of a batch of {self.num_rows}", reason="BAD_ROWS")
        if list(rows) == list(range(self.num_rows)):
            return
        index = torch.tensor(list(rows), device=self.held[0].device)
        for layer in self.held:
            layer.permute(index)

    def copy_prefix(self, source: KvCache, num_tokens: int) -> None:
        """Take over the first tokens of another session's cache of the same blocks and batch.

        Raises:
            RequestError: The caches don't match, or there are not so many tokens or so much room.
        """
        if (source.span, source.num_rows) != (self.span, self.num_rows):
            raise RequestError(
                f"a fork needs the same blocks and rows: {source.span} x {source.num_rows} "
                f"and {self.span} x {self.num_rows}"
            )
        if not 0 <= num_tokens <= min(source.length, self.max_tokens):
            raise RequestError(
                f"{num_tokens} tokens can't be copied from {source.length} into room for {self.max_tokens}",
                reason="OFFSET_GAP",
            )
        for mine, theirs in zip(self.held, source.held, strict=True):
            mine.copy_prefix(theirs, num_tokens)
