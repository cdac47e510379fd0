"""HiddenStates against numpy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from petals_async.core.hidden import HiddenStates
from petals_async.errors import RequestError

WIDE = {"float32": np.dtype("<u4"), "float16": np.dtype("<u2"), "bfloat16": np.dtype("<u2")}
dtypes = st.sampled_from(sorted(WIDE))
sizes = st.integers(0, 4)


def numbered(dtype, shape):
    """Every number is another one, so that a swapped or doubled piece shows."""
    return np.arange(np.prod(shape), dtype=WIDE[dtype]).reshape(shape)


def states(dtype, array):
    return HiddenStates(dtype, array.shape, array.tobytes())


def same(hidden, array):
    return (hidden.shape, hidden.data) == (array.shape, array.tobytes())


@given(dtypes, sizes, sizes, sizes, st.data())
def test_slice_tokens(dtype, batch, tokens, width, data):
    array = numbered(dtype, (batch, tokens, width))
    start = data.draw(st.integers(0, tokens))
    end = data.draw(st.integers(start, tokens))
    assert same(states(dtype, array).slice_tokens(start, end), array[:, start:end])


@given(dtypes, st.integers(1, 4), sizes, sizes, st.data())
def test_take_rows(dtype, batch, tokens, width, data):
    array = numbered(dtype, (batch, tokens, width))
    rows = data.draw(st.lists(st.integers(0, batch - 1), max_size=6))
    assert same(states(dtype, array).take_rows(rows), array[rows] if rows else array[:0])


@given(dtypes, sizes, sizes, st.lists(sizes, min_size=1, max_size=4))
def test_concat_tokens(dtype, batch, width, lengths):
    array = numbered(dtype, (batch, sum(lengths), width))
    pieces = np.split(array, np.cumsum(lengths)[:-1], axis=1)
    assert same(HiddenStates.concat_tokens([states(dtype, piece) for piece in pieces]), array)


@given(dtypes, sizes, sizes, sizes)
def test_sizes(dtype, batch, tokens, width):
    array = numbered(dtype, (batch, tokens, width))
    hidden = states(dtype, array)
    assert (hidden.batch_size, hidden.num_tokens, hidden.num_bytes) == (batch, tokens, array.nbytes)
    assert (hidden.spec.dtype, hidden.spec.shape, hidden.spec.num_bytes) == (dtype, array.shape, array.nbytes)


@given(st.integers(-2, 5), st.integers(-2, 5))
def test_tokens_that_are_not_there(start, end):
    hidden = states("float32", numbered("float32", (2, 3, 1)))
    if 0 <= start <= end <= 3:
        assert hidden.slice_tokens(start, end).num_tokens == end - start
    else:
        with pytest.raises(RequestError, match="of 3 can't be taken"):
            hidden.slice_tokens(start, end)


@given(st.lists(st.integers(-2, 4), min_size=1, max_size=3).filter(lambda rows: not all(0 <= row < 2 for row in rows)))
def test_rows_that_are_not_there(rows):
    with pytest.raises(RequestError, match="of 2 can't be taken") as caught:
        states("float32", numbered("float32", (2, 3, 1))).take_rows(rows)
    assert caught.value.reason == "BAD_ROWS"


@pytest.mark.parametrize(
    ("dtype", "shape", "num_bytes", "reason"),
    [
        ("float32", (1, 2, 3), 23, "BAD_SHAPE"),
        ("float32", (1, 2, 3), 25, "BAD_SHAPE"),
        ("float16", (1, 2, 3), 24, "BAD_SHAPE"),
        ("float32", (1, 6), 24, "BAD_SHAPE"),
        ("float32", (-1, -2, 3), 24, "BAD_SHAPE"),
        ("float64", (1, 1, 3), 24, "BAD_DTYPE"),
    ],
)
def test_what_is_none(dtype, shape, num_bytes, reason):
    with pytest.raises(RequestError) as caught:
        HiddenStates(dtype, shape, bytes(num_bytes))
    assert caught.value.reason == reason


def test_what_can_not_be_joined():
    one = states("float32", numbered("float32", (2, 3, 1)))
    for other in (
        one.take_rows([0]),
        states("float32", numbered("float32", (2, 3, 2))),
        HiddenStates("float16", (2, 6, 1), bytes(24)),
    ):
        with pytest.raises(RequestError, match="differ"):
            HiddenStates.concat_tokens([one, other])
    with pytest.raises(RequestError, match="nothing"):
        HiddenStates.concat_tokens([])
