"""Tokens without the base model's forward: used where they may, never where a mask could be needed, and checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, Tiny, build

from petals_async.engine.kv import KvCache
from petals_async.models import span
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.direct import DirectPass
from petals_async.models.span import BlockSpan

BY_NAME = {tiny.name: tiny for tiny in ARCHITECTURES}


@pytest.fixture(name="unfused")
def _unfused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(span, "can_fuse", lambda _model: False)


def load(tiny: Tiny, path: Path) -> BlockSpan:
    build(tiny, path)
    return BlockSpan.load(Checkpoint.open(path), 1, 3)


def count_model_passes(blocks: BlockSpan, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the tokens of each pass that goes through the base model's own forward."""
    passes: list[int] = []
    run_model = blocks._run_model

    def noted(hidden: torch.Tensor, *args: Any) -> torch.Tensor:
        passes.append(hidden.shape[1])
        return run_model(hidden, *args)

    monkeypatch.setattr(blocks, "_run_model", noted)
    return passes


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize("name", ["llama", "qwen3", "olmo2", "granite", "qwen3_moe"])
def test_one_token_skips_the_models_forward(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = load(BY_NAME[name], tmp_path / "model")
    passes = count_model_passes(blocks, monkeypatch)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    caches = [KvCache(blocks.span, blocks.kv_shapes, 2, 16) for _ in range(2)]
    direct = [blocks.run(hidden[:, at : at + 1], caches[0], token_offset=at, start=1, end=3) for at in range(9)]
    assert passes == []
    monkeypatch.setattr(blocks, "_direct", None)
    model = [blocks.run(hidden[:, at : at + 1], caches[1], token_offset=at, start=1, end=3) for at in range(9)]
    assert passes == [1] * 9
    assert all(map(torch.equal, direct, model))
    for ours, theirs in zip(caches[0].held, caches[1].held, strict=True):
        assert torch.equal(ours.keys[:, :, :9], theirs.keys[:, :, :9])
        assert torch.equal(ours.values[:, :, :9], theirs.values[:, :, :9])


@pytest.mark.parametrize("name", ["llama", "mistral_window", "gemma2", "gpt_oss"])
def test_any_tokens_skip_it_with_our_own_attention(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = load(BY_NAME[name], tmp_path / "model")
    passes = count_model_passes(blocks, monkeypatch)
    hidden = torch.randn(2, 9, 32, generator=torch.Generator().manual_seed(1))
    caches = [KvCache(blocks.span, blocks.kv_shapes, 2, 16) for _ in range(2)]
    direct = blocks.run(hidden, caches[0], token_offset=0, start=1, end=3)
    assert passes == []
    monkeypatch.setattr(blocks, "_direct", None)
    assert torch.equal(blocks.run(hidden, caches[1], token_offset=0, start=1, end=3), direct)
    assert passes == [18]


@pytest.mark.usefixtures("unfused")
@pytest.mark.parametrize(
    "name",
    ["mistral_window", "qwen2_window", "gemma2", "gemma3_text", "cohere2", "gpt_oss", "llama4_text", "bloom", "mpt"],
)
def test_windows_chunks_and_biases_keep_the_models_forward(name: str, tmp_path: Path) -> None:
    """Their masks come up behind some length only, or change with it: a probe near the start would not see that."""
    assert load(BY_NAME[name], tmp_path / "model")._direct is None


def test_a_direct_way_with_other_bits_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DirectPass.run

    def planted(self: DirectPass, *args: Any) -> torch.Tensor:
        output = run(self, *args)
        output[0, 0, 0] = torch.nextafter(output[0, 0, 0], output.new_tensor(torch.inf))
        return output

    monkeypatch.setattr(DirectPass, "run", planted)
    assert load(BY_NAME["llama"], tmp_path / "model")._direct is None


def test_a_direct_way_with_other_keys_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DirectPass.run

    def planted(self: DirectPass, blocks: Any, hidden: Any, positions: Any, cache: Any) -> torch.Tensor:
        output = run(self, blocks, hidden, positions, cache)
        cache.pieces[0].cache.layers[1].keys[0, 0, 0, 0] += 1.0
        return output.clone()

    monkeypatch.setattr(DirectPass, "run", planted)
    assert load(BY_NAME["llama"], tmp_path / "model")._direct is None
