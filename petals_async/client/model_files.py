"""What a client loads of a model: edges, tokenizer, generation defaults. Runs on the client's own thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from petals_async.core.hidden import HiddenStates
from petals_async.engine.thread import Executor
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.resolve import resolve

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json", "spiece.model")
"""A model directory with none of these has no tokenizer."""


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """The client's part of a model, loaded."""

    edges: Any
    tokenizer: Any
    generation_defaults: Any


def open_checkpoint(model: str, progress: Callable[[str], None] | None = None) -> Checkpoint:
    """Resolve a model and open its checkpoint; imports no torch.

    Raises:
        CheckpointError: There is no such model, or its files are missing or damaged.
    """
    return Checkpoint.open(resolve(model, edges=True, progress=progress))


def load_model_files(checkpoint: Checkpoint, dtype: str, threads: int | None) -> ModelFiles:
    """Load embeddings and head, the tokenizer if there is one, and the generation defaults; imports torch.

    Raises:
        CheckpointError: A needed file is missing or damaged.
    """
    import torch

    from petals_async.models.edges import Edges

    if threads is not None:
        torch.set_num_threads(threads)
    edges = Edges.load(checkpoint, dtype=dtype)
    return ModelFiles(edges, _tokenizer(checkpoint.path), _generation_defaults(checkpoint.path))


def _tokenizer(path: Path) -> Any:
    if not any((path / name).is_file() for name in TOKENIZER_FILES):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def _generation_defaults(path: Path) -> Any:
    from transformers import AutoConfig, GenerationConfig

    if (path / "generation_config.json").is_file():
        return GenerationConfig.from_pretrained(path)
    return GenerationConfig.from_model_config(AutoConfig.from_pretrained(path))


class ThreadedEdges:
    """The edges, run on the client's own thread and never on the event loop.

    Args:
        edges: Embeddings and head.
        executor: The thread.
    """

    def __init__(self, edges: Any, executor: Executor) -> None:
        self._edges = edges
        self.executor = executor

    async def embed(self, token_ids: Sequence[int], *, position: int) -> HiddenStates:
        """Return the hidden states of one row of tokens, (1, n, hidden_size)."""
        hidden: HiddenStates = await self.executor.call(lambda: self._edges.embed(token_ids, position=position))
        return hidden

    async def logits(self, hidden: HiddenStates) -> Any:
        """Return the logits, (batch, n, vocab_size)."""
        return await self.executor.call(lambda: self._edges.logits(hidden))
