"""What a span is put through at load, before anybody relies on it: is it right with a cache, fused, to the bit?

Each trial is a comparison of two ways to compute the same tokens. Those that ask "is it right?" have loose bounds,
since what fails is wrong by far, and rounding (or another expert for one token) must not keep a server from starting;
those that ask "is it the same?" want equal bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from petals_async.errors import UnsupportedModelError
from petals_async.models.attention import Piece

if TYPE_CHECKING:
    from petals_async.models.span import BlockSpan

EXACT_BLOCKS = 4
"""Blocks of a span that the trial of equal bits runs: every kind of linear layer was tried alone before."""

_Outcome = tuple[list[Tensor], Cache]


class ProbeCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A growing cache for trials; its length is that of the first block held, whichever that is."""

    def __init__(self, first_block: int) -> None:
        super().__init__()
        self._first_block = first_block

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens held."""
        return int(super().get_seq_length(self._first_block))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        """Return (keys that attention will see, index of the first)."""
        length, offset = super().get_mask_sizes(query_length, self._first_block)
        return int(length), int(offset)


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one block: key and value vectors may differ in number and size (MLA).

    Attributes:
        key_heads: Key vectors a token.
        key_size: Numbers of one key vector.
        value_heads: Value vectors a token.
        value_size: Numbers of one value vector.
        dtype: Of both.
    """

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one token of one row in this block."""
        numbers = self.key_heads * self.key_size + self.value_heads * self.value_size
        return numbers * int(self.dtype.itemsize)


def kv_shapes(cache: Cache, blocks: BlockSpan) -> tuple[KvShape, ...]:
    """Return what each block put into a cache for a token.

    Raises:
        UnsupportedModelError: It wasn't one key and value a token, of one dtype.
    """
    return tuple(_kv_shape(cache, block, blocks) for block in range(blocks.start, blocks.end))


def _kv_shape(cache: Cache, block: int, blocks: BlockSpan) -> KvShape:
    layer = cache.layers[block] if block < len(cache.layers) else None
    keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
    tokens = cache.get_seq_length()
    if keys is None or values is None or keys.ndim != 4 or {keys.shape[2], values.shape[2]} != {tokens}:
        raise UnsupportedModelError(
            f"{blocks.checkpoint.name}: block {block} doesn't store one key and value a token of its own"
        )
    if keys.dtype != values.dtype:
        raise UnsupportedModelError(f"{blocks.checkpoint.name}: block {block} has keys and values of two dtypes")
    return KvShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)


def samples(blocks: BlockSpan, rows: int, tokens: int) -> Tensor:
    """Return the same hidden states at each call, (rows, tokens, hidden_size)."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(rows, tokens, blocks.hidden_size, generator=generator).to(blocks.device, blocks.torch_dtype)


def steps(blocks: BlockSpan, hidden: Tensor, sizes: Sequence[int]) -> _Outcome:
    """Run one session in steps of these sizes; returns the outputs and the cache."""
    cache, outputs, offset = ProbeCache(blocks.start), [], 0
    for size in sizes:
        part = hidden[:, offset : offset + size]
        outputs.append(blocks.run(part, cache, token_offset=offset, start=blocks.start, end=blocks.end))
        offset += size
    return outputs, cache


def same_bits(left: _Outcome, right: _Outcome) -> bool:
    """Whether two runs gave the same outputs, keys and values."""
    layers = zip(left[1].layers, right[1].layers, strict=True)
    return all(map(torch.equal, left[0], right[0])) and all(
        torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in layers if a.is_initialized
    )


def check_steps(blocks: BlockSpan) -> None:
    """Run four tokens at once and in three steps, from the same tensor.

    Raises:
        UnsupportedModelError: They differ: the cache or masks fail here, or the model overwrites what it is given.
    """
    hidden = samples(blocks, 2, 4)
    (at_once,) = steps(blocks, hidden, [4])[0]
    in_steps = torch.cat(steps(blocks, hidden, [1, 2, 1])[0], dim=1)
    if not _alike(in_steps, at_once, hidden, bound=0.1):
        raise UnsupportedModelError(
            f"{blocks.checkpoint.name}: blocks {blocks.span} give other outputs in several steps than in one, so they "
            "can't be served with a cache"
        )


def outputs_alone(blocks: BlockSpan) -> Tensor:
    """Return what each row of the samples gives by itself, (2, 9, hidden_size)."""
    return torch.cat(
        [
            blocks.run(row[None], ProbeCache(blocks.start), token_offset=0, start=blocks.start, end=blocks.end)
            for row in samples(blocks, 2, 9)
        ]
    )


def fuses(blocks: BlockSpan, alone: Tensor) -> bool:
    """Whether two sessions of different length, in shared passes, come out as each did alone.

    Args:
        blocks: Set to fuse.
        alone: `outputs_alone`, from before that.
    """
    blocks.fused = True
    rows = samples(blocks, 2, 9)
    caches = [ProbeCache(blocks.start), ProbeCache(blocks.start)]
    outputs: list[list[Tensor]] = [[], []]
    try:
        for sizes, offsets in (((4, 2), (0, 0)), ((1, 1), (4, 2)), ((4, 6), (5, 3))):
            pieces = [Piece(caches[row], 1, offsets[row], [sizes[row]]) for row in (0, 1)]
            parts = [rows[row, offsets[row] : offsets[row] + sizes[row]] for row in (0, 1)]
            found = blocks.run_pieces(torch.cat(parts)[None], pieces, blocks.start, blocks.end)[0]
            for row, part in enumerate(found.split(sizes)):
                outputs[row].append(part)
    except (RuntimeError, TypeError, AttributeError, LookupError):  # an architecture that wants more of attention
        return False
    if any(kv_shapes(cache, blocks) != blocks.kv_shapes for cache in caches):
        return False  # what attention sees is not what is cached: it was expanded on the way (latent attention)
    together = torch.stack([torch.cat(parts) for parts in outputs])
    bound = 1e-3 if blocks.torch_dtype == torch.float32 else 0.1
    return _alike(together, alone, rows, bound=bound)


def gives_equal_bits(blocks: BlockSpan) -> bool:
    """Whether tokens decoded one by one have the bits that they have in one pass, in company, and cut otherwise."""
    start, end = blocks.start, min(blocks.end, blocks.start + EXACT_BLOCKS)
    company, row = samples(blocks, 2, 64)
    tokens = 11
    one_by_one: _Outcome = ([], ProbeCache(start))
    for at in range(tokens):
        piece = Piece(one_by_one[1], 1, at, [1])
        one_by_one[0].append(blocks.run_pieces(row[None, at : at + 1], [piece], start, end))
    whole = blocks.run_pieces(company[None], [Piece(ProbeCache(start), 1, 0, [64])], start, end)
    mixed: _Outcome = ([], ProbeCache(start))
    cut = ProbeCache(start)
    first = blocks.run_pieces(company[None, :24], [Piece(cut, 1, 0, [24])], start, end)
    both = torch.cat([company[24:], row[:tokens]])[None]
    found = blocks.run_pieces(both, [Piece(cut, 1, 24, [40]), Piece(mixed[1], 1, 0, [1] * tokens)], start, end)
    mixed[0].extend(found[:, 40:].split(1, dim=1))
    return torch.equal(torch.cat([first, found[:, :40]], dim=1), whole) and same_bits(mixed, one_by_one)


def _alike(found: Tensor, expected: Tensor, inputs: Tensor, *, bound: float) -> bool:
    error = (found.float() - expected.float()).abs().median()
    return bool(error <= bound * (expected.float() - inputs.float()).abs().median())
