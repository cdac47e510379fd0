"""The backend over torch: runs the steps of many sessions through a span's blocks, in one pass where that is right.

What is true after each step: every layer of its cache holds `token_offset + num_tokens` tokens if the outcome is a
result, and exactly what it held before (rows included) if it is an error. Rows are permuted only after everything
that can be checked has been checked; a failure in computing puts them back.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from petals_async.abc import BackendOutcome, BackendResult, BackendStep
from petals_async.core.hidden import HiddenStates
from petals_async.core.span import Span
from petals_async.engine.kv import KvCache
from petals_async.errors import ComputeError, LengthExceededError, RequestError
from petals_async.models.attention import Piece
from petals_async.models.codec import from_hidden, to_hidden
from petals_async.models.span import BlockSpan


class TorchBackend:
    """The `BlockBackend` of real models. Every method is called on the one compute thread.

    Args:
        blocks: The loaded span.
    """

    def __init__(self, blocks: BlockSpan) -> None:
        self.blocks = blocks

    @property
    def span(self) -> Span:
        """The blocks held."""
        return self.blocks.span

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.blocks.hidden_size

    @property
    def dtype(self) -> str:
        """Name of the dtype of the hidden states."""
        return self.blocks.dtype

    def kv_bytes(self, span: Span, batch_size: int, num_tokens: int) -> int:
        """Return the exact bytes of a cache for `num_tokens` tokens of `batch_size` rows over `span`.

        Raises:
            RequestError: The blocks are not held (BAD_SPAN).
        """
        shapes = self.blocks.kv_shapes[self._held(span)]
        return batch_size * num_tokens * sum(shape.num_bytes for shape in shapes)

    def allocate(self, span: Span, batch_size: int, max_tokens: int) -> KvCache:
        """Return an empty cache for a session; all its memory is reserved now.

        Raises:
            RequestError: The blocks are not held (BAD_SPAN), or a count is not positive.
            ComputeError: The memory isn't there.
        """
        shapes = self.blocks.kv_shapes[self._held(span)]
        try:
            return KvCache(span, shapes, batch_size, max_tokens, device=self.blocks.device)
        except RuntimeError as error:  # torch's out-of-memory errors are RuntimeErrors
            wanted = self.kv_bytes(span, batch_size, max_tokens)
            raise ComputeError(f"{wanted} bytes of KV cache can't be allocated: {error}") from error

    def copy_prefix(self, source: KvCache, target: KvCache, num_tokens: int) -> None:
        """Copy the first tokens of one session's cache into another's of the same span and batch.

        Raises:
            RequestError: The caches don't match, or hold or take fewer tokens.
        """
        target.copy_prefix(source, num_tokens)

    def run(self, steps: Sequence[BackendStep]) -> list[BackendOutcome]:
        """Run steps of different sessions, those over the same blocks in one pass.

        Args:
            steps: At most one for each cache.

        Returns:
            One outcome for each step, in the same order. A step that failed gives its error, and leaves its
            cache as it was; the others are not affected.
        """
        outcomes: dict[int, BackendOutcome] = {}
        passes: dict[Span, dict[int, _Input]] = {}
        for index, step in enumerate(steps):
            try:
                hidden = self._checked_input(step, step.cache)
            except RequestError as error:
                outcomes[index] = error
                continue
            if hidden is None:
                outcomes[index] = _truncate(step)
            else:
                passes.setdefault(step.span, {})[index] = _Input(step, hidden)
        for inputs in passes.values():
            outcomes |= zip(inputs, self._run_inputs(list(inputs.values())), strict=True)
        return [outcomes[index] for index in range(len(steps))]

    def _in_one_pass(self, one: _Input) -> bool:
        """Whether a step's chunks may be run at once: they must get the bits that they had one by one."""
        return self.blocks.exact or (self.blocks.fused and len(one.chunks) == 1)

    def _run_inputs(self, inputs: list[_Input]) -> list[BackendOutcome]:
        """Run steps over the same blocks; those that fail together are run one by one, to see which it was."""
        if len(inputs) > 1 and not all(map(self._in_one_pass, inputs)):
            return [self._run_inputs([one])[0] for one in inputs]
        started = time.perf_counter()
        undo = [_Undo(one.step) for one in inputs]
        try:
            outputs = self._compute(inputs)
        except BaseException as error:
            for one in undo:
                one.restore()
            if not isinstance(error, RuntimeError):  # torch's errors are RuntimeErrors, out of memory among them
                raise
            if len(inputs) > 1:
                return [self._run_inputs([one])[0] for one in inputs]
            step = inputs[0].step
            return [ComputeError(f"blocks {step.span} at offset {step.token_offset}: {error}")]
        compute_s = time.perf_counter() - started
        return [
            self._finish(one.step, found, back, compute_s)
            for one, found, back in zip(inputs, outputs, undo, strict=True)
        ]

    def _compute(self, inputs: list[_Input]) -> list[Tensor]:
        """Return the outputs of each step, (B, T, D)."""
        for one in inputs:
            one.step.cache.seek(one.step.token_offset)
            one.step.cache.permute(one.step.row_indices or range(one.step.cache.num_rows))
        span = inputs[0].step.span
        if len(inputs) == 1 and not self._in_one_pass(inputs[0]):
            return [inputs[0].run_chunks(self.blocks)]
        flat = torch.cat([one.hidden.flatten(0, 1) for one in inputs]) if len(inputs) > 1 else inputs[0].hidden
        pieces = [one.piece() for one in inputs]
        outputs = self.blocks.run_pieces(flat.reshape(1, -1, self.hidden_size), pieces, span.start, span.end)[0]
        parts = outputs.split([one.hidden.shape[0] * one.hidden.shape[1] for one in inputs])
        return [part.view(one.hidden.shape) for part, one in zip(parts, inputs, strict=True)]

    def _finish(self, step: BackendStep, outputs: Tensor, undo: _Undo, compute_s: float) -> BackendOutcome:
        if _is_finite(outputs):
            return BackendResult(_wanted(outputs, step.num_outputs), compute_s)
        undo.restore()
        return ComputeError(
            f"blocks {step.span} gave NaN or infinity in {self.dtype} at offset {step.token_offset}",
            reason="NON_FINITE",
        )

    def _checked_input(self, step: BackendStep, cache: KvCache) -> Tensor | None:
        """Check all that can be checked before anything is changed, and return the new tokens as a tensor."""
        if step.token_offset > cache.length or step.token_offset < 0:
            raise RequestError(f"offset {step.token_offset} of {cache.length} cached tokens", reason="OFFSET_GAP")
        if step.span != cache.span:
            raise RequestError(f"blocks {step.span} on a cache of {cache.span}", reason="BAD_SPAN")
        if step.row_indices and not (
            len(step.row_indices) == cache.num_rows and all(0 <= row < cache.num_rows for row in step.row_indices)
        ):
            raise RequestError(f"rows {list(step.row_indices)} of {cache.num_rows}", reason="BAD_ROWS")
        if step.hidden is None or step.hidden.num_tokens == 0:
            return None
        self._check_hidden(step.hidden, cache, step.token_offset)
        if step.chunk_tokens and (sum(step.chunk_tokens) != step.hidden.num_tokens or min(step.chunk_tokens) < 1):
            raise RequestError(
                f"chunks of {list(step.chunk_tokens)} tokens for {step.hidden.num_tokens}", reason="BAD_SHAPE"
            )
        hidden = from_hidden(step.hidden, device=self.blocks.device)  # (B, T, D)
        if not _is_finite(hidden):
            raise RequestError("the hidden states sent hold NaN or infinity", reason="NON_FINITE_INPUT")
        return hidden

    def _check_hidden(self, hidden: HiddenStates, cache: KvCache, offset: int) -> None:
        batch, tokens, width = hidden.shape
        if (batch, width) != (cache.num_rows, self.hidden_size):
            raise RequestError(
                f"hidden states must be ({cache.num_rows}, tokens, {self.hidden_size}), got {hidden.shape}",
                reason="BAD_SHAPE",
            )
        if hidden.dtype != self.dtype:
            raise RequestError(f"hidden states must be {self.dtype}, got {hidden.dtype}", reason="BAD_DTYPE")
        if offset + tokens > cache.max_tokens:
            raise LengthExceededError(f"{offset} + {tokens} tokens exceed max_tokens {cache.max_tokens}")

    def _held(self, span: Span) -> slice:
        if span not in self.span:
            raise RequestError(f"blocks {span} are not all in {self.span}", reason="BAD_SPAN")
        return slice(span.start - self.span.start, span.end - self.span.start)


@dataclass(slots=True)
class _Input:
    """A step that was checked, and its new tokens, (B, T, D)."""

    step: BackendStep
    hidden: Tensor

    @property
    def chunks(self) -> Sequence[int]:
        return self.step.chunk_tokens or (self.hidden.shape[1],)

    def piece(self) -> Piece:
        return Piece(self.step.cache, self.hidden.shape[0], self.step.token_offset, self.chunks)

    def run_chunks(self, blocks: BlockSpan) -> Tensor:
        """Run the chunks one after the other, as they were first run."""
        outputs, offset = [], self.step.token_offset
        for chunk in self.hidden.split(list(self.chunks), dim=1):
            span = self.step.span
            outputs.append(blocks.run(chunk, self.step.cache, token_offset=offset, start=span.start, end=span.end))
            offset += chunk.shape[1]
        return torch.cat(outputs, dim=1)


class _Undo:
    """Keeps what a step overwrites in its cache (tokens truncated or permuted), to put it back."""

    def __init__(self, step: BackendStep) -> None:
        cache: KvCache = step.cache
        num_tokens = step.hidden.num_tokens if step.hidden is not None else 0
        start = 0 if step.row_indices else step.token_offset
        end = cache.length if step.row_indices else min(cache.length, step.token_offset + num_tokens)
        self._cache = cache
        self._length = cache.length
        self._place = (slice(None), slice(None), slice(start, end))
        self._saved = [
            (layer.keys[self._place].clone(), layer.values[self._place].clone()) for layer in cache.held if start < end
        ]

    def restore(self) -> None:
        """Make the cache what it was."""
        for layer, (keys, values) in zip(self._cache.held, self._saved, strict=False):
            layer.keys[self._place] = keys
            layer.values[self._place] = values
        for layer in self._cache.held:
            layer.length = self._length


def _truncate(step: BackendStep) -> BackendOutcome:
    """Do a step without tokens."""
    step.cache.seek(step.token_offset)
    step.cache.permute(step.row_indices or range(step.cache.num_rows))
    return BackendResult(None, 0.0)


def _is_finite(tensor: Tensor) -> bool:
    """Whether all numbers are finite. Only the sum is looked at first: one pass, no mask in memory."""
    return bool(torch.isfinite(tensor.sum(dtype=torch.float32))) or bool(torch.isfinite(tensor).all())


def _wanted(outputs: Tensor, num_outputs: int | None) -> HiddenStates | None:
    """Return the last `num_outputs` tokens, (B, m, D); all of them for None, nothing for 0."""
    if num_outputs == 0:
        return None
    tokens = outputs.shape[1]
    kept = tokens if num_outputs is None else min(num_outputs, tokens)
    return to_hidden(outputs[:, tokens - kept :])
