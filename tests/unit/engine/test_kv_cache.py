"""The KV cache: exact bytes, truncation, row permutation, forks, and bits equal to transformers' own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from petals_async.core.span import Span
from petals_async.engine.backend import TorchBackend
from petals_async.engine.kv import KvCache
from petals_async.errors import LengthExceededError, RequestError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.span import BlockSpan
from petals_async.models.trials import KvShape
from petals_async.testing.tiny import make_tiny_llama

SHAPE = KvShape(2, 4, 2, 3, torch.float32)


def filled(length: int = 5, *, rows: int = 3, max_tokens: int = 8) -> KvCache:
    """A cache over blocks 1:3 whose numbers tell block, row and token."""
    cache = KvCache(Span(1, 3), [SHAPE, SHAPE], rows, max_tokens)
    for block in (1, 2):
        for token in range(length):
            number = 100.0 * block + token + 10 * torch.arange(rows).reshape(rows, 1, 1, 1)
            cache.update(number.expand(rows, 2, 1, 4), number.expand(rows, 2, 1, 3), block)
    return cache


def numbers(cache: KvCache, block: int) -> list[list[float]]:
    """What a block's values hold, (rows, length)."""
    layer = cache.layers[block]
    found: list[list[float]] = layer.values[:, 0, : layer.length, 0].tolist()
    return found


@pytest.mark.parametrize(
    ("kv_heads", "dtype", "item_bytes"), [(2, "float32", 4), (1, "bfloat16", 2), (4, "float16", 2)]
)
def test_case_34_bytes_of_grouped_queries_are_exact(tmp_path: Path, kv_heads: int, dtype: str, item_bytes: int) -> None:
    checkpoint = Checkpoint.open(make_tiny_llama(tmp_path, num_kv_heads=kv_heads))
    backend = TorchBackend(BlockSpan.load(checkpoint, 0, 3, dtype=dtype))
    for span, rows, tokens in ((Span(0, 3), 1, 7), (Span(1, 3), 5, 64)):
        expected = 2 * len(span) * kv_heads * 16 * tokens * item_bytes * rows
        assert backend.kv_bytes(span, rows, tokens) == expected
        cache = backend.allocate(span, rows, tokens)
        assert cache.nbytes == expected
        held = sum(t.untyped_storage().nbytes() for layer in cache.held for t in (layer.keys, layer.values))
        assert held == expected
    assert backend.blocks.bytes_per_token == 2 * 3 * kv_heads * 16 * item_bytes


def test_seek_truncates_every_block_even_after_a_step_that_failed_halfway() -> None:
    cache = filled()
    cache.held[0].length = 7  # as if the first block had run and the second had not
    cache.seek(4)
    assert [layer.length for layer in cache.held] == [4, 4]
    assert numbers(cache, 2)[1] == [210, 211, 212, 213]
    for offset in (-1, 5):
        with pytest.raises(RequestError):
            cache.seek(offset)
    assert cache.length == 4
    cache.seek(0)
    assert (cache.length, cache.get_seq_length(), cache.get_mask_sizes(3, 0)) == (0, 0, (3, 0))


def test_permute_gathers_rows_of_every_block() -> None:
    cache = filled()
    cache.permute((2, 0, 0))
    assert numbers(cache, 1) == [[120, 121, 122, 123, 124], [100, 101, 102, 103, 104], [100, 101, 102, 103, 104]]
    assert numbers(cache, 2)[0] == [220, 221, 222, 223, 224]
    for rows in ((0, 1), (0, 1, 3), (0, 1, -1), (0, 1, 2, 0)):
        with pytest.raises(RequestError):
            cache.permute(rows)


def test_a_fork_has_its_own_memory() -> None:
    source, target = filled(), filled(0)
    target.copy_prefix(source, 3)
    assert numbers(target, 2) == [row[:3] for row in numbers(source, 2)]
    source.permute((1, 1, 1))
    assert numbers(target, 2)[0] == [200, 201, 202]
    small, other_rows = filled(0, max_tokens=2), filled(0, rows=2)
    for wrong, count in ((target, 6), (small, 3), (other_rows, 1), (target, -1)):
        with pytest.raises(RequestError):
            wrong.copy_prefix(source, count)


def test_more_tokens_than_allocated_are_refused_with_both_numbers() -> None:
    cache = filled(8)
    with pytest.raises(LengthExceededError, match=r"9 .* 8"):
        cache.update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 3), 1)
    assert cache.length == 8


def test_a_block_outside_the_span_is_refused() -> None:
    with pytest.raises(RequestError):
        filled().update(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 3), 0)
    for rows, tokens in ((0, 4), (1, 0)):
        with pytest.raises(RequestError):
            KvCache(Span(0, 1), [SHAPE], rows, tokens)
    with pytest.raises(RequestError):
        KvCache(Span(0, 2), [SHAPE], 1, 1)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_outputs_are_bitwise_those_of_the_dynamic_cache(tmp_path: Path, dtype: str) -> None:
    blocks = BlockSpan.load(Checkpoint.open(make_tiny_llama(tmp_path)), 0, 3, dtype=dtype)
    mine, theirs = KvCache(blocks.span, blocks.kv_shapes, 2, 32), transformers.DynamicCache()
    generator = torch.Generator().manual_seed(0)
    position = 0
    for count in (5, 1, 1, 7, 1):
        hidden = torch.randn(2, count, 64, generator=generator).to(getattr(torch, dtype))
        outputs = [blocks.run(hidden, cache, token_offset=position, start=0, end=3) for cache in (mine, theirs)]
        assert torch.equal(*outputs)
        position += count
    assert mine.length == position
