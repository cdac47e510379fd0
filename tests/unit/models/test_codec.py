"""Tensors to bytes and back, bit for bit."""

from __future__ import annotations

import pytest
import torch

from petals_async.core.hidden import HiddenStates, TensorSpec
from petals_async.errors import ConfigurationError, RequestError
from petals_async.models.codec import TORCH_DTYPES, from_bytes, from_hidden, to_bytes, to_hidden, torch_dtype

WORDS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16}


def any_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """A tensor of random bit patterns: every kind of number, NaN payloads among them."""
    limits = torch.iinfo(WORDS[dtype])
    generator = torch.Generator().manual_seed(0)
    return torch.randint(limits.min, limits.max, shape, dtype=WORDS[dtype], generator=generator).view(dtype)


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_case_63_round_trips_are_bit_exact(name: str) -> None:
    tensor = any_bits(TORCH_DTYPES[name], (2, 7, 12))
    back = from_hidden(to_hidden(tensor))
    assert back.dtype == tensor.dtype
    assert torch.equal(back.view(WORDS[tensor.dtype]), tensor.view(WORDS[tensor.dtype]))


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_views_are_written_in_c_order(name: str) -> None:
    tensor = any_bits(TORCH_DTYPES[name], (12, 3, 7)).permute(1, 2, 0)[:, 1::2]
    assert to_bytes(tensor) == to_bytes(tensor.clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize("name", TORCH_DTYPES)
def test_no_tokens_are_no_bytes(name: str) -> None:
    hidden = to_hidden(torch.empty(2, 0, 8, dtype=TORCH_DTYPES[name]))
    assert hidden == HiddenStates(name, (2, 0, 8), b"")
    assert from_hidden(hidden).shape == (2, 0, 8)


def test_bytes_are_little_endian_and_the_tensor_owns_its_memory() -> None:
    hidden = HiddenStates("float32", (1, 1, 1), bytes.fromhex("0000803f"))
    tensor = from_hidden(hidden)
    assert tensor.item() == 1.0
    tensor.fill_(2.0)
    assert hidden.data == bytes.fromhex("0000803f")


def test_what_is_wrong_is_refused() -> None:
    for tensor in (torch.zeros(2, 3), torch.zeros(1, 1, 1, dtype=torch.int64)):
        with pytest.raises(RequestError):
            to_hidden(tensor)
    with pytest.raises(RequestError, match="8 bytes"):
        from_bytes(TensorSpec("float32", (2,)), b"123")
    with pytest.raises(ConfigurationError, match="int8"):
        torch_dtype("int8")
