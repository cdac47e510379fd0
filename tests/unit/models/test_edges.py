"""The client's part of a model: the short forms where they are the same bits, transformers' own way where not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, build

from petals_async.errors import RequestError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.codec import from_hidden, to_hidden
from petals_async.models.edges import Edges

TINY = {tiny.name: tiny for tiny in ARCHITECTURES}


def first_block_input(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """What transformers hands to block 0 of the whole model."""
    seen: list[torch.Tensor] = []
    block = next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0]
    block.register_forward_pre_hook(lambda _module, inputs, kwargs: seen.append(inputs[0]), with_kwargs=True)
    with torch.no_grad():
        model(input_ids=tokens, use_cache=False)
    return seen[0]


@pytest.mark.parametrize(
    ("name", "embeds_directly", "has_direct_tail"),
    [
        ("llama", True, True),
        ("llama_tied", True, True),
        ("gpt2", False, True),  # adds learned positions
        ("opt_projected", False, True),
        ("bloom", False, True),  # norms its embeddings
        ("granite", False, False),  # scales both
        ("gemma2", True, False),  # caps its logits
        ("cohere", True, False),  # scales its logits
    ],
)
def test_short_forms_are_used_only_where_they_are_the_same_bits(
    name: str, embeds_directly: bool, has_direct_tail: bool, tmp_path: Path
) -> None:
    model = build(TINY[name], tmp_path)
    edges = Edges.load(Checkpoint.open(tmp_path))
    assert (edges._direct_embed is not None, edges._direct_tail is not None) == (embeds_directly, has_direct_tail)
    tokens = torch.arange(3, 33).unsqueeze(0)
    wanted = first_block_input(model, tokens)
    assert torch.equal(from_hidden(edges.embed(tokens[0].tolist(), position=0)), wanted)
    later = from_hidden(edges.embed(tokens[0, 20:].tolist(), position=20))
    assert torch.equal(later, wanted[:, 20:])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_take_states_and_tensors(dtype: str, tmp_path: Path) -> None:
    build(TINY["llama"], tmp_path)
    edges = Edges.load(Checkpoint.open(tmp_path), dtype=dtype)
    hidden = torch.randn(2, 3, 32).to(getattr(torch, dtype))
    found = edges.logits(to_hidden(hidden))
    assert found.shape == (2, 3, 96)
    assert torch.equal(found, edges.logits(hidden))
    assert not found.requires_grad
    with pytest.raises(RequestError, match="31"):
        edges.logits(torch.zeros(1, 1, 31))
    with pytest.raises(RequestError, match=dtype):
        edges.logits(torch.zeros(1, 1, 32, dtype=torch.float16))


def test_no_blocks_weights_are_held(tmp_path: Path) -> None:
    model = build(TINY["llama_tied"], tmp_path)
    edges = Edges.load(Checkpoint.open(tmp_path))
    held = {parameter.data_ptr(): parameter.nbytes for parameter in edges._model.parameters()}
    table = model.get_input_embeddings().weight
    assert sum(held.values()) == table.nbytes + 32 * 4
    assert (edges.num_blocks, edges.hidden_size, edges.vocab_size, edges.eos_token_ids) == (4, 32, 96, (2,))
