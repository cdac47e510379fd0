import copy

import pytest
import torch
from local_model import local_model
from transformers import GenerationConfig, LogitsProcessor, RepetitionPenaltyLogitsProcessor

from petals_async.client.sampling import Sampler, build_processors
from petals_async.client.settings import resolve_settings
from petals_async.errors import ComputeError, RequestError

PROMPT = list(b"Once upon")

OPTIONS = [
    {},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 1.3, "min_new_tokens": 5},
    {"do_sample": True},
    {"do_sample": True, "top_k": 0},
    {"do_sample": True, "temperature": 0.7, "top_p": 0.9},
    {"do_sample": True, "temperature": 1.3, "top_k": 5, "top_p": 0.8, "repetition_penalty": 1.2, "min_new_tokens": 3},
    {"do_sample": False, "temperature": 0.7, "top_k": 5, "top_p": 0.8},
]


def settings_of(**options):
    return resolve_settings(local_model().defaults, None, options)


def transformers_list(custom=(), **options):
    """What transformers itself would build."""
    model = local_model().model
    config, _ = model._prepare_generation_config(None, **options)
    model._prepare_special_tokens(config, kwargs_has_attention_mask=True, device="cpu")
    return model._get_logits_processor(
        config,
        input_ids_seq_length=len(PROMPT),
        logits_processor=list(custom),
        device="cpu",
        model_kwargs={"attention_mask": torch.ones(1, len(PROMPT))},
    )


class Banned(LogitsProcessor):
    """Forbids some tokens."""

    def __init__(self, *tokens):
        self.tokens = list(tokens)

    def __call__(self, input_ids, scores):
        scores = scores.clone()
        scores[:, self.tokens] = -float("inf")
        return scores


@pytest.mark.parametrize("options", OPTIONS)
def test_processors_are_those_of_transformers_in_the_same_order(options):
    custom = [Banned(97)]
    for extra in ([], custom):
        ours = build_processors(settings_of(**options, logits_processor=extra), len(PROMPT))
        assert [type(one) for one in ours] == [type(one) for one in transformers_list(extra, **options)]


def test_a_custom_processor_takes_the_place_of_its_own_kind():
    custom = [RepetitionPenaltyLogitsProcessor(2.0), Banned(97)]
    ours = build_processors(settings_of(repetition_penalty=1.3, top_k=5, do_sample=True, logits_processor=custom), 3)
    theirs = transformers_list(custom, repetition_penalty=1.3, top_k=5, do_sample=True)
    assert [type(one) for one in ours] == [type(one) for one in theirs]
    assert list(ours[:2]) == custom


def reference_loop(options, seed, count):
    """Sample as transformers' `_sample` does, with a generator of our own."""
    model, processors = local_model().model, transformers_list(**options)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.tensor([PROMPT])
    for _ in range(count):
        with torch.no_grad():
            scores = processors(ids, model(ids).logits[:, -1].to(copy=True, dtype=torch.float32))
        if options.get("do_sample"):
            token = torch.multinomial(torch.softmax(scores, dim=-1), 1, generator=generator)
        else:
            token = scores.argmax(dim=-1, keepdim=True)
        ids = torch.cat([ids, token], dim=1)
    return ids[0, len(PROMPT) :].tolist()


def our_loop(options, count):
    model, sampler = local_model().model, Sampler(settings_of(**options), PROMPT)
    for _ in range(count):
        with torch.no_grad():
            logits = model(sampler.input_ids.clone()).logits[:, -1]
        yield sampler.pick(logits)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("seed", [0, 7, 2**64 - 1])
def test_tokens_are_those_of_a_loop_with_transformers_processors(options, seed):
    assert list(our_loop({**options, "seed": seed}, 20)) == reference_loop(options, seed, 20)


def test_a_seed_makes_draws_independent_of_other_traffic():
    alone = list(our_loop({"do_sample": True, "seed": 7}, 20))
    loops = [our_loop({"do_sample": True, "seed": seed}, 20) for seed in (7, 8, None)]
    mixed = []
    for tokens in zip(*loops, strict=True):
        torch.rand(3)
        mixed.append(tokens)
    assert [first for first, _, _ in mixed] == alone
    assert [second for _, second, _ in mixed] != alone
    unseeded = {tuple(our_loop({"do_sample": True, "temperature": 3.0, "top_k": 0}, 8)) for _ in range(3)}
    assert len(unseeded) == 3


def test_a_draw_leaves_the_global_generator_alone():
    torch.manual_seed(1)
    state = torch.get_rng_state()
    list(our_loop({"do_sample": True}, 3))
    assert torch.equal(state, torch.get_rng_state())


def test_processors_see_the_prompt_and_all_tokens_so_far():
    seen = []

    def note(ids, scores):
        seen.append(ids[0].tolist())
        return scores

    tokens = list(our_loop({"logits_processor": [note]}, 5))
    assert seen == [PROMPT + tokens[:count] for count in range(5)]


def test_logits_are_not_changed_and_may_be_of_any_float_dtype():
    logits = torch.randn(1, 288).to(torch.bfloat16)
    before = copy.deepcopy(logits)
    assert Sampler(settings_of(repetition_penalty=1.5), PROMPT).pick(logits) == int(logits.argmax())
    assert torch.equal(logits, before)


def test_a_processor_may_write_into_its_scores():
    def write(ids, scores):
        return scores.fill_(-1.0).index_fill_(1, torch.tensor([5]), 0.0)

    logits = torch.randn(1, 288)
    before = logits.clone()
    assert Sampler(settings_of(logits_processor=[write]), PROMPT).pick(logits) == 5
    assert torch.equal(logits, before)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("sample", [False, True])
def test_no_token_is_made_of_nonsense(bad, sample):
    sampler = Sampler(settings_of(do_sample=sample), PROMPT)
    logits = torch.zeros(1, 288)
    logits[0, 5] = bad
    with pytest.raises(ComputeError, match="NaN") as caught:
        sampler.pick(logits)
    assert caught.value.reason == "NON_FINITE"
    assert sampler.input_ids[0].tolist() == PROMPT


def test_logits_of_minus_infinity_forbid_a_token():
    logits = torch.full((1, 288), -float("inf"))
    logits[0, 9] = 1.0
    assert Sampler(settings_of(do_sample=True), PROMPT).pick(logits) == 9


@pytest.mark.parametrize("options", [{"logits_processor": [Banned(*range(288))]}, {"temperature": 1e-40}])
def test_processors_that_leave_nothing_are_the_callers_fault(options):
    with pytest.raises(RequestError, match="no finite score"):
        Sampler(settings_of(**options), PROMPT).pick(torch.ones(1, 288))


def test_config_objects_do_as_keywords():
    config = GenerationConfig(do_sample=True, top_k=3, temperature=0.5)
    settings = resolve_settings(local_model().defaults, config, {"seed": 3})
    assert settings == settings_of(do_sample=True, top_k=3, temperature=0.5, seed=3)
