"""How to decode: what the model directory, a GenerationConfig and keywords say, checked and merged.

As in transformers' `generate`: a keyword wins over the GenerationConfig that was passed, whose set fields win over
the model directory's generation_config.json, which wins over transformers' defaults (so sampling has top_k = 50 if
nobody says otherwise). Three things differ, all on purpose:

- What isn't implemented isn't accepted: a field or keyword that would change the result raises RequestError by name.
- The keyword `temperature` says whether to sample, unless `do_sample` is given as well: 0 is greedy, above 0 samples.
- Without `max_new_tokens` it is DEFAULT_MAX_NEW_TOKENS. `max_length`, which counts the prompt as well, isn't taken;
  in a model directory's file, where it only states what the model can do, it is passed over.

Source: transformers 5.24, GenerationMixin._prepare_generation_config and ._get_logits_processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from transformers import GenerationConfig

from petals_async.errors import RequestError

DEFAULT_MAX_NEW_TOKENS = 256
"""New tokens at most, when nobody says otherwise."""

MAX_NEW_TOKENS_LIMIT = 2**31 - 1
"""Largest max_new_tokens that is a number of tokens at all; servers and models have limits of their own."""

MAX_SEED = 2**64 - 1
"""Largest seed that torch's generator takes."""

MAX_STOP_STRINGS = 64
"""Stop strings of one request at most; each is looked for after every token."""

MAX_STOP_CHARS = 1024
"""Characters of one stop string at most; so many may be held back from a stream."""


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    """Checked options of one generation.

    Attributes:
        max_new_tokens: New tokens at most, at least 1.
        min_new_tokens: No end token before so many new tokens.
        do_sample: Whether to draw tokens; the most probable one is taken otherwise.
        temperature: Scores are divided by it, above 0; only when sampling.
        top_k: Draw from so many tokens; 0 for all; only when sampling.
        top_p: Draw from the fewest tokens with this probability together, 0 to 1; only when sampling.
        repetition_penalty: Above 1 makes tokens of the prompt and of the text so far rarer.
        stop_strings: The text ends before the first of these.
        eos_token_ids: Tokens that end the text.
        seed: Of the draws; None for a new one each time.
        logits_processor: More processors, in transformers' calling convention.
        stopping_criteria: More reasons to stop, in transformers' calling convention.
    """

    max_new_tokens: int = DEFAULT_MAX_NEW_TOKENS
    min_new_tokens: int = 0
    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()
    eos_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    logits_processor: tuple[Callable[..., Any], ...] = ()
    stopping_criteria: tuple[Callable[..., Any], ...] = ()


IGNORED = frozenset(
    {
        "use_cache", "cache_implementation", "cache_config", "max_cache_len", "low_memory",
        "prefill_chunk_size", "compile_config", "disable_compile", "continuous_batching_config",
        "pad_token_id", "bos_token_id", "decoder_start_token_id",
        "early_stopping", "length_penalty", "diversity_penalty",
        "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule",
        "assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind",
        "assistant_ensemble_weight", "max_matching_ngram_size", "transformers_version",
    }
)  # fmt: skip
"""Fields that change no token here: about caches, padding, and modes (beams, assistants) that are refused by name."""

SAMPLING_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0.0,),
    "top_h": (),
    "typical_p": (1.0,),
    "epsilon_cutoff": (0.0,),
    "eta_cutoff": (0.0,),
}
"""Not implemented, and without effect in greedy decoding: the values, besides None, that change nothing."""

NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    **SAMPLING_NEUTRAL,
    "min_length": (0,),
    "num_beams": (1,),
    "num_beam_groups": (1,),
    "num_return_sequences": (1,),
    "penalty_alpha": (0.0,),
    "encoder_repetition_penalty": (1.0,),
    "no_repeat_ngram_size": (0,),
    "encoder_no_repeat_ngram_size": (0,),
    "guidance_scale": (1.0,),
    "renormalize_logits": (False,),
    "remove_invalid_values": (False,),
    "token_healing": (False,),
    "use_mtp": (False,),
    "output_attentions": (False,),
    "output_hidden_states": (False,),
    "output_scores": (False,),
    "output_logits": (False,),
    "return_dict_in_generate": (False,),
}
"""The values of options that aren't implemented, besides None, that change nothing."""

ADVICE: Mapping[str, str] = {
    "max_length": "; give max_new_tokens, which doesn't count the prompt",
    "max_time": "; give timeout_s",
    "num_return_sequences": "; pass the prompt several times in a list",
}
"""What to do instead."""

CONFIG_FIELDS = frozenset(name for name in vars(GenerationConfig()) if not name.startswith("_"))
"""Every field that transformers knows."""


def resolve_settings(
    model_defaults: GenerationConfig,
    generation_config: GenerationConfig | None = None,
    overrides: Mapping[str, Any] | None = None,
) -> GenerationSettings:
    """Merge and check what was said about decoding.

    Args:
        model_defaults: The model directory's own.
        generation_config: As transformers' `generate` takes it; fields that are None leave the defaults.
        overrides: Keywords. None means "none of it", whatever the model directory says: no end token, no top_k.

    Raises:
        RequestError: An unknown option, one that isn't implemented (UNSUPPORTED_OPTION), or a value outside its
            range (BAD_OPTION); the message names the option.
    """
    if generation_config is not None and not isinstance(generation_config, GenerationConfig):
        raise RequestError(
            f"generation_config must be a transformers GenerationConfig, got {type(generation_config).__name__}",
            reason="BAD_OPTION",
        )
    overrides = overrides or {}
    defaults = _set_fields(model_defaults)
    passed = {} if generation_config is None else _set_fields(generation_config)
    _check_keywords(overrides)
    _check_passed(passed, defaults)
    known = {name: value for name, value in defaults.items() if name in CONFIG_FIELDS}
    merged: dict[str, Any] = {**known, **passed, **overrides}
    merged["do_sample"] = _wants_sampling(merged, passed, overrides)
    _check_neutral(merged)
    return _build(merged)


def _set_fields(config: GenerationConfig) -> dict[str, Any]:
    return {name: value for name, value in vars(config).items() if value is not None and not name.startswith("_")}


def _refuse(name: str, value: Any) -> RequestError:
    return RequestError(f"{name}={value!r} is not supported{ADVICE.get(name, '')}", reason="UNSUPPORTED_OPTION")


def _is_neutral(name: str, value: Any) -> bool:
    return value is None or value in NEUTRAL.get(name, ())


def _is_own(name: str) -> bool:
    return name in OPTIONS or name in IGNORED


def _check_keywords(overrides: Mapping[str, Any]) -> None:
    """A keyword was typed for this call, so it must be known, and do what it says."""
    for name, value in overrides.items():
        if name not in CONFIG_FIELDS and name not in OPTIONS:
            raise RequestError(f"unknown option {name!r}", reason="UNSUPPORTED_OPTION")
        if not _is_own(name) and not _is_neutral(name, value):
            raise _refuse(name, value)


def _check_passed(passed: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """GenerationConfig takes any keyword: one that it doesn't know is a slip, unless the model's own file has it."""
    for name, value in passed.items():
        if name not in CONFIG_FIELDS and name not in OPTIONS and defaults.get(name) != value:
            raise RequestError(f"unknown option {name!r} in generation_config", reason="UNSUPPORTED_OPTION")
    if "max_length" in passed and "max_new_tokens" not in passed:
        raise _refuse("max_length", passed["max_length"])


def _check_neutral(merged: Mapping[str, Any]) -> None:
    """Whoever set it, what would change the result must be implemented."""
    for name, value in merged.items():
        if name == "max_length" or name not in CONFIG_FIELDS or _is_own(name):
            continue
        idle = name in SAMPLING_NEUTRAL and not merged["do_sample"]
        if not idle and not _is_neutral(name, value):
            raise _refuse(name, value)


def _wants_sampling(merged: Mapping[str, Any], passed: Mapping[str, Any], overrides: Mapping[str, Any]) -> bool:
    sample = merged.get("do_sample")
    if sample is not None and not isinstance(sample, bool):
        raise _bad("do_sample", "True or False", sample)
    temperature = merged.get("temperature")
    if temperature is not None and _number("temperature", temperature, 0.0) == 0.0:
        return False
    if "do_sample" not in overrides and "do_sample" not in passed and overrides.get("temperature") is not None:
        return True
    return bool(sample)


def _build(merged: Mapping[str, Any]) -> GenerationSettings:
    values = {name: read(name, merged[name]) for name, read in OPTIONS.items() if merged.get(name) is not None}
    if "top_k" in merged and merged["top_k"] is None:
        values["top_k"] = 0
    if not values.get("temperature"):
        values["temperature"] = 1.0
    values["eos_token_ids"] = values.pop("eos_token_id", ())
    settings = GenerationSettings(**values)
    if settings.min_new_tokens > settings.max_new_tokens:
        raise _bad("min_new_tokens", f"at most max_new_tokens={settings.max_new_tokens}", settings.min_new_tokens)
    return settings


def _bad(name: str, allowed: str, value: Any) -> RequestError:
    return RequestError(f"{name} must be {allowed}, got {value!r}", reason="BAD_OPTION")


def _integer(name: str, value: Any, low: int, high: int) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise _bad(name, f"a whole number from {low} to {high}", value)
    return int(value)


def _number(name: str, value: Any, low: float, high: float = math.inf, *, above: bool = False) -> float:
    """Read a finite number, `low` to `high`; `above`: more than `low`."""
    number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    if math.isfinite(number) and low <= number <= high and not (above and number == low):
        return number
    bounds = f"above {low:g}" if above else f"at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
    raise _bad(name, f"a finite number {bounds}", value)


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise _bad(name, "True or False", value)
    return value


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else value
    allowed = f"a string or a list of up to {MAX_STOP_STRINGS}, each of 1 to {MAX_STOP_CHARS} characters"
    if not isinstance(strings, (list, tuple)) or len(strings) > MAX_STOP_STRINGS:
        raise _bad(name, allowed, value)
    if not all(isinstance(string, str) and 1 <= len(string) <= MAX_STOP_CHARS for string in strings):
        raise _bad(name, allowed, value)
    return tuple(dict.fromkeys(strings))


def _token_ids(name: str, value: Any) -> tuple[int, ...]:
    ids = value.tolist() if hasattr(value, "tolist") else value
    ids = ids if isinstance(ids, (list, tuple)) else [ids]
    return tuple(dict.fromkeys(_integer(name, token, 0, MAX_NEW_TOKENS_LIMIT) for token in ids))


def _callables(name: str, value: Any) -> tuple[Callable[..., Any], ...]:
    if not isinstance(value, (list, tuple)) or not all(callable(item) for item in value):
        raise _bad(name, "a list of callables, as transformers has them", value)
    return tuple(value)


OPTIONS: Mapping[str, Callable[[str, Any], Any]] = {
    "max_new_tokens": lambda name, value: _integer(name, value, 1, MAX_NEW_TOKENS_LIMIT),
    "min_new_tokens": lambda name, value: _integer(name, value, 0, MAX_NEW_TOKENS_LIMIT),
    "do_sample": _flag,
    "temperature": lambda name, value: _number(name, value, 0.0),
    "top_k": lambda name, value: _integer(name, value, 0, MAX_NEW_TOKENS_LIMIT),
    "top_p": lambda name, value: _number(name, value, 0.0, 1.0),
    "repetition_penalty": lambda name, value: _number(name, value, 0.0, above=True),
    "stop_strings": _strings,
    "eos_token_id": _token_ids,
    "seed": lambda name, value: _integer(name, value, 0, MAX_SEED),
    "logits_processor": _callables,
    "stopping_criteria": _callables,
}
"""What is implemented, and how each value is read; None never gets here."""
