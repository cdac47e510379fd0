"""Linear layers whose rows have the same bits whatever other rows are computed beside them.

Matrix kernels round differently for different row counts: a token decoded alone and the same token in a batch, or
in a replay, differ in their last bits, and in 16 bits that changes which token is the likeliest. What a row's bits
depend on is the *class* that the row count falls into. So each kind of layer is tried once, at load, for the interval
of row counts around 16 that gives equal bits; calls are cut to its upper end, and padded to its lower.

Weights packed beforehand by oneDNN are tried first for large layers: their interval begins at one row, and several
rows cost less. They are a private interface of torch, so whatever they lack (bfloat16 without AVX-512, other
devices) falls back to torch's own `linear`.

Inputs that cancel show differences which random ones hide: the second half of a row is minus the first, and the
second half of each weight equals the first, so that what is left is rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

MAX_TILE_ROWS = 64
"""Rows of one call at most. More rows gain little on a CPU, and each further size would have to be tried."""

MIDDLE_ROWS = 16
"""The row count whose class is used."""

PROBED_ROWS = (1, 2, 3, 4, 5, 6, 8, 9, 11, 12, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64)

PACK_FROM_WEIGHTS = 1 << 17
"""Weights of a layer from which packing pays: below, the packed call's own 20 us are more than the product."""

Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class RowInterval:
    """Row counts that give equal bits: each from `least` to `most`."""

    least: int
    most: int


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """How one kind of linear layer is computed.

    Attributes:
        packed: Whether by packed weights.
        rows: The row counts used; None if no interval was found, and bits depend on the batch.
    """

    packed: bool
    rows: RowInterval | None


class RowLinear(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """Stands for a `Linear` or `Conv1D`, and takes over its weight.

    Args:
        weight: (outputs, inputs).
        bias: (outputs,) or None.
        policy: How to compute it.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, policy: RowPolicy) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.policy = policy
        self._rows = policy.rows or RowInterval(1, 1 << 62)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)
        self.weight = nn.Parameter(weight.to("meta") if policy.packed else weight, requires_grad=False)
        self._product = _packed(weight, bias) if policy.packed else _plain(weight, bias)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (..., outputs) of (..., inputs)."""
        rows = inputs.reshape(-1, self.in_features)
        count, most = rows.shape[0], self._rows.most
        if count <= most:
            found = self._tile(rows)
        else:
            found = torch.cat([self._tile(rows[start : start + most]) for start in range(0, count, most)])
        return found.view(*inputs.shape[:-1], self.out_features)

    def _tile(self, rows: Tensor) -> Tensor:
        count, least = rows.shape[0], self._rows.least
        if count >= least:
            return self._product(rows)
        padded = rows.expand(least, -1) if count == 1 else nn.functional.pad(rows, (0, 0, 0, least - count))
        return self._product(padded)[:count]

    def extra_repr(self) -> str:
        """Say what it is and how it is computed, in a few words."""
        rows = self.policy.rows
        return (
            f"{self.in_features}x{self.out_features} {'packed' if self.policy.packed else 'plain'}, "
            f"{f'equal bits in {rows.least} to {rows.most} rows' if rows else 'bits depend on the rows'}"
        )


def replace_linears(module: nn.Module) -> None:
    """Put a `RowLinear` in the place of every `Linear` and `Conv1D` below a module."""
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) in (nn.Linear, Conv1D) and not child._forward_hooks and not child._forward_pre_hooks:
                weight = child.weight.detach()
                weight = weight.T.contiguous() if type(child) is Conv1D else weight
                bias = None if child.bias is None else child.bias.detach()
                setattr(parent, name, RowLinear(weight, bias, policy_for(weight, bias)))


def all_exact(module: nn.Module) -> bool:
    """Whether every matrix below a module belongs to a `RowLinear` with an interval."""
    matrices: set[int] = {id(parameter) for parameter in module.parameters() if parameter.ndim > 1}
    linears = [inner for inner in module.modules() if isinstance(inner, RowLinear) and inner.policy.rows is not None]
    return not matrices - {id(linear.weight) for linear in linears}


def policy_for(weight: Tensor, bias: Tensor | None) -> RowPolicy:
    """Return how a layer of this kind is computed on this machine, from one trial of each kind."""
    outputs, inputs = weight.shape
    return _policy(outputs, inputs, weight.dtype, weight.device, bias is not None, torch.get_num_threads())


@cache
def _policy(
    outputs: int, inputs: int, dtype: torch.dtype, device: torch.device, with_bias: bool, _num_threads: int
) -> RowPolicy:
    generator = torch.Generator().manual_seed(0)
    half = (inputs + 1) // 2
    first = torch.randn(MAX_TILE_ROWS, half, generator=generator)
    nearly = first + 1e-3 * torch.randn(MAX_TILE_ROWS, half, generator=generator)
    rows = torch.cat([first, -nearly], dim=1)[:, :inputs].to(device, dtype)
    columns = torch.randn(outputs, half, generator=generator)
    weight = torch.cat([columns, columns], dim=1)[:, :inputs].to(device, dtype).contiguous()
    bias = torch.randn(outputs, generator=generator).to(device, dtype) if with_bias else None
    with torch.no_grad():
        if outputs * inputs >= PACK_FROM_WEIGHTS and device.type == "cpu":
            try:
                interval = find_interval(_packed(weight, bias), rows)
            except (RuntimeError, AttributeError):  # not for this processor or dtype, or gone from torch
                interval = None
            if interval is not None and interval.least == 1:
                return RowPolicy(True, interval)
        return RowPolicy(False, find_interval(_plain(weight, bias), rows))


def find_interval(product: Product, rows: Tensor) -> RowInterval | None:
    """Return the row counts around `MIDDLE_ROWS` that give a row the bits which it has there.

    Args:
        product: The layer.
        rows: (MAX_TILE_ROWS, inputs) of inputs that cancel.

    Returns:
        None if even at `MIDDLE_ROWS` a row's bits depend on its place or its neighbours.
    """
    whole = torch.cat([product(rows[at : at + MIDDLE_ROWS]) for at in range(0, MAX_TILE_ROWS, MIDDLE_ROWS)])

    def equal(count: int) -> bool:
        behind = MAX_TILE_ROWS - count
        turned = product(rows[behind:].flip(0)).flip(0)
        return bool(torch.equal(product(rows[:count]), whole[:count]) and torch.equal(turned, whole[behind:]))

    if not equal(MIDDLE_ROWS):
        return None
    least = most = MIDDLE_ROWS
    for count in reversed([count for count in PROBED_ROWS if count < MIDDLE_ROWS]):
        if not equal(count):
            break
        least = count
    for count in [count for count in PROBED_ROWS if count > MIDDLE_ROWS]:
        if not equal(count):
            break
        most = count
    return RowInterval(least, most)


def _plain(weight: Tensor, bias: Tensor | None) -> Product:
    def product(rows: Tensor) -> Tensor:
        return nn.functional.linear(rows, weight, bias)

    return product


def _packed(weight: Tensor, bias: Tensor | None) -> Product:
    operations: Any = torch.ops.mkldnn
    packed = operations._reorder_linear_weight(weight, MIDDLE_ROWS)

    def product(rows: Tensor) -> Tensor:
        found: Tensor = operations._linear_pointwise(rows, packed, bias, "none", [], "")
        return found

    return product
