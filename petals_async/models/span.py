"""A span of blocks of one causal language model, cut out of transformers' own base model."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache

from petals_async.core.span import Span
from petals_async.errors import RequestError, UnsupportedModelError
from petals_async.models.architecture import Architecture
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.codec import DTYPE_NAMES, torch_dtype
from petals_async.models.cut import BlockList, neutralise_around, replace_blocks, subclass
from petals_async.models.direct import DirectDecode, observe
from petals_async.models.loading import load_model
from petals_async.models.weights import digest, read_tensors


@dataclass(frozen=True, slots=True)
class KvShape:
    """Keys and values of one token in one block: key and value vectors may differ in number and size (MLA).

    Attributes:
        key_heads: Key vectors a token.
        key_size: Numbers of one key vector.
        value_heads: Value vectors a token.
        value_size: Numbers of one value vector.
        dtype: Of both.
    """

    key_heads: int
    key_size: int
    value_heads: int
    value_size: int
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes of one token of one row in this block."""
        numbers = self.key_heads * self.key_size + self.value_heads * self.value_size
        return numbers * int(self.dtype.itemsize)


class BlockSpan:
    """Consecutive transformer blocks of one causal LM, ready to run. Make one with `load`.

    Not for several threads at once: what a pass needs is kept in the model while it runs.

    Attributes:
        checkpoint: Where the weights came from.
        span: The blocks held.
        dtype: Name of the dtype of weights and hidden states.
        device: Where they lie.
        kv_shapes: One for each block held, from one probe token.
    """

    def __init__(self, checkpoint: Checkpoint, span: Span, model: Any, blocks: BlockList, device: str) -> None:
        self.checkpoint = checkpoint
        self.span = span
        self.device = device
        self._model = model
        self._blocks = blocks
        self._torch_dtype: torch.dtype = model.dtype
        self.dtype = DTYPE_NAMES[model.dtype]
        parameters = inspect.signature(model.forward).parameters
        self._cache_keyword = "cache" if "cache" in parameters else "past_key_values"
        self._takes_positions = "position_ids" in parameters
        self._direct: DirectDecode | None = None
        self.kv_shapes = self._probe()
        self._self_check()
        self._try_direct()

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
        positions = torch.arange(token_offset, token_offset + num_tokens, device=hidden.device).unsqueeze(0)  # (1, T)
        with torch.no_grad():
            if num_tokens == 1 and self._direct is not None:
                return self._direct.run(self._blocks.kept(start, end), hidden, positions, cache)
            return self._run_model(hidden, cache, positions, start, end)

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

    def _try_direct(self) -> None:
        """Take the direct way for one token if it gives the same bits as the base model's forward."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(2, 5, self.hidden_size, generator=generator).to(self.device, self._torch_dtype)
        model_cache, direct_cache = _ProbeCache(self.start), _ProbeCache(self.start)

        def run(start: int, end: int, cache: Cache) -> Tensor:
            return self.run(hidden[:, start:end], cache, token_offset=start, start=self.start, end=self.end)

        run(0, 3, model_cache)
        run(0, 3, direct_cache)
        expected: list[Tensor] = []
        blocks = self._blocks.kept(self.start, self.end)
        calls = observe(blocks, lambda: expected.append(run(3, 4, model_cache)))
        direct = DirectDecode.like(self._model, calls, model_cache)
        if direct is None:
            return
        expected.append(run(4, 5, model_cache))
        self._direct = direct
        got = [run(3, 4, direct_cache), run(4, 5, direct_cache)]
        if not (all(map(torch.equal, got, expected)) and _same_cache(model_cache, direct_cache, self.span)):
            self._direct = None

    def _check(self, hidden: Tensor, start: int, end: int) -> None:
        if Span(start, end) not in self.span:
            raise RequestError(f"blocks {start}:{end} are not all in {self.span}", reason="BAD_SPAN")
        if hidden.ndim != 3 or hidden.shape[1] < 1 or hidden.shape[2] != self.hidden_size:
            raise RequestError(
                f"hidden states must be (batch, tokens, {self.hidden_size}), got {tuple(hidden.shape)}",
                reason="BAD_SHAPE",
            )
        if hidden.dtype != self._torch_dtype:
            raise RequestError(f"hidden states must be {self.dtype}, got {hidden.dtype}", reason="BAD_DTYPE")

    def _probe(self) -> tuple[KvShape, ...]:
        """Run one token to learn what each block really stores."""
        cache = _ProbeCache(self.start)
        hidden = torch.zeros(1, 1, self.hidden_size, dtype=self._torch_dtype, device=self.device)
        try:
            self.run(hidden, cache, token_offset=0, start=self.start, end=self.end)
        except (TypeError, AttributeError, LookupError) as error:
            raise UnsupportedModelError(
                f"{self.checkpoint.name}: {type(self._model).__name__} can't run without what lies around its "
                f"blocks ({type(error).__name__}: {error})"
            ) from error
        return tuple(self._kv_shape(cache, block) for block in range(self.start, self.end))

    def _self_check(self) -> None:
        """Run four tokens at once and in two steps: an architecture whose cache or masks fail here is refused.

        The bound is loose, since what fails is wrong by far, and rounding (or another expert for one token) must not
        keep a server from starting.
        """
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(1, 4, self.hidden_size, generator=generator).to(self.device, self._torch_dtype)
        where = {"start": self.start, "end": self.end}
        at_once = self.run(hidden, _ProbeCache(self.start), token_offset=0, **where).float()
        cache = _ProbeCache(self.start)
        steps = [self.run(hidden[:, :2], cache, token_offset=0, **where)]
        steps.append(self.run(hidden[:, 2:], cache, token_offset=2, **where))
        error = (torch.cat(steps, dim=1).float() - at_once).abs().median()
        if error > 0.1 * (at_once - hidden.float()).abs().median():
            raise UnsupportedModelError(
                f"{self.checkpoint.name}: blocks {self.span} give other outputs in two steps than in one "
                f"(off by {float(error):.3g}), so they can't be served with a cache"
            )

    def _kv_shape(self, cache: Any, block: int) -> KvShape:
        layer = cache.layers[block] if block < len(cache.layers) else None
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        if keys is None or values is None or keys.ndim != 4 or keys.shape[2] != 1 or values.shape[2] != 1:
            raise UnsupportedModelError(
                f"{self.checkpoint.name}: block {block} doesn't store one key and value a token of its own"
            )
        if keys.dtype != values.dtype:
            raise UnsupportedModelError(f"{self.checkpoint.name}: block {block} has keys and values of two dtypes")
        return KvShape(keys.shape[1], keys.shape[3], values.shape[1], values.shape[3], keys.dtype)


def _same_cache(left: Cache, right: Cache, span: Span) -> bool:
    pairs = [(left.layers[block], right.layers[block]) for block in range(span.start, span.end)]
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


def _read_blocks(
    checkpoint: Checkpoint, span: Span, dtype: torch.dtype | None, progress: Callable[[int, int], None] | None
) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for done, block in enumerate(range(span.start, span.end), start=1):
        tensors |= read_tensors(checkpoint, checkpoint.block_tensors(block), dtype=dtype)
        if progress is not None:
            progress(done, len(span))
    return tensors


class _ProbeCache(DynamicCache):  # type: ignore[misc]  # transformers is untyped here
    """A growing cache for probes; its length is that of the first block held, whichever that is."""

    def __init__(self, first_block: int) -> None:
        super().__init__()
        self._first_block = first_block

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return int(super().get_seq_length(self._first_block))

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        length, offset = super().get_mask_sizes(query_length, self._first_block)
        return int(length), int(offset)
