"""The client's part of a model: what lies before the first block and behind the last one.

The mirror image of a span: the causal-LM class without any block. Its own `forward` embeds, scales, adds positions,
and after the blocks norms, projects, scales and caps; one stand-in in the place of all blocks shows what goes into
them, or gives what came out of them. That is right for every architecture and carries some 0.5 ms of Python a call;
so at load the direct forms (the embedding alone; the modules behind the blocks in a row) are tried, and used where
they give the very same bits.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from petals_async.core.hidden import HiddenStates
from petals_async.errors import RequestError, UnsupportedModelError
from petals_async.models.architecture import Architecture
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.codec import DTYPE_NAMES, from_hidden, to_hidden, torch_dtype
from petals_async.models.cut import BlockList, modules_around, replace_blocks, subclass
from petals_async.models.loading import load_model
from petals_async.models.weights import read_tensors


class Edges:
    """Embeddings, final norm and head of one causal LM. Make one with `load`; not for several threads at once.

    Attributes:
        checkpoint: Where the weights came from.
        dtype: Name of the dtype of weights and hidden states.
        device: Where they lie.
    """

    def __init__(self, checkpoint: Checkpoint, model: Any, blocks: BlockList, device: str) -> None:
        self.checkpoint = checkpoint
        self.device = device
        self.dtype = DTYPE_NAMES[model.dtype]
        self._model = model
        self._blocks = blocks
        self._takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        with torch.no_grad():
            self._direct_embed = self._try_direct_embed()
            self._direct_tail = self._try_direct_tail()

    @classmethod
    def load(cls, checkpoint: Checkpoint, *, dtype: str = "float32", device: str = "cpu") -> Edges:
        """Load everything but the blocks; no block's bytes are read.

        Args:
            checkpoint: An open checkpoint; shards with blocks alone may be absent.
            dtype: float32, float16 or bfloat16: the dtype of the blocks' servers.
            device: As torch names it.

        Raises:
            ConfigurationError: Unknown dtype.
            CheckpointError: A needed file or tensor is missing or damaged; the message names it.
            UnsupportedModelError: The architecture can't be cut; the message says why.
        """
        wanted = torch_dtype(dtype)
        architecture = Architecture.of(checkpoint)
        found: list[BlockList] = []

        def cut(model: Any) -> None:
            found.append(replace_blocks(model, checkpoint.num_blocks, 0, 0))

        model_class = subclass(architecture.causal_class, cut)
        tensors = read_tensors(checkpoint, checkpoint.edge_tensors, dtype=wanted)
        model = load_model(checkpoint, model_class, architecture.own_config(), tensors, wanted, device)
        return cls(checkpoint, model, found[-1], device)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return self.checkpoint.num_blocks

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.checkpoint.hidden_size

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return self.checkpoint.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text, from the generation configuration; may be empty."""
        return self.checkpoint.eos_token_ids

    def embed(self, token_ids: Sequence[int], *, position: int) -> HiddenStates:
        """Return the hidden states that go into the first block, for one row of tokens.

        Args:
            token_ids: n ids, 0 to `vocab_size - 1`; n may be 0.
            position: Index of the first of them in its sequence.

        Returns:
            (1, n, hidden_size), the edges' dtype.

        Raises:
            RequestError: A token id is outside the vocabulary (BAD_TOKEN).
        """
        if not token_ids:
            return HiddenStates(self.dtype, (1, 0, self.hidden_size), b"")
        if not 0 <= min(token_ids) <= max(token_ids) < self.vocab_size:
            wrong = next(token for token in token_ids if not 0 <= token < self.vocab_size)
            raise RequestError(f"token id {wrong} is outside the vocabulary of {self.vocab_size}", reason="BAD_TOKEN")
        return to_hidden(self.embed_tensor(torch.tensor([list(token_ids)], device=self.device), position=position))

    def embed_tensor(self, token_ids: Tensor, *, position: int) -> Tensor:
        """Return what goes into the first block, (batch, n, hidden_size), for ids (batch, n), n at least 1."""
        with torch.no_grad():
            if self._direct_embed is not None:
                return self._direct_embed(token_ids)
            return self._mirror_embed(token_ids, position)

    def logits(self, hidden: HiddenStates | Tensor) -> Tensor:
        """Return the logits for what came out of the last block.

        Args:
            hidden: (batch, n, hidden_size), n at least 1; only the tokens whose logits are wanted.

        Returns:
            (batch, n, vocab_size), in the dtype that transformers gives.

        Raises:
            RequestError: Another shape (BAD_SHAPE) or dtype (BAD_DTYPE).
        """
        states = from_hidden(hidden, device=self.device) if isinstance(hidden, HiddenStates) else hidden
        if states.ndim != 3 or states.shape[1] < 1 or states.shape[2] != self.hidden_size:
            raise RequestError(
                f"hidden states must be (batch, n, {self.hidden_size}), got {tuple(states.shape)}",
                reason="BAD_SHAPE",
            )
        if states.dtype != torch_dtype(self.dtype):
            raise RequestError(f"hidden states must be {self.dtype}, got {states.dtype}", reason="BAD_DTYPE")
        with torch.no_grad():
            if self._direct_tail is not None:
                return self._direct_tail(states)
            return self._mirror_logits(states)

    def _mirror_embed(self, token_ids: Tensor, position: int) -> Tensor:
        self._blocks.entry = None
        self._model.base_model(input_ids=token_ids, use_cache=False, **self._positions(token_ids, position))
        found = self._blocks.exit
        self._blocks.exit = None
        if found is None:
            raise UnsupportedModelError(f"{self.checkpoint.name}: the model's forward ran no block")
        return found  # (B, T, D)

    def _mirror_logits(self, hidden: Tensor) -> Tensor:
        token_ids = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
        self._blocks.entry = hidden
        try:
            answer = self._model(input_ids=token_ids, use_cache=False, **self._positions(token_ids, 0))
        finally:
            self._blocks.entry = self._blocks.exit = None
        logits: Tensor = answer.logits
        return logits  # (B, T, V)

    def _positions(self, token_ids: Tensor, position: int) -> dict[str, Tensor]:
        if not self._takes_positions:
            return {}
        return {"position_ids": torch.arange(position, position + token_ids.shape[1]).unsqueeze(0).to(self.device)}

    def _try_direct_embed(self) -> Callable[[Tensor], Tensor] | None:
        """Return the embedding alone if it gives the mirror's bits, at several ids and positions."""
        table: Callable[[Tensor], Tensor] = self._model.get_input_embeddings()
        last = self.vocab_size - 1
        token_ids = torch.tensor([[0, last, last // 2, last // 3, last // 5, 1 % self.vocab_size]], device=self.device)
        room = (self.checkpoint.max_position or 64) - token_ids.shape[1]
        for position in {0, 1, max(0, min(room, 40))}:
            if not _same_bits(table(token_ids), self._mirror_embed(token_ids, position)):
                return None
        return table

    def _try_direct_tail(self) -> Callable[[Tensor], Tensor] | None:
        """Return the modules that are called behind the blocks, in a row, if that gives the mirror's bits."""
        generator = torch.Generator().manual_seed(0)
        samples = [
            (torch.randn(1, 3, self.hidden_size, generator=generator) * scale).to(self._model.dtype).to(self.device)
            for scale in (0.1, 1.0, 30.0)
        ]
        behind = self._modules_behind(samples[0])
        if not behind:
            return None
        tail: Callable[[Tensor], Tensor] = nn.Sequential(*behind)
        for sample in samples:
            if not _same_bits(tail(sample), self._mirror_logits(sample)):
                return None
        return tail

    def _modules_behind(self, sample: Tensor) -> list[nn.Module]:
        """Return the modules that a pass calls after it has left the place of the blocks, in order."""
        called: list[nn.Module] = []

        def note(module: nn.Module, _inputs: Any, _output: Any) -> None:
            if self._blocks.exit is not None:  # set when the place of the blocks was passed
                called.append(module)

        around = [module for _, _, module in modules_around(self._model, self._blocks)]
        hooks = [module.register_forward_hook(note) for module in around]
        try:
            self._mirror_logits(sample)
        finally:
            for hook in hooks:
                hook.remove()
        return called


def _same_bits(left: Tensor, right: Tensor) -> bool:
    return left.dtype == right.dtype and left.shape == right.shape and bool(torch.equal(left, right))
