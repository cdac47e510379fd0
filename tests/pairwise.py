"""A small pairwise chooser: few combinations in which every pair of values of two parameters comes together.

Greedy and deterministic: of all allowed combinations the one is taken next that brings the most pairs not yet
seen; once all have been seen, the one with the most new triples, until there are as many as asked for. Ties go to
the earlier combination in the order of `itertools.product`.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Combination = dict[str, Any]


def pairwise(
    parameters: Mapping[str, Sequence[Any]],
    *,
    allowed: Callable[[Combination], bool] = lambda _combination: True,
    at_least: int = 0,
) -> list[Combination]:
    """Return combinations that hold every allowed pair, and then the best triples, up to `at_least` of them."""
    names = list(parameters)
    left = [values for values in product(*parameters.values()) if allowed(dict(zip(names, values, strict=True)))]
    chosen: list[tuple[Any, ...]] = []
    for size in (2, 3):
        missing = {group for values in left + chosen for group in _groups(values, size)}
        missing -= {group for values in chosen for group in _groups(values, size)}
        while missing and left and (size == 2 or len(chosen) < at_least):
            best = max(left, key=lambda values: len(missing & _groups(values, size)))
            left.remove(best)
            chosen.append(best)
            missing -= _groups(best, size)
    return [dict(zip(names, values, strict=True)) for values in chosen]


def _groups(values: tuple[Any, ...], size: int) -> set[tuple[tuple[int, Any], ...]]:
    return set(combinations(enumerate(values), size))
