"""Choosing the next token: transformers' own processors over all tokens so far, and a generator of one's own.

A generation's draws depend on its seed, its tokens and its logits alone, never on what else runs at the same time,
and a recovered generation draws what it would have drawn.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList
from transformers.generation.logits_process import (
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from petals_async.client.settings import GenerationSettings
from petals_async.errors import ComputeError, RequestError

SEED_BYTES = 8
"""Bytes of a random seed, as many as torch's generator takes."""


def build_processors(settings: GenerationSettings, prompt_tokens: int) -> LogitsProcessorList:
    """Return the processors that transformers' `generate` would build, in the same order.

    Args:
        settings: Which.
        prompt_tokens: Tokens before the first new one.

    Source: transformers 5.24, GenerationMixin._get_logits_processor.
    """
    processors: list[Any] = []
    if settings.repetition_penalty != 1.0:
        processors.append(RepetitionPenaltyLogitsProcessor(settings.repetition_penalty))
    if settings.min_new_tokens > 0 and settings.eos_token_ids:
        ids = torch.tensor(settings.eos_token_ids)
        processors.append(MinNewTokensLengthLogitsProcessor(prompt_tokens, settings.min_new_tokens, ids))
    processors = _merge(processors, settings.logits_processor)
    return LogitsProcessorList(processors + _warpers(settings))


def _merge(own: Sequence[Any], custom: Sequence[Any]) -> list[Any]:
    """Add the caller's processors; one of a type that is there already takes its place, as in transformers."""
    by_type = {type(processor): processor for processor in reversed(custom)}
    merged = [by_type.get(type(processor), processor) for processor in own]
    merged.extend(processor for processor in custom if processor not in merged)
    return merged


def _warpers(settings: GenerationSettings) -> list[Any]:
    if not settings.do_sample:
        return []
    warpers: list[Any] = []
    if settings.temperature != 1.0:
        warpers.append(TemperatureLogitsWarper(settings.temperature))
    if settings.top_k != 0:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    return warpers


class Sampler:
    """Picks one generation's tokens, and keeps all of them. Runs on the CPU, wherever the logits come from.

    Args:
        settings: How to pick.
        prompt_ids: All tokens before the first new one, those of earlier turns included.
    """

    def __init__(self, settings: GenerationSettings, prompt_ids: Sequence[int]) -> None:
        self._settings = settings
        self._processors = build_processors(settings, len(prompt_ids))
        self._ids = torch.tensor([list(prompt_ids)], dtype=torch.long)  # (1, capacity)
        self._num_ids = len(prompt_ids)
        self._generator = torch.Generator().manual_seed(_seed(settings.seed))

    @property
    def input_ids(self) -> Tensor:
        """The prompt and all tokens picked so far, (1, n); not to be written to."""
        return self._ids[:, : self._num_ids]

    def pick(self, logits: Tensor) -> int:
        """Pick the next token and remember it.

        Args:
            logits: (1, vocab_size), any float dtype, any device; not changed.

        Raises:
            ComputeError: The logits hold NaN or infinity, or no finite number at all: some server or the head
                computed nonsense (NON_FINITE). No token is made of it.
            RequestError: The processors left no token to pick, or a temperature so low that scores overflow.
        """
        with torch.no_grad():
            return self._pick(logits)

    def _pick(self, logits: Tensor) -> int:
        raw = logits.detach().to("cpu", torch.float32, copy=True)  # (1, V)
        if not _has_finite_top(raw):
            raise ComputeError("the logits hold NaN or infinity", reason="NON_FINITE")
        scores = self._processors(self.input_ids, raw)  # (1, V)
        if self._processors and not _has_finite_top(scores):
            raise RequestError("logits processors or temperature left no finite score to pick from")
        token = self._choose(scores)
        self._append(token)
        return token

    def _choose(self, scores: Tensor) -> int:
        if not self._settings.do_sample:
            return int(scores.argmax(dim=-1))
        probabilities = scores.softmax(dim=-1)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))

    def _append(self, token: int) -> None:
        if self._num_ids == self._ids.shape[1]:  # doubled, so that a token costs O(1)
            self._ids = torch.cat([self._ids, torch.zeros_like(self._ids)], dim=1)
        self._ids[0, self._num_ids] = token
        self._num_ids += 1


def _has_finite_top(scores: Tensor) -> bool:
    """Whether the largest score is finite: false for NaN or +inf anywhere, and for -inf everywhere."""
    return math.isfinite(float(scores.max()))


def _seed(seed: int | None) -> int:
    return int.from_bytes(os.urandom(SEED_BYTES), "little") if seed is None else seed
