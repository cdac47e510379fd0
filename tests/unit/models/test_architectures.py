"""Every architecture: chained spans and edges give what transformers gives for the whole model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from architectures import ARCHITECTURES, COMMON, Tiny, build

from petals_async.abc import BackendResult, BackendStep
from petals_async.core.hidden import HiddenStates
from petals_async.core.span import Span
from petals_async.engine.backend import TorchBackend
from petals_async.engine.kv import KvCache
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.codec import from_hidden, to_hidden
from petals_async.models.edges import Edges
from petals_async.models.span import BlockSpan

MAX_TOKENS = 40


@dataclass
class Chain:
    """The whole model in three pieces: edges, and a span each for blocks 0:1, 1:3 and 3:4 (the last holds 2:4)."""

    edges: Edges
    backends: list[TorchBackend]
    caches: list[KvCache]
    spans: tuple[Span, ...] = (Span(0, 1), Span(1, 3), Span(3, 4))

    @classmethod
    def open(cls, checkpoint: Checkpoint, batch_size: int) -> Chain:
        held = [(0, 1), (1, 3), (2, 4)]
        backends = [TorchBackend(BlockSpan.load(checkpoint, start, end)) for start, end in held]
        chain = cls(Edges.load(checkpoint), backends, [])
        chain.restart(batch_size)
        return chain

    def restart(self, batch_size: int) -> None:
        self.caches = [
            backend.allocate(span, batch_size, MAX_TOKENS)
            for backend, span in zip(self.backends, self.spans, strict=True)
        ]

    def step(self, tokens: torch.Tensor, offset: int, rows: tuple[int, ...] = ()) -> torch.Tensor:
        """Send tokens (B, n) through everything at an offset, and return logits (B, n, V)."""
        embedded = [from_hidden(self.edges.embed(row.tolist(), position=offset)) for row in tokens]
        hidden = to_hidden(torch.cat(embedded))
        for backend, span, cache in zip(self.backends, self.spans, self.caches, strict=True):
            hidden = run_step(backend, BackendStep(cache, span, offset, hidden, row_indices=rows))
        return self.edges.logits(hidden)


def run_step(backend: TorchBackend, step: BackendStep) -> HiddenStates:
    (outcome,) = backend.run([step])
    assert isinstance(outcome, BackendResult), outcome
    assert outcome.outputs is not None
    return outcome.outputs


def assert_close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(found, wanted, atol=1e-5 * max(1.0, float(wanted.abs().max())), rtol=1e-5)


@torch.no_grad()
def reference(model: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Logits (B, n, V) of the whole model, without any cache."""
    found: torch.Tensor = model(input_ids=tokens, use_cache=False).logits
    return found


@pytest.mark.parametrize("tiny", ARCHITECTURES, ids=str)
def test_chained_spans_and_edges_give_the_whole_model(tiny: Tiny, tmp_path: Path) -> None:
    model = build(tiny, tmp_path)
    chain = Chain.open(Checkpoint.open(tmp_path), batch_size=3)
    tokens = torch.randint(3, 96, (3, 26), generator=torch.Generator().manual_seed(1))
    wanted = reference(model, tokens)
    assert wanted.std() > 0.05, "logits too flat to show a mistake"

    # prefill in chunks
    for start, end in ((0, 9), (9, 10), (10, 16)):
        assert_close(chain.step(tokens[:, start:end], start), wanted[:, start:end])
    # decode
    for position in range(16, 20):
        assert_close(chain.step(tokens[:, position : position + 1], position), wanted[:, position : position + 1])
    # rollback over more than a window, and on with other tokens
    other = torch.cat([tokens[:, :7], tokens[:, 12:24]], dim=1)
    wanted = reference(model, other)
    assert_close(chain.step(other[:, 7:17], 7), wanted[:, 7:17])
    # beam ancestry: rows 2, 0, 0 go on
    rows = (2, 0, 0)
    gathered = torch.cat([other[list(rows), :17], tokens[:, 20:22]], dim=1)
    wanted = reference(model, gathered)
    assert_close(chain.step(gathered[:, 17:18], 17, rows), wanted[:, 17:18])
    assert_close(chain.step(gathered[:, 18:19], 18), wanted[:, 18:19])


PARTS = {
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "intermediate_size": 48,
        "image_size": 28,
        "patch_size": 14,
    }
}


@pytest.mark.parametrize("kind", ["gemma3", "mistral3"])
def test_the_language_part_of_a_model_that_also_sees(kind: str, tmp_path: Path) -> None:
    text = {**COMMON, "head_dim": 8}
    if kind == "gemma3":
        config = transformers.Gemma3Config(text_config=text, **PARTS, mm_tokens_per_image=4)
        model_class = transformers.Gemma3ForConditionalGeneration
    else:
        parts = {"vision_config": {**PARTS["vision_config"], "model_type": "pixtral"}}
        config = transformers.Mistral3Config(text_config={**text, "model_type": "mistral"}, **parts)
        model_class = transformers.Mistral3ForConditionalGeneration
    torch.manual_seed(0)
    model_class(config).float().save_pretrained(tmp_path)
    model = model_class.from_pretrained(tmp_path, dtype=torch.float32).eval()
    chain = Chain.open(Checkpoint.open(tmp_path), batch_size=2)
    tokens = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
    wanted = reference(model, tokens)
    for start, end in ((0, 6), (6, 9)):
        assert_close(chain.step(tokens[:, start:end], start), wanted[:, start:end])
