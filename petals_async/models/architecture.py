"""What a checkpoint's architecture is to transformers, and whether it can be cut into blocks at all."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from petals_async.errors import UnsupportedModelError
from petals_async.models.checkpoint import Checkpoint

CUTTABLE_LAYER_TYPES = frozenset({"full_attention", "sliding_attention", "chunked_attention", "attention"})
"""Layers whose whole memory of a sequence is keys and values, one of each a token: these can be truncated."""


@dataclass(frozen=True)
class Architecture:
    """The classes that transformers has for a checkpoint.

    Attributes:
        config: The language model's configuration; take `own_config`, since building a model changes it.
        base_class: The model without a head (what `AutoModel` would take).
        causal_class: The model with a head (what `AutoModelForCausalLM` would take).
    """

    config: Any
    base_class: Any
    causal_class: Any

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> Architecture:
        """Find the classes and check that blocks can be cut out of them.

        Raises:
            UnsupportedModelError: They can't; the message says why.
        """
        config = _read_config(checkpoint)
        reason = _refusal(config)
        if reason:
            raise UnsupportedModelError(f"{checkpoint.name} ({config.model_type}) can't be cut into blocks: {reason}")
        return cls(config, _model_class(AutoModel, config), _model_class(AutoModelForCausalLM, config))

    def own_config(self) -> Any:
        """Return a copy for one model to keep and change."""
        return copy.deepcopy(self.config)


def can_fuse(model: Any) -> bool:
    """Whether steps of several sessions may be tried in one pass: attention by a function of ours, given positions.

    Biased scores (ALiBi), chunked windows, and rotary tables that depend on the length of the whole sequence (dynamic,
    longrope) would be silently wrong there.
    """
    config = model.config
    types = set(getattr(config, "layer_types", None) or ("full_attention",))
    ropes = _rope_types(getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {})
    return (
        bool(getattr(model, "_supports_attention_backend", False))
        and types <= {"full_attention", "sliding_attention", "attention"}
        and not ropes & {"dynamic", "longrope"}
    )


def _rope_types(parameters: dict[str, Any]) -> set[str]:
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return {str(one.get("rope_type", one.get("type", "default"))) for one in nested or [parameters]}


def _read_config(checkpoint: Checkpoint) -> Any:
    try:
        config = AutoConfig.from_pretrained(checkpoint.path, trust_remote_code=False, local_files_only=True)
    except (ValueError, KeyError) as error:
        kind = checkpoint.config.get("model_type")
        raise UnsupportedModelError(
            f"{checkpoint.name}: transformers has no architecture for model_type {kind!r}: {error}"
        ) from error
    if getattr(config, "is_encoder_decoder", False):
        return config
    text_config = config.get_text_config(decoder=True)
    if text_config is not config:  # a model that also sees or hears: its own flag is the one that counts
        tied = getattr(config, "tie_word_embeddings", None)
        if tied is not None:
            text_config.tie_word_embeddings = tied
    return text_config


def _refusal(config: Any) -> str:
    """Say why the architecture can't be cut into blocks; empty if it can."""
    if getattr(config, "is_encoder_decoder", False):
        return "it is an encoder-decoder, and decoder blocks also read the encoder's output"
    if getattr(config, "quantization_config", None) is not None:
        return "its weights are quantised (quantization_config in config.json)"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some of its layers share keys and values with earlier layers (num_kv_shared_layers)"
    if getattr(config, "hidden_size_per_layer_input", 0):
        return "its layers take per-layer inputs beside the hidden states (hidden_size_per_layer_input)"
    for index, kind in enumerate(getattr(config, "layer_types", None) or ()):
        if kind not in CUTTABLE_LAYER_TYPES:
            return f"layer {index} is {kind}: a recurrent or indexed state, not keys and values a token"
    base, causal = _model_class(AutoModel, config), _model_class(AutoModelForCausalLM, config)
    if base is None or causal is None:
        return "transformers has no causal language model of this kind"
    if getattr(base, "_is_stateful", False) or getattr(causal, "_is_stateful", False):
        return "it keeps a recurrent state, which can't be truncated or replayed in part"
    accepted = inspect.signature(base.forward).parameters
    if "inputs_embeds" not in accepted or not {"cache", "past_key_values"} & set(accepted):
        return "its forward takes no inputs_embeds or no cache"
    return ""


def _model_class(auto: Any, config: Any) -> Any:
    mapping = auto._model_mapping
    if type(config) not in mapping:
        return None
    found = mapping[type(config)]
    return found[0] if isinstance(found, (tuple, list)) else found
