"""Cutting a model of transformers: some of its blocks stay, what lies around them is made neutral, or the reverse.

The architecture's own class is built in full on the `meta` device, so that every block knows its true index; then
its list of blocks is replaced by a `BlockList`, which keeps some blocks under their absolute names. The model's own
`forward` still makes masks, rotary tables and per-layer arguments, and believes that it walks over all blocks: the
list hands it the kept ones and, for all others, a stand-in that returns what it is given. The first block that is
run takes its input from `entry` instead (so nothing before the blocks matters), and what the last one returns is
kept in `exit` (so nothing after them matters).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from petals_async.errors import UnsupportedModelError


class BlockList(nn.ModuleList):  # type: ignore[misc]  # torch is untyped here
    """The blocks `[start, end)` of a list of `total`, posing as the whole list.

    Args:
        blocks: The kept blocks.
        start: Index of the first of them.
        total: Blocks of the whole model.
    """

    def __init__(self, blocks: list[nn.Module], *, start: int, total: int) -> None:
        super().__init__()
        for offset, block in enumerate(blocks):
            self.add_module(str(start + offset), block)
        self.start, self.end, self.total = start, start + len(blocks), total
        self.entry: Tensor | None = None
        self.exit: Tensor | None = None
        self._sequence: list[Callable[..., Any]] = []
        self.select(self.start, self.end)

    def select(self, start: int, end: int) -> None:
        """Choose which of the kept blocks run, `[start, end)`; with none, the list is a single stand-in."""
        if not self._modules:
            self._sequence = [_Border(self)]
            return
        attributes_of = next(iter(self._modules.values()))
        run: list[Callable[..., Any]] = [*self.kept(start, end)]
        run[0] = _First(self, run[0])
        run[-1] = _Last(self, run[-1])
        before = [_Skipped(attributes_of)] * start
        self._sequence = [*before, *run, *[_Skipped(attributes_of)] * (self.total - end)]

    def kept(self, start: int, end: int) -> list[nn.Module]:
        """Return the kept blocks `[start, end)` themselves."""
        return list(self._modules.values())[start - self.start : end - self.start]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._sequence)

    def __getitem__(self, index: Any) -> Any:
        return self._sequence[index]

    def __len__(self) -> int:
        return len(self._sequence)


class _Either(Tensor):  # type: ignore[misc]
    """A tensor that also answers as the tuple (tensor, None): architectures differ in what a block returns."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int):
            return self.as_subclass(Tensor) if index == 0 else None
        return self.as_subclass(Tensor)[index]

    def __iter__(self) -> Iterator[Any]:
        return iter((self.as_subclass(Tensor), None))


def block_output(output: Any) -> Tensor:
    """Return the hidden states of what a block returned: alone, or the first of a tuple."""
    found: Tensor = output[0] if isinstance(output, tuple) else output
    return found


class _Stand:
    """Something in a block's place: attributes that a model reads off its blocks are the block's."""

    def __init__(self, block: Any) -> None:
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_block"], name)


class _Skipped(_Stand):
    def __call__(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        return hidden_states.as_subclass(_Either)


class _First(_Stand):
    def __init__(self, blocks: BlockList, block: Any) -> None:
        super().__init__(block)
        self._blocks = blocks

    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self._block(self._blocks.entry, *args, **kwargs)


class _Last(_First):
    def __call__(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        output = self._block(hidden_states, *args, **kwargs)
        self._blocks.exit = block_output(output)
        return output


class _Border:
    """All blocks at once, at the client: keeps what comes in as `exit`, and goes on with `entry` if there is one."""

    def __init__(self, blocks: BlockList) -> None:
        self._blocks = blocks
        self.attention_type = self.layer_type = "full_attention"

    def __call__(self, hidden_states: Tensor, *_args: Any, **_kwargs: Any) -> Any:
        self._blocks.exit = hidden_states
        entry = self._blocks.entry
        return (hidden_states if entry is None else entry).as_subclass(_Either)


class _Zero(nn.Module):  # type: ignore[misc]
    """In place of an embedding: nothing is added."""

    def forward(self, *_args: Any, **_kwargs: Any) -> Tensor:
        return torch.zeros(())


class _Same(nn.Module):  # type: ignore[misc]
    """In place of a norm or projection around the blocks."""

    def forward(self, hidden_states: Any, *_args: Any, **_kwargs: Any) -> Any:
        return hidden_states


def subclass(base: Any, after_init: Callable[[Any], None]) -> Any:
    """Derive a model class whose constructor ends with `after_init(model)`; for transformers it is still `base`."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        base.__init__(self, config, *args, **kwargs)
        after_init(self)

    return type(base.__name__, (base,), {"__init__": init, "__module__": base.__module__})


def find_blocks(model: nn.Module, total: int) -> str:
    """Return the dotted path of a model's list of blocks: the outermost list of that length.

    Raises:
        UnsupportedModelError: There is none, or more than one.
    """
    paths: list[str] = [
        path for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) == total
    ]
    outermost = min((path.count(".") for path in paths), default=0)
    found = [path for path in paths if path.count(".") == outermost]
    if len(found) != 1:
        raise UnsupportedModelError(f"{type(model).__name__} has {len(found)} lists of {total} blocks, expected one")
    return found[0]


def replace_blocks(model: nn.Module, total: int, start: int, end: int) -> BlockList:
    """Keep only the blocks `[start, end)` of a model, in a `BlockList`, and return it."""
    path = find_blocks(model, total)
    parent_path, _, name = path.rpartition(".")
    kept = list(model.get_submodule(path))[start:end]
    blocks = BlockList(kept, start=start, total=total)
    setattr(model.get_submodule(parent_path), name, blocks)
    return blocks


def modules_around(model: nn.Module, blocks: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Return (parent, name, module) for each outermost module that neither holds nor is the list of blocks."""
    holders = {id(module) for module in model.modules() if any(inner is blocks for inner in module.modules())}
    return [
        (parent, name, child)
        for parent in model.modules()
        if id(parent) in holders and parent is not blocks
        for name, child in parent.named_children()
        if id(child) not in holders
    ]


def neutralise_around(model: nn.Module, blocks: nn.Module) -> None:
    """Replace all that has weights outside the blocks: embeddings give nothing, all else gives its input.

    Raises:
        UnsupportedModelError: A weight outside the blocks belongs to no module that could be replaced.
    """
    for parent, name, module in modules_around(model, blocks):
        if any(True for _ in module.parameters()):
            setattr(parent, name, _Zero() if isinstance(module, nn.Embedding) else _Same())
    inside = {id(parameter) for parameter in blocks.parameters()}
    for name, parameter in model.named_parameters():
        if id(parameter) not in inside:
            raise UnsupportedModelError(f"{type(model).__name__} has a weight outside its blocks: {name}")
