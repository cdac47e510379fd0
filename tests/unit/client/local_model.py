"""A whole tiny model in this process, behind the two Protocols of the decoding loop, and tokenizers to try."""

import tempfile
from functools import cache
from pathlib import Path

import anyio.lowlevel
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, PreTrainedTokenizerFast

from petals_async.client.generation import Generation
from petals_async.client.settings import resolve_settings
from petals_async.models.codec import from_hidden, to_hidden
from petals_async.testing.tiny import make_tiny_llama

_FOLDER = tempfile.TemporaryDirectory(prefix="petals-async-decoding-")


class LocalModel:
    """A tiny Llama and its tokenizer."""

    def __init__(self):
        torch.set_num_threads(1)
        path = make_tiny_llama(Path(_FOLDER.name) / "tiny", num_blocks=2)
        self.model = AutoModelForCausalLM.from_pretrained(path).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(path)
        self.defaults = self.model.generation_config

    def generate(self, ids, **options):
        """Return the new tokens of plain transformers."""
        inputs = torch.tensor([ids])
        outputs = self.model.generate(inputs, attention_mask=torch.ones_like(inputs), **options)
        return tuple(outputs[0, len(ids) :].tolist())

    def generation(self, ids, session=None, tokenizer=None, **options):
        """Return our own generation over this model."""
        settings = resolve_settings(self.defaults, None, options)
        session = session or LocalSession(self.model)
        return Generation(session, LocalEdges(self.model), settings, ids, tokenizer=tokenizer or self.tokenizer)


@cache
def local_model():
    """Return the one model of this process."""
    return LocalModel()


class LocalSession:
    """All blocks and the final norm, with transformers' own cache."""

    def __init__(self, model):
        self.position = 0
        self.recoveries = []
        self.exact = True
        self.lengths = []
        self._model = model.model
        self._cache = DynamicCache()

    async def step(self, hidden, *, num_outputs=None):
        await anyio.lowlevel.checkpoint()
        with torch.no_grad():
            outputs = self._model(inputs_embeds=from_hidden(hidden), cache=self._cache).last_hidden_state
        self.position += hidden.num_tokens
        self.lengths.append(hidden.num_tokens)
        return to_hidden(outputs if num_outputs is None else outputs[:, -num_outputs:])


class LocalEdges:
    """Embeddings and head."""

    def __init__(self, model):
        self._model = model

    async def embed(self, token_ids, *, position):
        with torch.no_grad():
            return to_hidden(self._model.model.embed_tokens(torch.tensor([list(token_ids)])))

    async def logits(self, hidden):
        with torch.no_grad():
            return self._model.lm_head(from_hidden(hidden))


SPACE = "\u2581"

PIECES = ["<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), SPACE, *(SPACE + c for c in "abc"), *"abc.,"]
"""A vocabulary in the manner of sentencepiece: words with their space before them, and bytes for all else."""


@cache
def space_tokenizer():
    """Return a tokenizer that decodes as Llama 2's does: the first space is dropped, bytes are put together."""
    vocab = {piece: index for index, piece in enumerate(PIECES)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<s>"))
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")
    fast.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    return fast


def piece_ids(*pieces):
    """Return the ids of pieces of the sentencepiece-like vocabulary; other characters become their bytes."""
    ids = []
    for piece in pieces:
        ids.extend([PIECES.index(piece)] if piece in PIECES else [2 + byte for byte in piece.encode()])
    return ids
