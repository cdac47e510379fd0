"""The real demo model, cut in two: the same tokens as transformers' own generate."""

from __future__ import annotations

import stat

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from petals_async.abc import BackendResult, BackendStep
from petals_async.engine.backend import TorchBackend
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.edges import Edges
from petals_async.models.resolve import resolve
from petals_async.models.span import BlockSpan

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


def greedy(edges: Edges, backends: list[TorchBackend], prompt: list[int], count: int) -> list[int]:
    """Decode without any sampling, the prompt in one step."""
    caches = [backend.allocate(backend.span, 1, len(prompt) + count) for backend in backends]
    tokens, offset, new = list(prompt), 0, list(prompt)
    for _ in range(count):
        hidden = edges.embed(new, position=offset)
        for backend, cache in zip(backends, caches, strict=True):
            (outcome,) = backend.run([BackendStep(cache, backend.span, offset, hidden)])
            assert isinstance(outcome, BackendResult), outcome
            assert outcome.outputs is not None
            hidden = outcome.outputs
        offset += len(new)
        new = [int(edges.logits(hidden.slice_tokens(len(new) - 1, len(new))).argmax())]
        tokens += new
    return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def checkpoint() -> Checkpoint:
    return Checkpoint.open(resolve("demo"))


def test_what_it_is(checkpoint: Checkpoint) -> None:
    assert (checkpoint.num_blocks, checkpoint.hidden_size, checkpoint.vocab_size) == (30, 576, 49152)
    assert (checkpoint.max_position, checkpoint.eos_token_ids) == (8192, (2,))
    modes = {stat.S_IMODE(file.stat().st_mode) for file in checkpoint.path.iterdir()}
    assert len(modes) == 1, "one of the files has other permissions than the rest"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_greedy_tokens_are_those_of_generate(checkpoint: Checkpoint, dtype: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint.path, dtype=getattr(torch, dtype))
    tokenizer = AutoTokenizer.from_pretrained(checkpoint.path)
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompts = [
        tokenizer("Once upon a time")["input_ids"],
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"],
    ]
    edges = Edges.load(checkpoint, dtype=dtype)
    backends = [TorchBackend(BlockSpan.load(checkpoint, *span, dtype=dtype)) for span in ((0, 17), (17, 30))]
    texts = []
    for prompt in prompts:
        wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
        reference = wanted[0, len(prompt) :].tolist()
        found = greedy(edges, backends, prompt, 24)
        assert len(reference) > 5
        assert found[: len(reference)] == reference
        texts.append(tokenizer.decode(found))
    assert "Paris" in texts[1]
