"""The kill matrix in virtual time: whatever dies, and whenever, the tokens are those of an undisturbed run.

All combinations run on the toy model, in exact arithmetic. The tiny llama, real attention in float32 and bfloat16,
runs each combination of span, position and moment, with the other dimensions so chosen that every pair of values of
any two dimensions comes together.
"""

from collections import Counter
from functools import cache
from itertools import combinations, product

import pytest
import torch
from kill_cases import (
    DIMENSIONS,
    NUM_BLOCKS,
    NUM_TOKENS,
    PROMPT,
    PROMPTS,
    Case,
    ToyMatrixModel,
    check_case,
    run_case,
)

from petals_async.engine.backend import TorchBackend
from petals_async.models.checkpoint import Checkpoint
from petals_async.models.edges import Edges
from petals_async.models.span import BlockSpan
from petals_async.testing.faults import FaultPlan
from petals_async.testing.node import ModelSpec
from petals_async.testing.tiny import make_tiny_llama

LLAMA_CASES_A_CELL = 4
"""Combinations of the other dimensions, for each span, position and moment."""

WHERE_AND_WHEN = ("span", "position", "moment")
OTHERS = ("prompts", "dtype", "decoding", "replacement")


# -- the toy model: everything


@pytest.fixture(scope="module")
def toys():
    return {dtype: ToyMatrixModel(dtype) for dtype in DIMENSIONS["dtype"]}


@pytest.mark.parametrize("moment", DIMENSIONS["moment"])
@pytest.mark.parametrize("prompts", DIMENSIONS["prompts"])
@pytest.mark.parametrize("span", DIMENSIONS["span"])
async def test_toy(moment, prompts, span, toys):
    choices = DIMENSIONS | {"moment": (moment,), "prompts": (prompts,), "span": (span,)}
    for values in product(*choices.values()):
        case = Case(*values)
        model = toys[case.dtype]
        await check_case(case, model, model.reference(case.prompts, case.decoding))


# -- the tiny llama: real attention


class LlamaMatrixModel:
    """A random llama, its blocks loaded once for each span."""

    def __init__(self, path, dtype):
        checkpoint = Checkpoint.open(path)
        self.checkpoint, self.dtype = checkpoint, dtype
        self.edges = Edges.load(checkpoint, dtype=dtype)
        self.spec = ModelSpec(checkpoint.name, checkpoint.fingerprint, checkpoint.num_blocks, checkpoint.hidden_size)
        self._blocks = cache(lambda span: BlockSpan.load(checkpoint, span.start, span.end, dtype=dtype))

    def backend(self, spec):
        return TorchBackend(self._blocks(spec.span))

    def embed(self, rows, position):
        from petals_async.models.codec import to_hidden

        return to_hidden(self.edges.embed_tensor(torch.tensor(rows), position=position))

    def chooser(self, decoding):
        generator = torch.Generator().manual_seed(7)
        return lambda outputs: pick(self.edges.logits(outputs)[:, -1], decoding, generator)

    @cache  # noqa: B019 - lives as long as the test run
    def transformers(self, prompts, decoding):
        """The tokens, by plain transformers: the whole model without a cache."""
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.checkpoint.path, dtype=getattr(torch, self.dtype))
        return [continue_rows(model, torch.tensor(rows), decoding) for rows in PROMPTS[prompts]]


def pick(logits, decoding, generator):
    """Return a token for each row of (rows, vocabulary)."""
    if decoding == "greedy":
        return logits.argmax(-1).tolist()
    return torch.multinomial(logits.float().softmax(-1), 1, generator=generator)[:, 0].tolist()


@torch.no_grad()
def continue_rows(model, token_ids, decoding):
    generator, start = torch.Generator().manual_seed(7), token_ids.shape[1]
    for _ in range(NUM_TOKENS):
        new = pick(model(token_ids, use_cache=False).logits[:, -1], decoding, generator)
        token_ids = torch.cat([token_ids, torch.tensor(new)[:, None]], dim=1)
    return token_ids[:, start:].tolist()


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    path = make_tiny_llama(tmp_path_factory.mktemp("llama"), num_blocks=NUM_BLOCKS, hidden_size=32)
    return {dtype: LlamaMatrixModel(path, dtype) for dtype in DIMENSIONS["dtype"]}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """What is computed inline is small."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def llama_cases():
    """For each span, position and moment the next few combinations of the others; all pairs come together."""
    others = list(product(*(DIMENSIONS[name] for name in OTHERS)))
    others = [others[index * 7 % len(others)] for index in range(len(others))]
    cases = []
    for cell in product(*(DIMENSIONS[name] for name in WHERE_AND_WHEN)):
        for _ in range(LLAMA_CASES_A_CELL):
            cases.append(Case(*cell, *others[len(cases) % len(others)]))
    return cases


def test_llama_cases_hold_all_pairs():
    values = [tuple(vars(case).values()) for case in llama_cases()]
    for first, second in combinations(range(len(DIMENSIONS)), 2):
        names = list(DIMENSIONS)
        met = {(value[first], value[second]) for value in values}
        assert met == set(product(DIMENSIONS[names[first]], DIMENSIONS[names[second]]))
    assert len(set(values)) == len(values) == 240
    cells = Counter(value[:3] for value in values)
    assert len(cells) == 60


@pytest.fixture
async def undisturbed(llamas):
    """The same swarm's tokens, when nothing dies."""
    known = {}

    async def tokens(case):
        key = (case.prompts, case.dtype, case.decoding)
        if key not in known:
            results, _ = await run_case(case, llamas[case.dtype], FaultPlan())
            known[key] = [tokens for tokens, _, _ in results]
        return known[key]

    return tokens


@pytest.mark.parametrize("moment", DIMENSIONS["moment"])
async def test_llama(moment, llamas, undisturbed):
    for case in [case for case in llama_cases() if case.moment == moment]:
        await check_case(case, llamas[case.dtype], await undisturbed(case))


@pytest.mark.parametrize("decoding", DIMENSIONS["decoding"])
@pytest.mark.parametrize("prompts", DIMENSIONS["prompts"])
async def test_undisturbed_llama_equals_transformers(prompts, decoding, llamas, undisturbed):
    case = Case("a", "first", "in prefill", prompts, "float32", decoding, "exactly the hole")
    expected = llamas["float32"].transformers(prompts, decoding)
    assert await undisturbed(case) == expected
    assert all(len(set(row)) > 2 for rows in expected for row in rows)
    assert len(PROMPT) + NUM_TOKENS < 32
