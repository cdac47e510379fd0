"""Attention over many sessions' caches in one pass, with shapes that depend on a token's own place only.

The new tokens of all sessions are flattened to one row of tokens; linear layers, norms and rotary factors never see
a border between sessions. Attention does: each piece of the row appends its keys and values to its own cache, and its
queries look at that cache alone. They do so in query tiles of a fixed length counted from the first token of the
*chunk* that they were first sent in, so that a token's attention has the same shape, and the same bits, whoever else
is in the pass, and wherever the chunk was cut between two passes. A decoded token is a chunk of its own.

Heads that share a key head are rows of one product, which is faster than repeating keys (1.7 to 3.3 times at 4 to 8
thousand tokens, as measured before this was built).
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, Cache

ATTENTION_NAME = "petals_async"
"""The name that our function has among transformers' attention implementations."""

QUERY_TILE = 8
"""Tokens of a chunk that attend together. Small, so that a long chunk can be cut finely; 8 rows already pay."""

_PASSED_ALONG = frozenset({
    "position_ids", "position_embeddings", "use_cache", "cache", "past_key_values", "cache_position", "is_causal",
    "output_attentions", "output_hidden_states", "return_dict",
})  # fmt: skip
"""Arguments that models hand to every attention function, and that change nothing here."""

_CURRENT = threading.local()
"""The batch in work, and the masks made: one compute thread, one pass at a time."""


@dataclass(slots=True)
class Piece:
    """The new tokens of one step in a pass over many.

    Attributes:
        cache: The session's; its layers take new keys and values, (rows, heads, tokens, size), by `update`.
        num_rows: Rows of the session.
        token_offset: Index of the first token; what the cache holds.
        chunks: Tokens of each chunk, in order; at the first one, only what of it comes in this pass.
    """

    cache: Cache
    num_rows: int
    token_offset: int
    chunks: Sequence[int]

    @property
    def num_tokens(self) -> int:
        """Tokens of each row."""
        return sum(self.chunks)

    def tiles(self) -> Iterator[tuple[int, int]]:
        """Give each query tile as (first, one behind the last) token of this piece."""
        start = 0
        for chunk in self.chunks:
            for first in range(start, start + chunk, QUERY_TILE):
                yield first, min(first + QUERY_TILE, start + chunk)
            start += chunk


class FusedBatch(Cache):  # type: ignore[misc]  # transformers is untyped here
    """What a model takes for its cache in a pass over many sessions: hands the blocks' own new keys back to them.

    The attention function finds it as the current one of its thread, and appends to the sessions' caches.

    Args:
        pieces: In the order of their tokens in the pass: row by row, token by token.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        super().__init__(layers=[])
        self.pieces = pieces
        self._layer = -1

    def update(
        self, keys: Tensor, values: Tensor, layer_idx: int, *_args: Any, **_kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Note the block whose attention comes next; nothing is stored yet."""
        self._layer = layer_idx
        _CURRENT.batch = self
        return keys, values

    def take_layer(self) -> int:
        """Return the block whose keys came last, once.

        Raises:
            RuntimeError: Attention was called without new keys: the architecture shares them between blocks.
        """
        layer, self._layer = self._layer, -1
        if layer < 0:
            raise RuntimeError("attention without new keys of its own")
        return layer

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given."""
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return the new tokens alone: no mask is made from it."""
        return query_length, 0


def fused_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """Attend as transformers' attention functions do, each piece of the current batch over its own cache.

    Args:
        module: The attention module, unused but for what transformers passes by it.
        query: (1, heads, tokens, size).
        key: (1, key heads, tokens, size), new ones only.
        value: (1, key heads, tokens, value size), new ones only.
        attention_mask: None; there is no mask function by our name.
        scaling: Factor on the scores; 1/sqrt(size) by default.
        dropout: Ignored: models are in evaluation mode.
        sliding_window: Tokens that a token sees, itself included; None for all.
        softcap: Scores are bounded to it by tanh (Gemma 2).
        s_aux: A score for each head that takes weight and gives nothing (attention sinks, gpt-oss).
        more: What a model passes along for others; anything that could change the result is refused.

    Returns:
        (1, tokens, heads, value size), and no weights.

    Raises:
        RuntimeError: A mask or an argument that isn't known here.
    """
    unknown = sorted(name for name, given in more.items() if name not in _PASSED_ALONG and given is not None)
    if unknown or attention_mask is not None:
        raise RuntimeError(f"{type(module).__name__} wants {unknown or 'a mask'} of attention")
    batch: FusedBatch = _CURRENT.batch
    layer = batch.take_layer()
    scale = scaling if scaling is not None else 1 / math.sqrt(query.shape[-1])
    heads, key_heads = query.shape[1], key.shape[1]
    output = query.new_empty(query.shape[2], heads, value.shape[-1])
    plain = softcap is None and s_aux is None
    sinks = None if s_aux is None else s_aux.reshape(key_heads, -1)
    begin = 0
    for piece in batch.pieces:
        rows, tokens = piece.num_rows, piece.num_tokens
        end = begin + rows * tokens
        shape = (rows, tokens, -1)
        new_keys = key[0, :, begin:end].unflatten(1, shape[:2]).transpose(0, 1)  # (B, Hk, T, size)
        new_values = value[0, :, begin:end].unflatten(1, shape[:2]).transpose(0, 1)
        keys, values = piece.cache.update(new_keys, new_values, layer)  # (B, Hk, L, size)
        grouped = query[0, :, begin:end].reshape(key_heads, heads // key_heads, rows, tokens, query.shape[-1])
        grouped = grouped.permute(2, 0, 3, 1, 4)  # (B, Hk, T, group, size)
        target = output[begin:end].view(rows, tokens, key_heads, heads // key_heads, value.shape[-1])
        for first, last in piece.tiles():
            length = piece.token_offset + last
            start = 0 if sliding_window is None else max(0, piece.token_offset + first + 1 - sliding_window)
            mask = _mask(query, last - first, length - start, heads // key_heads, sliding_window)
            found = (_attend if plain else _attend_capped)(
                grouped[:, :, first:last].flatten(2, 3),  # (B, Hk, t * group, size)
                keys[:, :, start:length],
                values[:, :, start:length],
                mask,
                scale,
                *(() if plain else (softcap, sinks)),
            )
            target[:, first:last] = found.unflatten(2, (last - first, -1)).transpose(1, 2)
        begin = end
    return output.unsqueeze(0), None


def _attend(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)


def _attend_capped(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attention with bounded scores or sinks, step by step, as transformers' eager functions of these models do it."""
    scores = queries @ keys.transpose(2, 3) * scale  # (B, Hk, t * group, L)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    if sinks is None:
        return torch.softmax(scores, dim=-1, dtype=torch.float32).to(values.dtype) @ values
    tokens = scores.shape[2] // sinks.shape[1]
    column = sinks.repeat(1, tokens)[None, :, :, None].expand(scores.shape[0], -1, -1, 1)  # (B, Hk, t * group, 1)
    combined = torch.cat([scores, column.to(scores.dtype)], dim=-1)
    combined = combined - combined.max(dim=-1, keepdim=True).values
    return torch.softmax(combined, dim=-1)[..., :-1].to(values.dtype) @ values


def _mask(query: Tensor, tokens: int, length: int, group: int, window: int | None) -> Tensor | None:
    """Return what is added to scores (tokens * group, length) of a tile that ends at `length`; None for one token."""
    if tokens == 1:
        return None
    return _masks(query.device, query.dtype, group, window).view(tokens, length)


class _Masks:
    """The mask of a full tile over the longest length seen; all others are views of its lower right corner."""

    def __init__(self, device: torch.device, dtype: torch.dtype, group: int, window: int | None) -> None:
        self._group = group
        self._window = window
        self._like = torch.empty(0, device=device, dtype=dtype)
        self._grow(1024)

    def _grow(self, length: int) -> None:
        behind = torch.arange(length, device=self._like.device).flip(0)[None, :]  # of each key: tokens behind the last
        own = torch.arange(QUERY_TILE, device=self._like.device).flip(0)[:, None]  # the same of each query
        hidden = behind < own
        if self._window is not None:
            hidden = hidden | (behind - own >= self._window)
        mask = torch.zeros(hidden.shape, device=self._like.device, dtype=self._like.dtype)
        self._mask = mask.masked_fill_(hidden, -torch.inf).repeat_interleave(self._group, dim=0)

    def view(self, tokens: int, length: int) -> Tensor:
        if length > self._mask.shape[1]:
            self._grow(1 << (length - 1).bit_length())
        return self._mask[(QUERY_TILE - tokens) * self._group :, self._mask.shape[1] - length :]


def _masks(device: torch.device, dtype: torch.dtype, group: int, window: int | None) -> _Masks:
    """Return this thread's masks of a kind; few kinds exist (windows and groups of the models loaded)."""
    kinds: dict[Any, _Masks] = _CURRENT.__dict__.setdefault("masks", {})
    kind = (device, dtype, group, window)
    if kind not in kinds:
        kinds[kind] = _Masks(device, dtype, group, window)
    return kinds[kind]


AttentionInterface.register(ATTENTION_NAME, fused_attention)
