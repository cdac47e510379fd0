"""Checkpoint files: what is read, what is refused, and what a fingerprint says."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from petals_async.errors import CheckpointError
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.edges import Edges
from petals_async.models.span import BlockSpan
from petals_async.testing.tiny import make_tiny_llama

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Six blocks over three shards, embeddings tied to the head."""
    return make_tiny_llama(tmp_path / "sharded", num_blocks=6, shards=3, tie_word_embeddings=True)


def shards_for(checkpoint: Checkpoint, start: int, end: int) -> tuple[str, ...]:
    return checkpoint.shards(name for block in range(start, end) for name in checkpoint.block_tensors(block))


def test_what_is_known_without_torch(sharded: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from petals_async.models.checkpoint import Checkpoint;"
        "c = Checkpoint.open(Path(sys.argv[1]));"
        "print(c.num_blocks, c.hidden_size, c.vocab_size, c.max_position, c.eos_token_ids, len(c.edge_tensors),"
        " c.dtype, c.name, bool({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, str(sharded)], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["6", "64", "288", "4096", "(257,)", "2", "float32", "sharded", "False"]


def test_spans_read_no_other_blocks_bytes(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    whole = BlockSpan.load(checkpoint, 2, 4).block_digests
    needed = set(shards_for(checkpoint, 2, 4))
    others = set(checkpoint.weight_map.values()) - needed
    assert others, "the test needs a shard that blocks 2:4 don't"
    for shard in others:
        (sharded / shard).write_bytes(b"")
    assert BlockSpan.load(Checkpoint.open(sharded), 2, 4).block_digests == whole


def test_edges_read_no_blocks_bytes(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    wanted = Edges.load(checkpoint).logits(torch.ones(1, 1, 64))
    for shard in set(checkpoint.weight_map.values()) - set(checkpoint.shards(checkpoint.edge_tensors)):
        (sharded / shard).unlink()
    again = Checkpoint.open(sharded)
    assert again.fingerprint == checkpoint.fingerprint
    assert torch.equal(Edges.load(again).logits(torch.ones(1, 1, 64)), wanted)


def test_case_99_a_missing_shard_is_named(sharded: Path) -> None:
    checkpoint = Checkpoint.open(sharded)
    shard = shards_for(checkpoint, 5, 6)[0]
    first = min(name for name in checkpoint.block_tensors(5) if checkpoint.weight_map[name] == shard)
    (sharded / shard).unlink()
    with pytest.raises(CheckpointError) as caught:
        BlockSpan.load(Checkpoint.open(sharded), 0, 6)
    assert shard in str(caught.value)
    with pytest.raises(CheckpointError) as caught:
        BlockSpan.load(Checkpoint.open(sharded), 5, 6)
    assert shard in str(caught.value)
    assert first in str(caught.value)


@pytest.mark.parametrize("keep", [0, 4, 100, -1])
def test_a_truncated_shard_is_named(sharded: Path, keep: int) -> None:
    checkpoint = Checkpoint.open(sharded)
    shard = sharded / shards_for(checkpoint, 0, 1)[0]
    data = shard.read_bytes()
    shard.write_bytes(data[:keep])
    with pytest.raises(CheckpointError, match=shard.name):
        BlockSpan.load(Checkpoint.open(sharded), 0, 1)


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[]",
        b'{"x": 3}',
        b'{"x": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}',
        b'{"x": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}',
    ],
)
def test_a_damaged_header_is_named(tmp_path: Path, header: bytes) -> None:
    make_tiny_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_missing_and_damaged_small_files(tmp_path: Path, sharded: Path) -> None:
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"config\.json: missing"):
        Checkpoint.open(tmp_path / "empty")
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = "../elsewhere.safetensors"
    (sharded / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=INDEX):
        Checkpoint.open(sharded)
    (sharded / INDEX).write_text(json.dumps({"weight_map": {}}))
    (sharded / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"config\.json: states none"):
        Checkpoint.open(sharded)
    (sharded / INDEX).unlink()
    with pytest.raises(CheckpointError, match="neither"):
        Checkpoint.open(sharded)


def test_the_fingerprint_is_of_the_model_not_of_the_place(tmp_path: Path) -> None:
    one = Checkpoint.open(make_tiny_llama(tmp_path / "one"))
    split = Checkpoint.open(make_tiny_llama(tmp_path / "split", shards=4))
    copied = Checkpoint.open(Path(shutil.copytree(tmp_path / "one", tmp_path / "copy")))
    assert one.fingerprint == split.fingerprint == copied.fingerprint
    noisy = json.loads((tmp_path / "copy" / "config.json").read_text())
    noisy |= {"_name_or_path": "/somewhere", "transformers_version": "4.0"}
    noisy["torch_dtype"] = noisy.pop("dtype")
    (tmp_path / "copy" / "config.json").write_text(json.dumps(noisy))
    assert Checkpoint.open(tmp_path / "copy").fingerprint == one.fingerprint
    others = [
        make_tiny_llama(tmp_path / "blocks", num_blocks=5),
        make_tiny_llama(tmp_path / "dtype", dtype="bfloat16"),
        make_tiny_llama(tmp_path / "tied", tie_word_embeddings=True),
    ]
    assert len({Checkpoint.open(path).fingerprint for path in others} | {one.fingerprint}) == 4


def test_digests_tell_one_changed_weight(tmp_path: Path) -> None:
    path = make_tiny_llama(tmp_path / "model")
    before = BlockSpan.load(Checkpoint.open(path), 0, 4)
    again = BlockSpan.load(Checkpoint.open(make_tiny_llama(tmp_path / "split", shards=3)), 1, 3)
    assert again.block_digests == before.block_digests[1:3]
    assert again.block_digest(2) == before.block_digest(2)
    tensors = load_file(path / "model.safetensors")
    name = "model.layers.2.mlp.up_proj.weight"
    tensors[name][3, 5] = torch.nextafter(tensors[name][3, 5], torch.tensor(9.0))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    changed = BlockSpan.load(Checkpoint.open(path), 0, 4)
    differ = [a != b for a, b in zip(before.block_digests, changed.block_digests, strict=True)]
    assert differ == [False, False, True, False]
    assert len(set(before.block_digests)) == 4


def test_progress_counts_blocks(sharded: Path) -> None:
    seen: list[tuple[int, int]] = []
    BlockSpan.load(Checkpoint.open(sharded), 1, 4, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
