"""Tokens through the blocks without the base model's own forward, where that gives the very same bits.

A base model's forward makes masks, wraps and unwraps its arguments, and collects outputs that nobody asked for. Where
no mask is needed (a single token behind full attention; any tokens, with our own attention function), what a block is
handed is known beforehand: constants, the cache, positions and their rotary factors. Which of these a block takes is
read off one real pass at load, and the shortened one is used only if it gives equal outputs, keys and values there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import Cache

from petals_async.models.cut import block_output

FULL_ATTENTION = frozenset({"full_attention", "attention"})
"""Layers that see every token before them: one new token needs no mask, however long the cache is."""


class DirectPass:
    """Calls blocks with what the base model would hand them.

    Args:
        arguments: Constants that every block is handed, by name.
        cache_name: The cache's name among a block's arguments.
        positions_name: The positions' name; empty if blocks aren't handed any.
        rotary_name: The rotary factors' name; empty if blocks aren't handed any.
        rotary: Makes the rotary factors, as the model's own forward does; None if blocks aren't handed any.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        *,
        cache_name: str,
        positions_name: str,
        rotary_name: str,
        rotary: Callable[..., Any] | None,
    ) -> None:
        self._arguments = arguments
        self._cache_name = cache_name
        self._positions_name = positions_name
        self._rotary_name = rotary_name
        self._rotary = rotary

    def run(self, blocks: Sequence[Callable[..., Any]], hidden: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Run tokens through some blocks; their keys and values go to the cache.

        Args:
            blocks: In order.
            hidden: (batch, tokens, hidden_size).
            positions: The tokens' indices, (1, tokens).
            cache: Holds all tokens before them.

        Returns:
            (batch, tokens, hidden_size).
        """
        arguments = {**self._arguments, self._cache_name: cache}
        if self._positions_name:
            arguments[self._positions_name] = positions
        if self._rotary is not None:
            arguments[self._rotary_name] = self._rotary(hidden, position_ids=positions)
        for block in blocks:
            hidden = block_output(block(hidden, **arguments))
        return hidden

    @classmethod
    def like(cls, model: Any, calls: Sequence[dict[str, Any]], *, masked: bool) -> DirectPass | None:
        """Return what hands blocks the same as one observed pass did; None if that isn't known.

        Args:
            model: The base model.
            calls: What each block was handed by name, beside the hidden states.
            masked: Whether a later token could need a mask, if the model's configuration has windows.
        """
        if not calls or (masked and not _sees_all(model.config)) or not all(_same(call, calls[0]) for call in calls):
            return None
        by_kind: dict[str, list[str]] = {"constant": [], "cache": [], "positions": [], "rotary": [], "unknown": []}
        for name, value in calls[0].items():
            by_kind[_kind(value)].append(name)
        if (
            by_kind["unknown"]
            or len(by_kind["cache"]) != 1
            or len(by_kind["positions"]) > 1
            or len(by_kind["rotary"]) > 1
        ):
            return None
        rotary = getattr(model, "rotary_emb", None)
        if by_kind["rotary"] and not _takes_positions_alone(rotary):
            return None
        return cls(
            {name: calls[0][name] for name in by_kind["constant"]},
            cache_name=by_kind["cache"][0],
            positions_name="".join(by_kind["positions"]),
            rotary_name="".join(by_kind["rotary"]),
            rotary=rotary if by_kind["rotary"] else None,
        )


def observe(blocks: Sequence[nn.Module], run: Callable[[], Any]) -> list[dict[str, Any]]:
    """Run a pass, and return what each block was handed by name; empty if one was handed more than one by place."""
    calls: list[dict[str, Any]] = []
    by_place: list[int] = []

    def note(_block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append(dict(kwargs))
        by_place.append(len(args))

    hooks = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    try:
        run()
    finally:
        for hook in hooks:
            hook.remove()
    return calls if len(calls) == len(blocks) and set(by_place) == {1} else []


def _sees_all(config: Any) -> bool:
    """Whether every layer attends to the whole past, so that no mask appears behind some window or chunk."""
    types = getattr(config, "layer_types", None)
    windows = ("sliding_window", "attention_chunk_size", "attention_window_size", "window_size")
    if types is not None:
        return set(types) <= FULL_ATTENTION
    return all(getattr(config, name, None) is None for name in windows)


def _takes_positions_alone(rotary: Any) -> bool:
    """Whether rotary factors are made of hidden states and `position_ids`, and nothing else."""
    if not isinstance(rotary, nn.Module):
        return False
    accepted = inspect.signature(rotary.forward).parameters
    needed = [name for name, parameter in accepted.items() if parameter.default is inspect.Parameter.empty]
    return len(needed) == 2 and needed[1] == "position_ids"


def _kind(value: Any) -> str:
    if isinstance(value, Cache):
        return "cache"
    if value is None or isinstance(value, bool):
        return "constant"
    if isinstance(value, Tensor):
        return "positions" if value.shape[:-1] == (1,) and not value.is_floating_point() else "unknown"
    if isinstance(value, tuple) and value and all(isinstance(part, Tensor) for part in value):
        return "rotary"
    return "unknown"


def _same(left: dict[str, Any], right: dict[str, Any]) -> bool:
    """Whether two blocks were handed the very same objects."""
    return left.keys() == right.keys() and all(left[name] is right[name] for name in left)
