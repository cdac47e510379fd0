"""A server's checks: each fault has its reason, and the message names the limit."""

from dataclasses import replace

import pytest

from petals_async.core.hidden import TensorSpec
from petals_async.core.messages import OpenSession, Step
from petals_async.core.server_info import Limits, ServerInfo
from petals_async.core.span import Span
from petals_async.core.validation import check_open, check_step
from petals_async.errors import LengthExceededError, RequestError

LIMITS = Limits(max_step_tokens=16, max_session_tokens=100, max_batch_size=4, max_in_flight_steps=3)
SERVER = ServerInfo(
    server_id="i",
    name="n",
    address="a:1",
    version="0",
    model="m",
    model_fingerprint="f" * 64,
    num_blocks=8,
    hidden_size=6,
    span=Span(2, 5),
    dtype="float16",
    limits=LIMITS,
)
OPEN = OpenSession(
    session_id=b"0123456789abcdef",
    model_fingerprint="f" * 64,
    span=Span(3, 5),
    batch_size=2,
    max_tokens=40,
    wire_dtype="float16",
)
SPEC = TensorSpec("float16", (2, 3, 6))
STEP = Step(1, 0, 3, SPEC, bytes(72))


def test_a_sound_opening():
    check_open(OPEN, SERVER)
    check_open(replace(OPEN, span=Span(2, 5), batch_size=4, max_tokens=100), SERVER)
    check_open(replace(OPEN, span=Span(2, 3), batch_size=1, max_tokens=1), SERVER)


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"session_id": b"short"}, "BAD_REQUEST", "16 random bytes, got 5"),
        ({"model_fingerprint": "0" * 64}, "WRONG_MODEL", "fingerprint '000000000000'"),
        ({"span": Span(1, 4)}, "BAD_SPAN", "holds blocks 2:5, not 1:4"),
        ({"span": Span(4, 6)}, "BAD_SPAN", "holds blocks 2:5, not 4:6"),
        ({"wire_dtype": "float32"}, "BAD_DTYPE", "computes in float16, not float32"),
        ({"adapter": "lora"}, "BAD_ADAPTER", "no adapter 'lora'"),
        ({"batch_size": 0}, "BAD_SHAPE", "batch size must be 1 to 4, got 0"),
        ({"batch_size": 5}, "BAD_SHAPE", "batch size must be 1 to 4, got 5"),
        ({"max_tokens": 0}, "LENGTH_EXCEEDED", "1 to 100 tokens, 0 were"),
        ({"max_tokens": 101}, "LENGTH_EXCEEDED", "1 to 100 tokens, 101 were"),
    ],
)
def test_openings_that_can_not_be(changes, reason, said):
    with pytest.raises(RequestError) as caught:
        check_open(replace(OPEN, **changes), SERVER)
    assert caught.value.reason == reason
    assert said in caught.value.message
    assert isinstance(caught.value, LengthExceededError) == (reason == "LENGTH_EXCEEDED")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"data": None},
        {"token_offset": 37},
        {"row_indices": (1, 1)},
        {"num_outputs": 0},
        {"num_outputs": 3},
        {"num_tokens": 0, "tensor": None, "data": None, "token_offset": 40},
        {"num_tokens": 16, "tensor": TensorSpec("float16", (2, 16, 6)), "data": bytes(384)},
    ],
)
def test_sound_steps(changes):
    check_step(replace(STEP, **changes), session=OPEN, server=SERVER)


@pytest.mark.parametrize(
    ("changes", "reason", "said"),
    [
        ({"token_offset": -1}, "BAD_REQUEST", "offset -1"),
        ({"num_tokens": -1}, "BAD_REQUEST", "-1 tokens"),
        ({"num_tokens": 17}, "LENGTH_EXCEEDED", "at most 16 tokens, got 17"),
        ({"token_offset": 38}, "LENGTH_EXCEEDED", "opened for 40 tokens, this step ends at 41"),
        ({"token_offset": 41, "num_tokens": 0, "tensor": None, "data": None}, "LENGTH_EXCEEDED", "for 40 tokens"),
        ({"row_indices": (0,)}, "BAD_ROWS", "2 numbers below 2"),
        ({"row_indices": (0, 1, 1)}, "BAD_ROWS", "2 numbers below 2"),
        ({"row_indices": (0, 2)}, "BAD_ROWS", "2 numbers below 2"),
        ({"row_indices": (-1, 0)}, "BAD_ROWS", "2 numbers below 2"),
        ({"row_indices": (1, 0), "num_tokens": 0, "tensor": None, "data": None}, "BAD_ROWS", "at least one token"),
        ({"num_outputs": 4}, "BAD_REQUEST", "4 outputs of 3 tokens"),
        ({"num_outputs": -1}, "BAD_REQUEST", "-1 outputs of 3 tokens"),
        ({"num_tokens": 0}, "BAD_SHAPE", "zero tokens"),
        ({"tensor": None, "data": None}, "BAD_SHAPE", "3 tokens without"),
        ({"tensor": TensorSpec("float32", (2, 3, 6))}, "BAD_DTYPE", "must be float16, got float32"),
        ({"tensor": TensorSpec("float16", (2, 3, 7))}, "BAD_SHAPE", "(2, 3, 6), got (2, 3, 7)"),
        ({"tensor": TensorSpec("float16", (3, 2, 6))}, "BAD_SHAPE", "(2, 3, 6), got (3, 2, 6)"),
        ({"tensor": TensorSpec("float16", (6, 6))}, "BAD_SHAPE", "(2, 3, 6), got (6, 6)"),
        ({"data": bytes(71)}, "BAD_SHAPE", "72 bytes, got 71"),
        ({"data": b""}, "BAD_SHAPE", "72 bytes, got 0"),
    ],
)
def test_steps_that_can_not_be(changes, reason, said):
    with pytest.raises(RequestError) as caught:
        check_step(replace(STEP, **changes), session=OPEN, server=SERVER)
    assert caught.value.reason == reason
    assert said in caught.value.message
    assert isinstance(caught.value, LengthExceededError) == (reason == "LENGTH_EXCEEDED")


def test_a_hostile_number_of_rows_does_not_blow_up_the_message():
    with pytest.raises(RequestError) as caught:
        check_step(replace(STEP, row_indices=(7,) * 100_000), session=OPEN, server=SERVER)
    assert len(caught.value.message) < 500
