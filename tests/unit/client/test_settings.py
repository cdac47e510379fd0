import re

import numpy as np
import pytest
from transformers import GenerationConfig, LogitsProcessorList, StoppingCriteriaList

from petals_async.client.settings import (
    CONFIG_FIELDS,
    DEFAULT_MAX_NEW_TOKENS,
    IGNORED,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    NEUTRAL,
    OPTIONS,
    GenerationSettings,
    resolve_settings,
)
from petals_async.errors import RequestError

NOTHING = GenerationConfig()


def resolve(defaults=NOTHING, config=None, **overrides):
    return resolve_settings(defaults, config, overrides)


def test_when_nobody_says_anything():
    assert resolve() == GenerationSettings()
    assert resolve().max_new_tokens == DEFAULT_MAX_NEW_TOKENS


def test_keywords_over_the_config_over_the_model_directory():
    defaults = GenerationConfig(max_new_tokens=5, top_k=7, repetition_penalty=1.5, eos_token_id=[3, 4], do_sample=True)
    config = GenerationConfig(max_new_tokens=6, top_k=8)
    settings = resolve(defaults, config, max_new_tokens=9)
    assert settings == GenerationSettings(
        max_new_tokens=9, top_k=8, repetition_penalty=1.5, eos_token_ids=(3, 4), do_sample=True
    )
    assert resolve(defaults).max_new_tokens == 5


def test_none_means_none_of_it():
    defaults = GenerationConfig(max_new_tokens=5, top_k=7, top_p=0.5, eos_token_id=3, do_sample=True)
    settings = resolve(defaults, max_new_tokens=None, top_k=None, top_p=None, eos_token_id=None, do_sample=None)
    assert settings == GenerationSettings(top_k=0)


@pytest.mark.parametrize(
    ("defaults", "config", "overrides", "sample"),
    [
        ({}, None, {}, False),
        ({}, None, {"temperature": 0.5}, True),
        ({"do_sample": False}, None, {"temperature": 1.0}, True),
        ({"do_sample": True}, None, {"temperature": 0}, False),
        ({}, None, {"temperature": 0.0, "do_sample": True}, False),
        ({}, None, {"temperature": 0.5, "do_sample": False}, False),
        ({}, {"do_sample": False}, {"temperature": 0.5}, False),
        ({"temperature": 0.6}, None, {}, False),
        ({}, {"temperature": 0.6}, {}, False),
        ({"do_sample": True, "temperature": 0.6}, None, {}, True),
        ({"do_sample": True, "temperature": 0.6}, None, {"do_sample": False}, False),
        ({}, None, {"top_p": 0.5, "seed": 1}, False),
    ],
)
def test_whether_to_sample(defaults, config, overrides, sample):
    config = None if config is None else GenerationConfig(**config)
    settings = resolve(GenerationConfig(**defaults), config, **overrides)
    assert settings.do_sample is sample
    assert settings.temperature > 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("num_beams", 4),
        ("no_repeat_ngram_size", 3),
        ("penalty_alpha", 0.6),
        ("guidance_scale", 1.5),
        ("min_p", 0.1),
        ("typical_p", 0.9),
        ("bad_words_ids", [[1]]),
        ("suppress_tokens", [1]),
        ("forced_eos_token_id", 3),
        ("num_return_sequences", 2),
        ("output_scores", True),
        ("prompt_lookup_num_tokens", 3),
        ("min_length", 5),
        ("max_length", 50),
        ("max_time", 1.0),
    ],
)
def test_what_is_not_implemented_is_refused_by_name(option, value):
    with pytest.raises(RequestError, match=option) as caught:
        resolve(**{option: value})
    assert caught.value.reason == "UNSUPPORTED_OPTION"
    with pytest.raises(RequestError, match=option):
        resolve(config=GenerationConfig(**{option: value, "do_sample": True}))


def test_a_model_directory_that_wants_what_is_not_implemented():
    defaults = GenerationConfig(no_repeat_ngram_size=3)
    with pytest.raises(RequestError, match="no_repeat_ngram_size"):
        resolve(defaults)
    assert resolve(defaults, no_repeat_ngram_size=0) == GenerationSettings()
    assert resolve(GenerationConfig(min_p=0.1)) == GenerationSettings(), "greedy decoding has no use for it"
    assert resolve(GenerationConfig(max_length=4096)) == GenerationSettings()
    assert resolve(NOTHING, GenerationConfig(max_length=50, max_new_tokens=5)).max_new_tokens == 5


def test_unknown_options_are_refused_by_name():
    with pytest.raises(RequestError, match="unknown option 'max_new_token'"):
        resolve(max_new_token=5)
    with pytest.raises(RequestError, match="unknown option 'max_new_token'"):
        resolve(config=GenerationConfig(max_new_token=5))
    own = GenerationConfig(chat_format="chatml")
    assert resolve(own, own) == GenerationSettings(), "the model's own file has it"
    with pytest.raises(RequestError, match="GenerationConfig"):
        resolve(config={"max_new_tokens": 5})


@pytest.mark.parametrize("option", sorted(NEUTRAL))
def test_neutral_values_are_taken(option):
    for value in (None, *NEUTRAL[option]):
        assert resolve(**{option: value}) == GenerationSettings()


def test_fields_that_change_no_token_are_ignored():
    assert resolve(use_cache=False, pad_token_id=3, bos_token_id=4, length_penalty=2.0) == GenerationSettings()
    names = IGNORED | set(NEUTRAL)
    assert names <= CONFIG_FIELDS
    assert not names & set(OPTIONS)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("top_p", 2, "from 0 to 1"),
        ("top_p", float("nan"), "from 0 to 1"),
        ("top_p", "0.5", "from 0 to 1"),
        ("temperature", -1, "at least 0"),
        ("temperature", float("inf"), "at least 0"),
        ("temperature", "hot", "at least 0"),
        ("top_k", -1, "from 0"),
        ("top_k", 1.5, "from 0"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", True, "above 0"),
        ("max_new_tokens", 0, "from 1"),
        ("max_new_tokens", True, "from 1"),
        ("max_new_tokens", "5", "from 1"),
        ("min_new_tokens", -1, "from 0"),
        ("min_new_tokens", DEFAULT_MAX_NEW_TOKENS + 1, "max_new_tokens=256"),
        ("do_sample", 1, "True or False"),
        ("seed", -1, "from 0"),
        ("seed", 2**64, "from 0"),
        ("seed", "x", "from 0"),
        ("eos_token_id", -1, "from 0"),
        ("eos_token_id", "end", "from 0"),
        ("stop_strings", 5, "a string"),
        ("stop_strings", [""], "a string"),
        ("stop_strings", ["x", 5], "a string"),
        ("stop_strings", ["x"] * (MAX_STOP_STRINGS + 1), "a string"),
        ("stop_strings", "x" * (MAX_STOP_CHARS + 1), "a string"),
        ("logits_processor", 5, "callables"),
        ("logits_processor", [5], "callables"),
        ("stopping_criteria", "x", "callables"),
    ],
)
def test_wrong_values_say_what_is_allowed(option, value, allowed):
    with pytest.raises(RequestError, match=f"{option} must be .*{re.escape(allowed)}") as caught:
        resolve(**{option: value})
    assert caught.value.reason == "BAD_OPTION"


def test_values_are_read():
    settings = resolve(
        max_new_tokens=np.int64(5),
        top_p=np.float32(0.5),
        repetition_penalty=2,
        stop_strings=["a", "b", "a"],
        eos_token_id=np.array([3, 4, 3]),
        seed=2**64 - 1,
        logits_processor=LogitsProcessorList([_anything]),
        stopping_criteria=StoppingCriteriaList([_anything]),
    )
    assert settings == GenerationSettings(
        max_new_tokens=5,
        top_p=0.5,
        repetition_penalty=2.0,
        stop_strings=("a", "b"),
        eos_token_ids=(3, 4),
        seed=2**64 - 1,
        logits_processor=(_anything,),
        stopping_criteria=(_anything,),
    )
    assert type(settings.repetition_penalty) is float
    assert resolve(stop_strings="a").stop_strings == ("a",)
    assert resolve(eos_token_id=3).eos_token_ids == (3,)


def _anything(ids, scores):
    return scores
