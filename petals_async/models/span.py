"""A span of blocks of one causal language model, cut out of transformers' own base model."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from petals_async.core.span import Span
from petals_async.errors import RequestError, UnsupportedModelError
from petals_async.models import trials
from petals_async.models.architecture import Architecture, can_fuse
from petals_async.models.attention import ATTENTION_NAME, FusedBatch, Piece
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.codec import DTYPE_NAMES, torch_dtype
from petals_async.models.cut import BlockList, neutralise_around, replace_blocks, subclass
from petals_async.models.direct import DirectPass, observe
from petals_async.models.loading import load_model
from petals_async.models.row_linear import RowLinear, all_exact, replace_linears
from petals_async.models.weights import digest, read_tensors


class BlockSpan:
    """Consecutive transformer blocks of one causal LM, ready to run. Make one with `load`.

    Not for several threads at once: what a pass needs is kept in the model while it runs.

    Attributes:
        checkpoint: Where the weights came from.
        span: The blocks held.
        dtype: Name of the dtype of weights and hidden states.
        device: Where they lie.
        kv_shapes: One for each block held, from one probe token.
        fused: Whether steps of several sessions run in one pass (`run_pieces`).
        exact: Whether a token's bits are the same alone, in any batch, and in a replay of many at once; tried at load.
    """

    def __init__(self, checkpoint: Checkpoint, span: Span, model: Any, blocks: BlockList, device: str) -> None:
        self.checkpoint = checkpoint
        self.span = span
        self.device = device
        self._model = model
        self._blocks = blocks
        self.torch_dtype: torch.dtype = model.dtype
        self.dtype = DTYPE_NAMES[model.dtype]
        parameters = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._direct: DirectPass | None = None
        self.fused = False
        self.kv_shapes = self._probe()
        trials.check_steps(self)
        if can_fuse(model):
            self._fuse()
        self._try_direct()
        self.exact = self.fused and all_exact(blocks) and trials.gives_equal_bits(self)

    @classmethod
    def load(
        cls,
        checkpoint: Checkpoint,
        start: int,
        end: int,
        *,
        dtype: str = "float32",
        device: str = "cpu",
        progress: Callable[[int, int], None] | None = None,
    ) -> BlockSpan:
        """Load the blocks `[start, end)`; only their tensors' bytes are read.

        Args:
            checkpoint: An open checkpoint; shards without tensors of these blocks may be absent.
            start: First block.
            end: One behind the last block.
            dtype: float32, float16 or bfloat16.
            device: As torch names it.
            progress: Called with (blocks read, blocks in all) after each block.

        Raises:
            RequestError: The model has no such blocks (BAD_SPAN).
            ConfigurationError: Unknown dtype.
            CheckpointError: A needed file or tensor is missing or damaged; the message names it.
            UnsupportedModelError: The architecture can't be cut; the message says why.
        """
        span = Span(start, end)
        if end > checkpoint.num_blocks:
            raise RequestError(
                f"blocks {span} of {checkpoint.name}, which has {checkpoint.num_blocks}", reason="BAD_SPAN"
            )
        wanted = torch_dtype(dtype)
        architecture = Architecture.of(checkpoint)
        found: list[BlockList] = []

        def cut(model: Any) -> None:
            found.append(replace_blocks(model, checkpoint.num_blocks, start, end))
            neutralise_around(model, found[0])

        model_class = subclass(architecture.base_class, cut)
        keeps_float32 = getattr(model_class, "_keep_in_fp32_modules", None)
        tensors = _read_blocks(checkpoint, span, None if keeps_float32 else wanted, progress)
        model = load_model(checkpoint, model_class, architecture.own_config(), tensors, wanted, device)
        return cls(checkpoint, span, model, found[0], device)

    @property
    def start(self) -> int:
        """First block held."""
        return self.span.start

    @property
    def end(self) -> int:
        """One behind the last block held."""
        return self.span.end

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return self.checkpoint.num_blocks

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.checkpoint.hidden_size

    @property
    def max_position(self) -> int | None:
        """Most tokens of one sequence, or None where the model states no limit."""
        return self.checkpoint.max_position

    @property
    def bytes_per_token(self) -> int:
        """Exact KV bytes of one token of one row, over all blocks held."""
        return sum(shape.num_bytes for shape in self.kv_shapes)

    @property
    def kernels(self) -> str:
        """How attention and each kind of linear layer are computed, in one line."""
        linears = "; ".join(
            sorted({part.extra_repr() for part in self._blocks.modules() if isinstance(part, RowLinear)})
        )
        return f"{self._model.config._attn_implementation} attention; {linears or 'linear layers as they are'}"

    @cached_property
    def block_digests(self) -> tuple[str, ...]:
        """SHA-256 over each held block's weights as loaded, in order; made at first use (about 1 s per GB)."""
        return tuple(digest(block) for block in self._blocks._modules.values() if block is not None)

    def block_digest(self, block: int) -> str:
        """Return the digest of one block that is held.

        Args:
            block: Its index in the whole model.

        Raises:
            RequestError: The block is not held (BAD_SPAN).
        """
        if block not in self.span:
            raise RequestError(f"block {block} is not in {self.span}", reason="BAD_SPAN")
        return self.block_digests[block - self.start]

    def run(self, hidden: Tensor, cache: Cache, *, token_offset: int, start: int, end: int) -> Tensor:
        """Run the blocks `[start, end)` over new tokens and append their keys and values to the cache.

        Args:
            hidden: Input activations, (batch, tokens, hidden_size), at least one token, this span's dtype and device.
            cache: A cache of transformers that holds exactly `token_offset` tokens for each of these blocks.
            token_offset: Index of the first of these tokens in the sequence, in tokens.
            start: First block to run, held here.
            end: One behind the last block to run, held here.

        Returns:
            Output activations, same shape.

        Raises:
            RequestError: Blocks that are not held (BAD_SPAN), or a wrong shape or dtype (BAD_SHAPE, BAD_DTYPE).
        """
        self._check(hidden, start, end)
        num_tokens = hidden.shape[1]
        if self.fused:
            piece = Piece(cache, hidden.shape[0], token_offset, [num_tokens])
            return self.run_pieces(hidden.reshape(1, -1, self.hidden_size), [piece], start, end).view(hidden.shape)
        positions = torch.arange(token_offset, token_offset + num_tokens, device=hidden.device).unsqueeze(0)  # (1, T)
        with torch.no_grad():
            if num_tokens == 1 and self._direct is not None:
                return self._direct.run(self._blocks.kept(start, end), hidden, positions, cache)
            return self._run_model(hidden, cache, positions, start, end)

    def run_pieces(self, hidden: Tensor, pieces: Sequence[Piece], start: int, end: int) -> Tensor:
        """Run the blocks `[start, end)` over new tokens of several sessions in one pass; only if `fused`.

        Args:
            hidden: (1, tokens of all rows of all pieces, hidden_size): piece by piece, row by row, token by token.
            pieces: Where the tokens belong; each session once. Their caches are appended to.
            start: First block to run, held here.
            end: One behind the last block to run, held here.

        Returns:
            Output activations, same shape.
        """
        positions = [
            position
            for piece in pieces
            for _row in range(piece.num_rows)
            for position in range(piece.token_offset, piece.token_offset + piece.num_tokens)
        ]
        batch = FusedBatch(pieces)
        at = torch.tensor([positions], device=hidden.device)  # (1, T)
        with torch.no_grad():
            if self._direct is not None:
                return self._direct.run(self._blocks.kept(start, end), hidden, at, batch)
            return self._run_model(hidden, batch, at, start, end)

    def _run_model(self, hidden: Tensor, cache: Cache, positions: Tensor, start: int, end: int) -> Tensor:
        """Run the blocks by the base model's own forward."""
        self._blocks.select(start, end)
        self._blocks.entry = hidden  # (B, T, D)
        arguments: dict[str, Any] = {self._cache_keyword: cache}
        if self._takes_positions:
            arguments["position_ids"] = positions
        try:
            self._model(inputs_embeds=hidden, use_cache=True, **arguments)
            output = self._blocks.exit
        finally:
            self._blocks.entry = self._blocks.exit = None
        if output is None:
            raise UnsupportedModelError(f"{self.checkpoint.name}: the model's forward ran no block")
        return output  # (B, T, D)

    def _fuse(self) -> None:
        """Take our own attention and linear layers, if they give what transformers' own give."""
        alone = trials.outputs_alone(self)
        own = self._model.config._attn_implementation
        self._model.config._attn_implementation = ATTENTION_NAME
        self.fused = trials.fuses(self, alone)
        if not self.fused:
            self._model.config._attn_implementation = own
            return
        _ = self.block_digests  # of the weights as loaded: packed ones have none
        replace_linears(self._blocks)

    def _try_direct(self) -> None:
        """Take the direct way if it gives the same bits as the base model's forward."""
        blocks = self._blocks.kept(self.start, self.end)
        hidden = trials.samples(self, 2, 6)
        calls = observe(blocks, lambda: trials.steps(self, hidden, [1]))
        expected = trials.steps(self, hidden, [1, 1, 3, 1])
        self._direct = DirectPass.like(self._model, calls, masked=not self.fused)
        if self._direct is not None and not trials.same_bits(trials.steps(self, hidden, [1, 1, 3, 1]), expected):
            self._direct = None

    def _check(self, hidden: Tensor, start: int, end: int) -> None:
        if Span(start, end) not in self.span:
            raise RequestError(f"blocks {start}:{end} are not all in {self.span}", reason="BAD_SPAN")
        if hidden.ndim != 3 or hidden.shape[1] < 1 or hidden.shape[2] != self.hidden_size:
            raise RequestError(
                f"hidden states must be (batch, tokens, {self.hidden_size}), got {tuple(hidden.shape)}",
                reason="BAD_SHAPE",
            )
        if hidden.dtype != self.torch_dtype:
            raise RequestError(f"hidden states must be {self.dtype}, got {hidden.dtype}", reason="BAD_DTYPE")

    def _probe(self) -> tuple[trials.KvShape, ...]:
        """Run one token to learn what each block really stores."""
        cache = trials.ProbeCache(self.start)
        hidden = torch.zeros(1, 1, self.hidden_size, dtype=self.torch_dtype, device=self.device)
        try:
            self.run(hidden, cache, token_offset=0, start=self.start, end=self.end)
        except (TypeError, AttributeError, LookupError) as error:
            raise UnsupportedModelError(
                f"{self.checkpoint.name}: {type(self._model).__name__} can't run without what lies around its "
                f"blocks ({type(error).__name__}: {error})"
            ) from error
        return trials.kv_shapes(cache, self)


def _read_blocks(
    checkpoint: Checkpoint, span: Span, dtype: torch.dtype | None, progress: Callable[[int, int], None] | None
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for done, block in enumerate(range(span.start, span.end), start=1):
        tensors |= read_tensors(checkpoint, checkpoint.block_tensors(block), dtype=dtype)
        if progress is not None:
            progress(done, len(span))
    return tensors
