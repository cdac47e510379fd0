"""Architectures that can't be cut are refused, and the message says why."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers.models.llama import modeling_llama

from petals_async.errors import CheckpointError, RequestError, UnsupportedModelError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.edges import Edges
from petals_async.models.span import BlockSpan
from petals_async.testing.tiny import make_tiny_llama

SMALL = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


def write_config(path: Path, config: transformers.PreTrainedConfig, prefix: str) -> None:
    """Write a configuration with an index whose tensors are never needed."""
    config.save_pretrained(path)
    names = [f"{prefix}.{block}.weight" for block in range(2)]
    index = {"weight_map": dict.fromkeys(names, "absent.safetensors")}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (transformers.MambaConfig(**SMALL), "linear_attention|recurrent"),
        (transformers.Mamba2Config(**SMALL, num_heads=2, head_dim=32), "linear_attention|recurrent"),
        (transformers.Qwen3NextConfig(**SMALL), "linear_attention|recurrent"),
        (transformers.T5Config(vocab_size=64, d_model=32, num_layers=2), "encoder-decoder"),
        (transformers.BartConfig(vocab_size=64, d_model=32, num_hidden_layers=2), "encoder-decoder"),
        (transformers.Gemma3nTextConfig(**SMALL, num_kv_shared_layers=1), "share keys and values"),
        (transformers.Gemma3nTextConfig(**SMALL, num_kv_shared_layers=0), "per-layer inputs"),
        (transformers.ViTConfig(**SMALL), "no causal language model"),
        (transformers.LlamaConfig(**SMALL, quantization_config={"quant_method": "gptq"}), "quantised"),
    ],
    ids=lambda value: getattr(value, "model_type", ""),
)
def test_refused_with_the_reason(tmp_path: Path, config: transformers.PreTrainedConfig, reason: str) -> None:
    if not hasattr(config, "vocab_size"):
        config.vocab_size = 64
    write_config(tmp_path, config, "layers")
    with pytest.raises(UnsupportedModelError, match=reason):
        BlockSpan.load(Checkpoint.open(tmp_path), 0, 1)
    with pytest.raises(UnsupportedModelError, match=reason):
        Edges.load(Checkpoint.open(tmp_path))


def test_blocks_that_see_later_tokens_are_found_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modeling_llama, "create_causal_mask", lambda **_arguments: torch.zeros(1, 1, 1, 1))
    with pytest.raises(UnsupportedModelError, match="other outputs in several steps than in one"):
        BlockSpan.load(Checkpoint.open(make_tiny_llama(tmp_path)), 1, 3)


def test_an_encoder_is_found_out(tmp_path: Path) -> None:
    model = transformers.BertLMHeadModel(
        transformers.BertConfig(**SMALL, num_attention_heads=2, intermediate_size=64, is_decoder=False)
    )
    for parameter in model.parameters():
        parameter.data.mul_(8.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError):
        BlockSpan.load(Checkpoint.open(tmp_path), 0, 2)


def test_an_architecture_whose_masks_are_wrong_for_chunks_is_found_out(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.CTRLLMHeadModel(transformers.CTRLConfig(vocab_size=64, n_embd=32, n_layer=2, n_head=2, dff=48))
    for parameter in model.parameters():
        parameter.data.mul_(8.0)
    model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModelError, match="other outputs in several steps than in one"):
        BlockSpan.load(Checkpoint.open(tmp_path), 0, 2)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "no_such_thing"}))
    with pytest.raises(UnsupportedModelError, match="no_such_thing"):
        BlockSpan.load(Checkpoint.open(tmp_path), 0, 1)


def test_wrong_spans_and_states_are_the_callers_fault(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(make_tiny_llama(tmp_path))
    for start, end in ((0, 5), (2, 2), (-1, 2)):
        with pytest.raises(RequestError):
            BlockSpan.load(checkpoint, start, end)
    blocks = BlockSpan.load(checkpoint, 1, 3)
    cache = transformers.DynamicCache()
    for shape, dtype in (((1, 1, 63), torch.float32), ((1, 0, 64), torch.float32), ((1, 1, 64), torch.float16)):
        with pytest.raises(RequestError):
            blocks.run(torch.zeros(shape, dtype=dtype), cache, token_offset=0, start=1, end=3)
    with pytest.raises(RequestError, match="0:2"):
        blocks.run(torch.zeros(1, 1, 64), cache, token_offset=0, start=0, end=2)


def test_a_configuration_that_does_not_fit_the_weights(tmp_path: Path) -> None:
    make_tiny_llama(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(CheckpointError, match="another shape"):
        BlockSpan.load(Checkpoint.open(tmp_path), 0, 1)
    (tmp_path / "config.json").write_text(json.dumps(config | {"attention_bias": True}))
    with pytest.raises(CheckpointError, match=r"layers\.0\.self_attn\.k_proj\.bias is missing"):
        BlockSpan.load(Checkpoint.open(tmp_path), 0, 1)


def test_token_ids_outside_the_vocabulary(tmp_path: Path) -> None:
    edges = Edges.load(Checkpoint.open(make_tiny_llama(tmp_path)))
    for token in (-1, 288, 10**12):
        with pytest.raises(RequestError, match=str(token)):
            edges.embed([3, token], position=0)
    assert edges.embed([], position=3).shape == (1, 0, 64)
