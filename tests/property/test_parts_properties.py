"""Cutting tensors into parts, and putting parts together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from petals_async.core.messages import MAX_INLINE_BYTES, PART_BYTES, Part
from petals_async.core.parts import MAX_PART_BYTES, PartAssembler, cut, travels_inline
from petals_async.errors import RequestError


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1, max_size=8))
def test_parts_of_any_size_come_together(pieces):
    whole = b"".join(pieces)
    assembler, offset = PartAssembler(len(whole)), 0
    for piece in pieces:
        assert not assembler.complete
        assembler.add(Part(offset, piece))
        offset += len(piece)
        assert assembler.received_bytes == offset
    assert assembler.complete
    assert assembler.join() == whole


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(-2, 45), st.integers(0, 45)), max_size=8))
def test_only_the_next_piece_is_taken(total, parts):
    """The naive receiver: a growing buffer; whatever is refused changes nothing."""
    assembler, buffer = PartAssembler(total), b""
    for offset, size in parts:
        part = Part(offset, bytes([offset % 251]) * size)
        fits = offset == len(buffer) and 0 < size <= total - len(buffer)
        if fits:
            assembler.add(part)
            buffer += part.data
        else:
            with pytest.raises(RequestError) as caught:
                assembler.add(part)
            assert caught.value.reason == "BAD_PART"
        assert (assembler.received_bytes, assembler.complete) == (len(buffer), len(buffer) == total)
        assert assembler.join() == buffer


@pytest.mark.parametrize("size", [0, 1, PART_BYTES - 1, PART_BYTES, PART_BYTES + 1, 3 * PART_BYTES])
def test_what_is_cut_comes_together(size):
    data = (bytes(range(256)) * (size // 256 + 1))[:size]
    parts = list(cut(data))
    assert all(0 < len(part.data) <= PART_BYTES for part in parts)
    assembler = PartAssembler(size)
    for part in parts:
        assembler.add(part)
    assert assembler.complete
    assert assembler.join() == data


@pytest.mark.parametrize(("offset", "size"), [(0, 0), (0, 5), (1, 1), (-1, 1), (4, 1)])
def test_first_parts_that_can_not_be(offset, size):
    assembler = PartAssembler(4)
    with pytest.raises(RequestError) as caught:
        assembler.check(Part(offset, bytes(size)))
    assert caught.value.reason == "BAD_PART"


def test_limits():
    assert travels_inline(MAX_INLINE_BYTES)
    assert not travels_inline(MAX_INLINE_BYTES + 1)
    assembler = PartAssembler(4 * MAX_PART_BYTES)
    with pytest.raises(RequestError, match=f"1 to {MAX_PART_BYTES} bytes"):
        assembler.add(Part(0, bytes(MAX_PART_BYTES + 1)))
    assembler.add(Part(0, bytes(MAX_PART_BYTES)))
    with pytest.raises(RequestError, match=f"expected byte {MAX_PART_BYTES}"):
        assembler.add(Part(0, b"1"))
