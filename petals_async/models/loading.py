"""Filling a model class with tensors that were read beforehand, by transformers' own loader.

The loader is transformers' own since checkpoints and models differ in names and layout (fused experts, renamed
modules) in ways that only it knows.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers.utils import logging as transformers_logging

from petals_async.errors import CheckpointError
from petals_async.models.checkpoint import Checkpoint

_ONE_AT_A_TIME = threading.Lock()
"""transformers patches torch's initialisers and its own log level for the whole process while it loads."""


def load_model(
    checkpoint: Checkpoint,
    model_class: Any,
    config: Any,
    tensors: dict[str, Tensor],
    dtype: torch.dtype,
    device: str,
) -> Any:
    """Build a model on `meta` and put the tensors into it.

    Args:
        checkpoint: Where the tensors came from, for messages.
        model_class: A model class of transformers, or a cut one.
        config: The model's own configuration; it is kept and changed.
        tensors: By their names in the checkpoint. Emptied, so that memory is held once.
        dtype: Of the model.
        device: As torch names it.

    Returns:
        The model, in evaluation mode, its weights without gradients.

    Raises:
        CheckpointError: Tensors are missing or have other shapes than the configuration says; the message names one.
    """
    model_class._keys_to_ignore_on_load_unexpected = [r".*"]
    named = {checkpoint.text_name(name): tensors.pop(name) for name in list(tensors)}
    with _ONE_AT_A_TIME, quiet_transformers():
        model, report = model_class.from_pretrained(
            None,
            config=config,
            state_dict=named,
            dtype=dtype,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # reported below, with the file's name
        )
    del named
    for problem, names in (
        ("is missing", report["missing_keys"]),
        ("has another shape", report["mismatched_keys"]),
    ):
        if names:
            raise _load_error(checkpoint, problem, sorted(map(str, names)))
    model.requires_grad_(False)
    return model.eval().to(device)


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep transformers' progress bars and loading reports off stderr; what they say is raised as errors here."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity(transformers_logging.CRITICAL)
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()


def _load_error(checkpoint: Checkpoint, problem: str, names: list[str]) -> CheckpointError:
    wanted = names[0].strip("('").partition("'")[0]
    shards = {shard for name, shard in checkpoint.weight_map.items() if name.endswith(wanted)}
    file = checkpoint.path / (shards.pop() if len(shards) == 1 else "config.json")
    return CheckpointError(f"{file}: {wanted} {problem} ({len(names)} in all); the configuration asks for it")
