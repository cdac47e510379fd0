"""A toy model in exact integer arithmetic: blocks, edges, and a brute-force reference. No torch.

A hidden state is `hidden_size` whole numbers from 0 to 255, which every dtype of the wire holds exactly. What a
block gives for a token depends on the block, on all inputs of that row so far, each with its position, and on
nothing else: one wrong, missing, doubled or swapped input changes every output after it, by so much that two
equal outputs by chance need not be thought of (64 bits). A cache is told what a real one is told (seek, permute,
copy), and forgets nothing that a real one would keep: a hole in it is read as what lies there, not refused.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from petals_async.abc import BackendOutcome, BackendResult, BackendStep
from petals_async.core.hidden import ITEM_BYTES, HiddenStates
from petals_async.core.span import Span
from petals_async.errors import RequestError

TOY_HIDDEN_SIZE = 8
"""Numbers in a hidden state, if nobody says otherwise."""

TOY_VOCAB_SIZE = 64
"""Token ids: at most the bytes of one digest."""

TOY_KV_BYTES = 16
"""KV bytes of one token of one row in one block: the bytes of a digest."""

_EMPTY = bytes(TOY_KV_BYTES)
"""What lies in a cache where nothing was written."""

_FLOATS = [struct.pack("<f", float(number)) for number in range(256)]
_ENCODED = {"float32": _FLOATS, "bfloat16": [item[2:] for item in _FLOATS]}
_ENCODED["float16"] = [struct.pack("<e", float(number)) for number in range(256)]
_DECODED = {dtype: {item: number for number, item in enumerate(items)} for dtype, items in _ENCODED.items()}


def toy_states(dtype: str, rows: Sequence[Sequence[bytes]]) -> HiddenStates:
    """Return hidden states for rows of vectors; a vector is `bytes`, one whole number each.

    Args:
        dtype: float32, bfloat16 or float16.
        rows: For each row its tokens' vectors: as many for each row.
    """
    table = _ENCODED[dtype]
    data = b"".join(table[number] for row in rows for vector in row for number in vector)
    width = len(rows[0][0]) if rows and rows[0] else TOY_HIDDEN_SIZE
    return HiddenStates(dtype, (len(rows), len(rows[0]) if rows else 0, width), data)


def toy_vectors(hidden: HiddenStates) -> list[list[bytes]]:
    """Return the vectors of hidden states: the inverse of `toy_states`.

    Raises:
        RequestError: A number is no whole number from 0 to 255; NaN and infinity among them (NON_FINITE_INPUT).
    """
    batch, tokens, width = hidden.shape
    table, size = _DECODED[hidden.dtype], ITEM_BYTES[hidden.dtype]
    data = hidden.data
    try:
        numbers = bytes(table[data[start : start + size]] for start in range(0, len(data), size))
    except KeyError:
        raise RequestError("hidden states must be finite: a toy's are 0 to 255", reason="NON_FINITE_INPUT") from None
    vectors = [numbers[start : start + width] for start in range(0, len(numbers), width)]
    return [vectors[row * tokens : (row + 1) * tokens] for row in range(batch)]


def _hash(*pieces: bytes, size: int = TOY_KV_BYTES) -> bytes:
    return hashlib.blake2b(b"".join(pieces), digest_size=size).digest()


@dataclass(slots=True)
class ToyCache:
    """For each block and row, the digest of all inputs up to each token."""

    span: Span
    batch_size: int
    max_tokens: int
    length: int = 0
    chains: list[list[list[bytes]]] = field(default_factory=list)
    """[block][row][token]: tokens from `length` on are left over from before, as in memory that is reused."""

    def __post_init__(self) -> None:
        self.chains = [[[] for _ in range(self.batch_size)] for _ in range(len(self.span))]

    def permute(self, rows: Sequence[int]) -> None:
        """Let each row go on from the row that is named for it."""
        self.chains = [[list(block[row]) for row in rows] for block in self.chains]

    def before(self, block: int, row: int, token: int) -> bytes:
        """Return what a row's next token builds on."""
        chain = self.chains[block][row]
        return _EMPTY if token == 0 or token > len(chain) else chain[token - 1]

    def write(self, block: int, row: int, token: int, digest: bytes) -> None:
        """Note a token's digest."""
        chain = self.chains[block][row]
        chain.extend([_EMPTY] * (token - len(chain)))
        chain[token:] = [digest]


class ToyBackend:
    """The `BlockBackend` of the toy model.

    Args:
        span: The blocks held.
        dtype: In which hidden states come and go.
        hidden_size: Numbers in a hidden state.
        step_s: What each step claims to have cost, in seconds.
        salt: Another model's weights.
    """

    def __init__(
        self,
        span: Span,
        *,
        dtype: str = "float32",
        hidden_size: int = TOY_HIDDEN_SIZE,
        step_s: float = 0.0,
        salt: bytes = b"",
    ) -> None:
        self._span = span
        self._dtype = dtype
        self._hidden_size = hidden_size
        self._step_s = step_s
        self._salt = salt

    @property
    def span(self) -> Span:
        """The blocks held."""
        return self._span

    @property
    def hidden_size(self) -> int:
        """Numbers in a hidden state."""
        return self._hidden_size

    @property
    def dtype(self) -> str:
        """In which hidden states come and go."""
        return self._dtype

    def kv_bytes(self, span: Span, batch_size: int, num_tokens: int) -> int:
        """Return the bytes that a cache of this size counts for."""
        return len(span) * batch_size * num_tokens * TOY_KV_BYTES

    def allocate(self, span: Span, batch_size: int, max_tokens: int) -> ToyCache:
        """Return an empty cache for a session."""
        return ToyCache(span, batch_size, max_tokens)

    def copy_prefix(self, source: Any, target: Any, num_tokens: int) -> None:
        """Copy the first tokens of one session's cache into another's."""
        target.chains = [[chain[:num_tokens] for chain in block] for block in source.chains]
        target.length = num_tokens

    def run(self, steps: Sequence[BackendStep]) -> list[BackendOutcome]:
        """Run steps of different sessions; a step that failed gives its error, and leaves its cache as it was."""
        return [self._run_one(step) for step in steps]

    def _run_one(self, step: BackendStep) -> BackendOutcome:
        cache: ToyCache = step.cache
        try:
            rows = [] if step.hidden is None else toy_vectors(step.hidden)
        except RequestError as error:
            return error
        if step.row_indices:
            cache.permute(step.row_indices)
        outputs = self._through(cache, rows, step.token_offset)
        cache.length = step.token_offset + (len(rows[0]) if rows else 0)
        return BackendResult(self._wanted(outputs, step.num_outputs), self._step_s)

    def _through(self, cache: ToyCache, rows: list[list[bytes]], offset: int) -> list[list[bytes]]:
        for index, block in enumerate(range(cache.span.start, cache.span.end)):
            key = self._salt + block.to_bytes(2, "little")
            rows = [self._row(cache, key, index, row, vectors, offset) for row, vectors in enumerate(rows)]
        return rows

    def _row(self, cache: ToyCache, key: bytes, block: int, row: int, vectors: list[bytes], offset: int) -> list[bytes]:
        outputs = []
        for token, vector in enumerate(vectors, start=offset):
            digest = _hash(key, cache.before(block, row, token), token.to_bytes(4, "little"), vector)
            cache.write(block, row, token, digest)
            outputs.append(_output_of(digest, self._hidden_size))
        return outputs

    def _wanted(self, outputs: list[list[bytes]], num_outputs: int | None) -> HiddenStates | None:
        if not outputs or num_outputs == 0:
            return None
        kept = len(outputs[0]) if num_outputs is None else min(num_outputs, len(outputs[0]))
        return toy_states(self._dtype, [row[len(row) - kept :] for row in outputs])


def _output_of(digest: bytes, hidden_size: int) -> bytes:
    """Return what a block puts out for a token: the first numbers of its digest, or more made from it."""
    return digest[:hidden_size] if hidden_size <= len(digest) else hashlib.shake_128(digest).digest(hidden_size)


class ToyEdges:
    """The toy model's embeddings and head: an `abc.Edges`.

    Args:
        num_blocks: Blocks of the whole model.
        dtype: Of the hidden states.
        hidden_size: Numbers in a hidden state.
    """

    def __init__(self, num_blocks: int, *, dtype: str = "float32", hidden_size: int = TOY_HIDDEN_SIZE) -> None:
        self._num_blocks = num_blocks
        self.dtype = dtype
        self.hidden_size = hidden_size

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return self._num_blocks

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        return TOY_VOCAB_SIZE

    def embed(self, token_ids: Sequence[int], *, position: int) -> HiddenStates:
        """Return the hidden states of one row of tokens: (1, n, hidden_size); the position plays no part.

        Raises:
            RequestError: A token id is outside the vocabulary (BAD_TOKENS).
        """
        del position
        return self.embed_rows([token_ids])

    def embed_rows(self, rows: Sequence[Sequence[int]]) -> HiddenStates:
        """Return the hidden states of several rows of as many tokens each: (rows, n, hidden_size)."""
        for token in (token for row in rows for token in row):
            if not 0 <= token < TOY_VOCAB_SIZE:
                raise RequestError(f"token {token} is outside the vocabulary of {TOY_VOCAB_SIZE}", reason="BAD_TOKENS")
        return toy_states(self.dtype, [[toy_embedding(token, self.hidden_size) for token in row] for row in rows])

    def next_tokens(self, hidden: HiddenStates) -> list[int]:
        """Return the best next token of each row, after its last token: the argmax of `logits`, without torch."""
        return [_best(toy_scores(row[-1])) for row in toy_vectors(hidden)]

    def next_token(self, hidden: HiddenStates) -> int:
        """Return the best next token of a single row."""
        return self.next_tokens(hidden)[0]

    def logits(self, hidden: HiddenStates) -> Any:
        """Return the logits as a torch tensor, (batch, n, vocab_size), float32."""
        import torch

        return torch.tensor([[toy_scores(vector) for vector in row] for row in toy_vectors(hidden)])


def toy_embedding(token: int, hidden_size: int = TOY_HIDDEN_SIZE) -> bytes:
    """Return a token's vector."""
    return hashlib.shake_128(b"embed" + token.to_bytes(4, "little")).digest(hidden_size)


def toy_scores(vector: bytes) -> list[float]:
    """Return a score for each token id, no two of them equal."""
    digest = _hash(b"head", vector, size=TOY_VOCAB_SIZE)
    return [number / 16 + token / 4096 for token, number in enumerate(digest)]


def _best(scores: Sequence[float]) -> int:
    return max(range(len(scores)), key=scores.__getitem__)


def toy_reference(
    inputs: Sequence[int | bytes],
    num_blocks: int,
    *,
    first_block: int = 0,
    hidden_size: int = TOY_HIDDEN_SIZE,
    salt: bytes = b"",
) -> list[bytes]:
    """Run the whole toy model over one row from scratch, without a cache: the oracle.

    Args:
        inputs: Token ids, or the vectors themselves.
        num_blocks: Blocks to run.
        first_block: Index of the first of them.
        hidden_size: Numbers in a hidden state.
        salt: As of the backends.

    Returns:
        The last block's output vector for each token.
    """
    vectors = [toy_embedding(item, hidden_size) if isinstance(item, int) else item for item in inputs]
    for block in range(first_block, first_block + num_blocks):
        state, outputs = bytes(16), []
        for position, vector in enumerate(vectors):
            text = salt + struct.pack("<H", block) + state + struct.pack("<I", position) + vector
            state = hashlib.blake2b(text, digest_size=16).digest()
            outputs.append(state[:hidden_size] if hidden_size <= 16 else hashlib.shake_128(state).digest(hidden_size))
        vectors = outputs
    return vectors


def toy_generate(prompt: Sequence[int], num_tokens: int, num_blocks: int, **options: Any) -> list[int]:
    """Return the greedy continuation of a prompt, the whole model run anew for each token."""
    token_ids = list(prompt)
    for _ in range(num_tokens):
        last = toy_reference(token_ids, num_blocks, **options)[-1]
        token_ids.append(_best(toy_scores(last)))
    return token_ids[len(prompt) :]
