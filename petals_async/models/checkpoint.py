"""One model's files: what it is, which tensor belongs to which block, and where each lies.

Neither torch nor transformers is imported: a planner, a client or `petals-async status` may open a checkpoint.
Which tensors make up block `i` is read off their names: the blocks are the one numbered list that counts from 0 to
the number of blocks (`model.layers.7.mlp.up_proj.weight`, `transformer.h.7.ln_1.bias`, ...). All else are edges.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from petals_async.errors import CheckpointError, UnsupportedModelError
from petals_async.models.tensors import TensorInfo, read_header

INDEX_FILE = "model.safetensors.index.json"
"""The file that says which shard holds which tensor."""

SINGLE_FILE = "model.safetensors"
"""The file that holds all tensors, when there are no shards."""

BLOCK_COUNT_KEYS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")
HIDDEN_SIZE_KEYS = ("hidden_size", "n_embd", "d_model", "dim")
MAX_POSITION_KEYS = (
    "max_position_embeddings", "n_positions", "n_ctx", "max_seq_len", "max_sequence_length",
)  # fmt: skip
"""Names under which configurations state the same number, first found wins."""

FINGERPRINT_NOISE = frozenset({"_name_or_path", "_model_name_or_path", "transformers_version"})
"""Keys of config.json that say nothing about the model."""

_NUMBERED = re.compile(r"^(?P<prefix>(?:[^.]+\.)*?)(?P<index>\d+)\.(?P<rest>.+)$")


@dataclass(frozen=True)
class Checkpoint:
    """A directory in Hugging Face format, opened: configuration and tensor names; shards are read when needed.

    Make one with `open`. Shards that nobody needs may be absent or damaged.

    Attributes:
        path: The directory.
        config: config.json.
        weight_map: The file name of each tensor's shard.
    """

    path: Path
    config: Mapping[str, Any]
    weight_map: Mapping[str, str]

    @classmethod
    def open(cls, path: Path) -> Checkpoint:
        """Open a local directory.

        Args:
            path: Directory with config.json, and model.safetensors or a sharded index.

        Raises:
            CheckpointError: Something is missing or damaged; the message names the file.
            UnsupportedModelError: The configuration says that it is an encoder-decoder.
        """
        path = Path(path)
        if not path.is_dir():
            raise CheckpointError(f"{path}: no such directory")
        config = _read_json(path / "config.json")
        if config.get("is_encoder_decoder"):
            raise UnsupportedModelError(
                f"{path.name} ({config.get('model_type')}) can't be cut into blocks: it is an encoder-decoder"
            )
        if (path / INDEX_FILE).is_file():
            weight_map = _read_index(path / INDEX_FILE)
        elif (path / SINGLE_FILE).is_file():
            weight_map = dict.fromkeys(read_header(path / SINGLE_FILE), SINGLE_FILE)
        else:
            raise CheckpointError(f"{path}: has neither {SINGLE_FILE} nor {INDEX_FILE}")
        checkpoint = cls(path, config, weight_map)
        if checkpoint.num_blocks < 1 or checkpoint.hidden_size < 1 or checkpoint.vocab_size < 1:
            raise CheckpointError(f"{path / 'config.json'}: block count, hidden and vocabulary size must be positive")
        return checkpoint

    @property
    def name(self) -> str:
        """The directory's name, for people."""
        return self.path.resolve().name

    @cached_property
    def text_config(self) -> Mapping[str, Any]:
        """The part of the configuration that describes the language model."""
        for key in ("text_config", "llm_config", "language_config"):
            if isinstance(self.config.get(key), dict):
                return {**self.config[key]}
        return self.config

    @cached_property
    def num_blocks(self) -> int:
        """Transformer blocks of the whole model."""
        return self._number(BLOCK_COUNT_KEYS)

    @cached_property
    def hidden_size(self) -> int:
        """Width of the hidden states between two blocks."""
        return self._number(HIDDEN_SIZE_KEYS)

    @cached_property
    def vocab_size(self) -> int:
        """Tokens in the vocabulary: ids run from 0 to one less."""
        return self._number(("vocab_size",))

    @cached_property
    def max_position(self) -> int | None:
        """Most tokens of one sequence, or None where the configuration states no limit."""
        found = (self.text_config.get(key) for key in MAX_POSITION_KEYS)
        return next((value for value in found if type(value) is int and value > 0), None)

    @cached_property
    def dtype(self) -> str | None:
        """Dtype name that the configuration states, such as "bfloat16"."""
        for config in (self.text_config, self.config):
            value = config.get("dtype", config.get("torch_dtype"))
            if isinstance(value, str):
                return value.removeprefix("torch.")
        return None

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a text: those of generation_config.json, else those of config.json; may be empty."""
        file = self.path / "generation_config.json"
        generation = _read_json(file) if file.is_file() else {}
        for config in (generation, self.text_config, self.config):
            value = config.get("eos_token_id")
            if type(value) is int:
                return (value,)
            if isinstance(value, list) and value and all(type(item) is int for item in value):
                return tuple(value)
        return ()

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, over the configuration (without noise) and all tensor names.

        Shapes and the tensors' own dtypes are left out on purpose: they stand in the shards, and a server that has
        only the shards of its own blocks must state the same fingerprint as one that has all. The configuration
        settles them. Weights are told apart by block digests (`BlockSpan.block_digests`), not by this.
        """
        config = {key: value for key, value in self.config.items() if key not in FINGERPRINT_NOISE}
        if "torch_dtype" in config:  # the same fact under its older name
            config["dtype"] = config.pop("torch_dtype")
        text = json.dumps([config, sorted(self.weight_map)], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    @cached_property
    def block_prefix(self) -> str:
        """What stands before the block's number in tensor names, such as "model.layers.".

        Raises:
            UnsupportedModelError: No list of tensors is numbered from 0 to the number of blocks.
        """
        indices: dict[str, set[int]] = {}
        for name in self.weight_map:
            if match := _NUMBERED.match(name):
                indices.setdefault(match["prefix"], set()).add(int(match["index"]))
        wanted = set(range(self.num_blocks))
        found = sorted(prefix for prefix, numbers in indices.items() if wanted <= numbers)
        if not found:
            raise UnsupportedModelError(f"{self.path}: no tensors are numbered by block, 0 to {self.num_blocks - 1}")
        textual = [prefix for prefix in found if "language" in prefix or "text" in prefix]
        return (textual or found)[0]

    def block_tensors(self, block: int) -> tuple[str, ...]:
        """Return the names of one block's tensors, sorted.

        Args:
            block: Index of the block, 0 to `num_blocks - 1`.
        """
        return self._names_by_block.get(block, ())

    @cached_property
    def edge_tensors(self) -> tuple[str, ...]:
        """Names of the language model's tensors outside the blocks, sorted."""
        return tuple(name for name in self._names_by_block.get(-1, ()) if self.text_name(name) is not None)

    def text_name(self, name: str) -> str | None:
        """Return a tensor's name in the language model alone, or None for a tensor of another part.

        Models that also see or hear keep their language model under "language_model."; its own class knows the
        tensors without that: "model.layers.0.mlp.up_proj.weight", "lm_head.weight".
        """
        before, found, after = self.block_prefix.partition("language_model.")
        if not found:
            return name
        if name.startswith(before + found):
            rest = name.removeprefix(before + found)
            return rest if after.startswith("model.") else f"model.{rest}"
        return name if name.startswith("lm_head.") else None

    def shards(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the file names of the shards that hold the named tensors, sorted."""
        return tuple(sorted({self.weight_map[name] for name in names}))

    def tensor(self, name: str) -> TensorInfo:
        """Return where a tensor lies; reads the header of its shard once.

        Raises:
            CheckpointError: Its shard is missing, damaged, or lacks it; the message names the file and the tensor.
        """
        shard = self.weight_map.get(name)
        if shard is None:
            raise CheckpointError(f"{self.path}: no tensor is named {name}")
        if shard not in self._headers:
            if not (self.path / shard).is_file():
                raise CheckpointError(f"{self.path / shard}: missing, and needed for {name}")
            self._headers[shard] = read_header(self.path / shard)
        info = self._headers[shard].get(name)
        if info is None:
            raise CheckpointError(f"{self.path / shard}: lacks {name}, which the index says it holds")
        return info

    @cached_property
    def _headers(self) -> dict[str, dict[str, TensorInfo]]:
        return {}

    @cached_property
    def _names_by_block(self) -> dict[int, tuple[str, ...]]:
        names: dict[int, list[str]] = {}
        for name in sorted(self.weight_map):
            rest = name.removeprefix(self.block_prefix)
            number = rest.partition(".")[0]
            inside = rest != name and number.isdecimal() and int(number) < self.num_blocks
            names.setdefault(int(number) if inside else -1, []).append(name)
        return {block: tuple(found) for block, found in names.items()}

    def _number(self, keys: tuple[str, ...]) -> int:
        for key in keys:
            value = self.text_config.get(key)
            if type(value) is int:
                return value
        raise CheckpointError(f"{self.path / 'config.json'}: states none of {', '.join(keys)}")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: missing") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: can't be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: is not a JSON object")
    return value


def _read_index(path: Path) -> dict[str, str]:
    """Read which shard holds which tensor; shards are plain file names, so that none lies elsewhere."""
    weight_map = _read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(
        isinstance(shard, str) and shard == Path(shard).name and shard.endswith(".safetensors")
        for shard in weight_map.values()
    ):
        raise CheckpointError(f"{path}: damaged, it has no weight_map of file names")
    return weight_map
