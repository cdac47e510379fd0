"""A tiny random Llama with a byte tokenizer, written to a directory: a whole model in a tenth of a second.

Its weights are scaled so that greedy generation wanders, and the best token leads by a clear margin: a wrong KV
cache changes its text at once, and rounding doesn't.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Roles and texts between special tokens, as chat models have it."""

SPECIAL_TOKENS = ("<|begin|>", "<|end|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>")
"""Ids 256, 257, ...: `<|end|>` ends a text."""

MIN_VOCAB_SIZE = 256 + len(SPECIAL_TOKENS)
"""All bytes and the special tokens."""


def make_tiny_llama(
    path: Path,
    *,
    num_blocks: int = 4,
    hidden_size: int = 64,
    vocab_size: int = 288,
    seed: int = 0,
    dtype: str = "float32",
    num_heads: int = 4,
    num_kv_heads: int = 2,
    shards: int = 1,
    tie_word_embeddings: bool = False,
    max_position: int = 4096,
) -> Path:
    """Write a random Llama checkpoint with a tokenizer.

    Args:
        path: Directory to make; files in it are replaced.
        num_blocks: Transformer blocks.
        hidden_size: Width of the hidden states, divisible by `num_heads`.
        vocab_size: At least `MIN_VOCAB_SIZE`; ids above that have no text.
        seed: Of the weights.
        dtype: In which the weights are stored.
        num_heads: Query heads.
        num_kv_heads: Key and value heads.
        shards: Number of safetensors files.
        tie_word_embeddings: Whether the head is the embedding table.
        max_position: Most tokens of a sequence.

    Returns:
        `path`.

    Raises:
        ValueError: The vocabulary is too small, or the sizes don't divide.
    """
    if vocab_size < MIN_VOCAB_SIZE or hidden_size % num_heads:
        raise ValueError(f"need vocab_size >= {MIN_VOCAB_SIZE} and hidden_size divisible by num_heads")
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    sizes = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "num_hidden_layers": num_blocks,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "max_position_embeddings": max_position,
        "tie_word_embeddings": tie_word_embeddings,
    }
    _write_model(path, sizes, seed, dtype)
    if shards > 1:
        _split(path, shards)
    _write_tokenizer(path)
    return path


def _write_model(path: Path, sizes: dict[str, Any], seed: int, dtype: str) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from petals_async.models.loading import quiet_transformers

    config = LlamaConfig(
        **sizes, intermediate_size=2 * sizes["hidden_size"], bos_token_id=256, eos_token_id=257, pad_token_id=258
    )
    model = LlamaForCausalLM(config)
    _fill(model, torch.Generator().manual_seed(seed))
    with quiet_transformers():
        model.to(getattr(torch, dtype)).save_pretrained(path)


def _fill(model: Any, generator: Any) -> None:
    """Draw weights: blocks that move the state about as much as the embedding, attention that looks around."""
    import torch

    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            if parameter.ndim < 2:
                parameter.fill_(1.0)
                continue
            gain = 3.0 if ("q_proj" in name or "k_proj" in name) else 1.5
            if "embed" in name or "lm_head" in name:
                gain = parameter.shape[1] ** 0.5 if "embed" in name else 3.0
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * gain / parameter.shape[1] ** 0.5)
        if not model.config.tie_word_embeddings:  # mostly readable text, and hardly ever an end
            rare = [token for token in range(model.config.vocab_size) if not 32 <= token < 127]
            model.lm_head.weight[rare] *= 0.3


def _split(path: Path, shards: int) -> None:
    """Replace model.safetensors by that many shards and an index; tensors are dealt out in the order of names."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(path / "model.safetensors")
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
        mine = names[len(names) * shard // shards : len(names) * (shard + 1) // shards]
        save_file({name: tensors[name] for name in mine}, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(mine, file)
    total = sum(tensor.nbytes for tensor in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (path / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (path / "model.safetensors").unlink()


def _write_tokenizer(path: Path) -> None:
    """Write a tokenizer whose ids 0 to 255 are the bytes of UTF-8."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {character: byte for byte, character in _byte_characters().items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|begin|>", eos_token="<|end|>", pad_token="<|pad|>"
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(path)


def _byte_characters() -> dict[int, str]:
    """Map each byte to the printable character that byte-level tokenizers (GPT-2) use for it."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}
