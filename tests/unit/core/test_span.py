import pytest

from petals_async.core.span import Span
from petals_async.errors import RequestError


def test_a_span_is_its_blocks():
    for start in range(4):
        for end in range(start + 1, 5):
            span, blocks = Span(start, end), set(range(start, end))
            assert len(span) == len(blocks)
            assert {block for block in range(-1, 6) if block in span} == blocks
            assert Span.parse(str(span)) == span
            for other_start in range(4):
                for other_end in range(other_start + 1, 5):
                    other, others = Span(other_start, other_end), set(range(other_start, other_end))
                    assert (other in span) == (others <= blocks)
                    common = span.overlap(other)
                    assert (set(range(common.start, common.end)) if common else set()) == blocks & others


@pytest.mark.parametrize(("start", "end"), [(0, 0), (3, 3), (3, 2), (-1, 2), (-2, -1)])
def test_what_is_no_span(start, end):
    with pytest.raises(RequestError, match=f"0 <= start < end, got {start}:{end}") as caught:
        Span(start, end)
    assert caught.value.reason == "BAD_SPAN"


@pytest.mark.parametrize("text", ["", "3", ":", "3:", ":4", "a:b", "-1:4", "1:2:3", "1-4", "4:1", "²:³"])
def test_what_can_not_be_read(text):
    with pytest.raises(RequestError) as caught:
        Span.parse(text)
    assert caught.value.reason == "BAD_SPAN"
