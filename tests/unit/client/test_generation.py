import anyio
import pytest
import torch
from local_model import LocalSession, local_model
from transformers import StoppingCriteria

from petals_async.client.generation import Generation, GenerationStream, check_length, generate_many
from petals_async.client.result import GenerationResult, Piece, Recovery, Usage
from petals_async.core.span import Span
from petals_async.errors import ClosedError, ComputeError, LengthExceededError, NoRouteError, RequestError

PROMPT = list(b"Once upon a time")

both = pytest.mark.parametrize("anyio_backend", ["asyncio", "trio"])


def greedy(count):
    return local_model().generate(PROMPT, max_new_tokens=count, do_sample=False, eos_token_id=None)


# -- the loop


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 1},
        {"max_new_tokens": 40},
        {"max_new_tokens": 40, "repetition_penalty": 1.3},
        {
            "max_new_tokens": 40,
            "repetition_penalty": 1.3,
            "temperature": 0.3,
            "top_k": 3,
            "top_p": 0.5,
            "do_sample": False,
        },
        {"max_new_tokens": 40, "repetition_penalty": 0.8, "min_new_tokens": 30},
        {"max_new_tokens": 40, "repetition_penalty": 5.0, "min_new_tokens": 39},
    ],
)
async def test_greedy_tokens_are_those_of_plain_transformers(options):
    result = await local_model().generation(PROMPT, **options).run()
    expected = local_model().generate(PROMPT, **options)
    assert result.token_ids == expected
    assert result.text == local_model().tokenizer.decode(expected, skip_special_tokens=True)
    assert result.finish_reason == "length"
    assert result.usage == Usage(prompt_tokens=len(PROMPT), completion_tokens=options["max_new_tokens"])


@pytest.mark.parametrize("min_new_tokens", [0, 8, 20])
async def test_end_tokens_are_those_of_plain_transformers(min_new_tokens):
    tokens = greedy(12)
    options = {"eos_token_id": [300, tokens[5]], "max_new_tokens": 30, "min_new_tokens": min_new_tokens}
    result = await local_model().generation(PROMPT, **options).run()
    assert result.token_ids == local_model().generate(PROMPT, pad_token_id=0, **options)
    assert result.finish_reason == ("eos" if result.token_ids[-1] == tokens[5] else "length")
    assert len(result.token_ids) > min_new_tokens


async def test_an_end_token_at_the_limit_is_an_end():
    tokens = greedy(1)
    result = await local_model().generation(PROMPT, eos_token_id=tokens[0], max_new_tokens=1).run()
    assert (result.finish_reason, result.token_ids) == ("eos", tokens)


async def test_sampled_tokens_depend_on_the_seed_alone():
    options = {"do_sample": True, "temperature": 1.2, "max_new_tokens": 20}
    first, again, other = [
        (await local_model().generation(PROMPT, seed=seed, **options).run()).token_ids for seed in (1, 1, 2)
    ]
    assert first == again != other


async def test_the_prompt_goes_at_once_and_the_last_token_not_at_all():
    session = LocalSession(local_model().model)
    await local_model().generation(PROMPT, session, max_new_tokens=5).run()
    assert session.lengths == [len(PROMPT), 1, 1, 1, 1]
    assert session.position == len(PROMPT) + 4


async def test_a_session_goes_on_with_penalties_over_all_tokens():
    session = LocalSession(local_model().model)
    options = {"repetition_penalty": 1.4, "max_new_tokens": 10}
    first = await local_model().generation(PROMPT, session, **options).run()
    whole = [*PROMPT, *first.token_ids, *b" And then"]
    second = await local_model().generation(whole, session, **options).run()
    assert second.token_ids == local_model().generate(whole, **options)
    assert session.lengths[10] == len(whole) - len(PROMPT) - 9
    assert second.usage.prompt_tokens == len(whole)
    with pytest.raises(RequestError, match="nothing is new"):
        local_model().generation(whole, session)


async def test_stop_strings_end_the_text():
    text = local_model().tokenizer.decode(greedy(30))
    stop = text[10:13]
    result = await local_model().generation(PROMPT, stop_strings=[stop, "never there"], max_new_tokens=30).run()
    assert result.text == text[: text.index(stop)]
    assert result.finish_reason == "stop"
    plain = local_model().generate(
        PROMPT, stop_strings=[stop], tokenizer=local_model().tokenizer, max_new_tokens=30, do_sample=False
    )
    assert result.token_ids == plain


async def test_a_stop_string_at_the_limit_is_a_stop():
    text = local_model().tokenizer.decode(greedy(13))
    result = await local_model().generation(PROMPT, stop_strings=text[10:13], max_new_tokens=13).run()
    assert result.finish_reason == "stop"


async def test_a_stop_string_in_the_last_held_back_text_is_a_stop():
    wanted = iter([97, 0xE2])

    def force(ids, scores):
        return torch.full_like(scores, -10.0).index_fill_(1, torch.tensor([next(wanted)]), 0.0)

    options = {"stop_strings": "\ufffd", "logits_processor": [force], "max_new_tokens": 2}
    result = await local_model().generation(PROMPT, **options).run()
    assert (result.text, result.token_ids, result.finish_reason) == ("a", (97, 0xE2), "stop")


class After(StoppingCriteria):
    """Stops when so many tokens are there; notes how it was called."""

    def __init__(self, count):
        self.count = count
        self.calls = []

    def __call__(self, input_ids, scores, **kwargs):
        self.calls.append((input_ids[0].tolist(), scores))
        return torch.full((input_ids.shape[0],), input_ids.shape[1] >= self.count)


async def test_stopping_criteria_are_called_as_transformers_calls_them():
    ours, theirs = After(len(PROMPT) + 7), After(len(PROMPT) + 7)
    result = await local_model().generation(PROMPT, stopping_criteria=[ours], max_new_tokens=30).run()
    assert result.token_ids == local_model().generate(PROMPT, stopping_criteria=[theirs], max_new_tokens=30)
    assert result.finish_reason == "stop"
    assert ours.calls == theirs.calls
    plain = await local_model().generation(PROMPT, stopping_criteria=[lambda *_: True], max_new_tokens=30).run()
    assert len(plain.token_ids) == 1


async def test_pieces_together_are_the_result():
    pieces = []

    async def take(piece):
        pieces.append(piece)

    text = local_model().tokenizer.decode(greedy(20))
    options = {"stop_strings": [text[15:17] + "?", "\x00"], "max_new_tokens": 20}
    result = await local_model().generation(PROMPT, **options).run(take)
    assert "".join(piece.text for piece in pieces) == result.text == text
    assert sum((piece.token_ids for piece in pieces), ()) == result.token_ids
    assert all(piece.text or piece is pieces[-1] for piece in pieces)


async def test_without_a_tokenizer_there_are_tokens():
    pieces = []

    async def take(piece):
        pieces.append(piece)

    model = local_model()
    with_text = model.generation(PROMPT, max_new_tokens=4)
    generation = Generation(LocalSession(model.model), with_text._edges, with_text._settings, PROMPT)
    result = await generation.run(take)
    assert pieces == [Piece("", (token,)) for token in greedy(4)]
    assert (result.text, result.token_ids) == ("", greedy(4))


async def test_recoveries_of_this_generation_are_reported():
    old, new = (Recovery(at, Span(0, 2), "a", ("b",), "STREAM_LOST", at, 0.1) for at in (3, 18))

    class Session(LocalSession):
        async def step(self, hidden, *, num_outputs=None):
            if self.position == len(PROMPT) + 2:
                self.recoveries.append(new)
                self.exact = False
            return await super().step(hidden, num_outputs=num_outputs)

    session = Session(local_model().model)
    session.recoveries.append(old)
    result = await local_model().generation(PROMPT, session, max_new_tokens=5).run()
    assert (result.recoveries, result.exact) == ((new,), False)
    assert result.token_ids == greedy(5)


async def test_tokens_are_picked_where_one_says():
    calls = []

    async def offload(function):
        calls.append(function)
        return function()

    plain = local_model().generation(PROMPT, max_new_tokens=3)
    generation = Generation(plain._session, plain._edges, plain._settings, PROMPT, offload=offload)
    assert (await generation.run()).token_ids == greedy(3)
    assert len(calls) == 3


async def test_nonsense_from_the_servers_ends_it():
    class Session(LocalSession):
        async def step(self, hidden, *, num_outputs=None):
            outputs = await super().step(hidden, num_outputs=num_outputs)
            return type(outputs)(outputs.dtype, outputs.shape, b"\xff" * outputs.num_bytes)

    with pytest.raises(ComputeError, match="NaN"):
        await local_model().generation(PROMPT, Session(local_model().model)).run()


def test_lengths_are_checked_with_all_numbers_in_the_message():
    check_length(100, 28, 128)
    with pytest.raises(LengthExceededError, match=r"100 .*max_new_tokens=29 .*129 .*128"):
        check_length(100, 29, 128)


# -- streams


RESULT = GenerationResult("abc", (1, 2, 3), "length", Usage(1, 3))


async def three(on_piece):
    for token, text in enumerate("abc", start=1):
        await on_piece(Piece(text, (token,)))
    return RESULT


@both
async def test_a_stream_gives_its_pieces_and_then_the_result():
    stream = GenerationStream(three)
    with pytest.raises(ClosedError):
        await anext(stream)
    async with stream:
        with pytest.raises(ClosedError, match="last piece"):
            _ = stream.result
        pieces = [piece async for piece in stream]
        assert stream.result is RESULT
        assert [piece async for piece in stream] == []
    assert "".join(piece.text for piece in pieces) == "abc"
    assert stream.result is RESULT
    with pytest.raises(ClosedError):
        await anext(stream)
    with pytest.raises(ClosedError, match="once"):
        await stream.__aenter__()


@both
async def test_a_stream_of_the_real_loop():
    async with GenerationStream(local_model().generation(PROMPT, max_new_tokens=10).run) as stream:
        text = "".join([piece.text async for piece in stream])
    assert stream.result.token_ids == greedy(10)
    assert text == stream.result.text


@both
async def test_leaving_early_cancels_the_producer():
    events = []

    async def endless(on_piece):
        try:
            while True:
                await on_piece(Piece("x", (1,)))
                events.append("piece")
        finally:
            with anyio.CancelScope(shield=True):
                await anyio.lowlevel.checkpoint()
                events.append("closed")

    async with GenerationStream(endless) as stream:
        async for _ in stream:
            await anyio.wait_all_tasks_blocked()
            break
    assert events[-1] == "closed"
    with pytest.raises(ClosedError):
        _ = stream.result


@both
async def test_a_stream_that_is_left_at_once():
    async with GenerationStream(three):
        pass


@both
async def test_a_slow_consumer_suspends_the_producer():
    made = []

    async def count(on_piece):
        for token in range(100):
            made.append(token)
            await on_piece(Piece("x", (token,)))
        return RESULT

    async with GenerationStream(count) as stream:
        for taken in range(1, 10):
            await anext(stream)
            await anyio.wait_all_tasks_blocked()
            assert len(made) == taken + 1


@both
@pytest.mark.parametrize("error", [NoRouteError("nobody"), KeyError("a bug"), ExceptionGroup("two", [KeyError("x")])])
async def test_errors_of_the_producer_come_out_of_the_loop_as_they_are(error):
    async def fail(on_piece):
        await on_piece(Piece("a", (1,)))
        raise error

    texts = []

    async def read(stream):
        async for piece in stream:
            texts.append(piece.text)

    async def read_whole():
        async with GenerationStream(fail) as stream:
            await read(stream)

    async with GenerationStream(fail) as stream:
        with pytest.raises(type(error)) as caught:
            await read(stream)
        assert caught.value is error
        assert [piece async for piece in stream] == []
    with pytest.raises(type(error)) as caught:
        await read_whole()
    assert caught.value is error
    assert texts == ["a", "a"]


@both
async def test_an_error_that_nobody_has_seen_comes_out_of_the_context():
    async def fail(on_piece):
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        async with GenerationStream(fail):
            await anyio.wait_all_tasks_blocked()


@both
@pytest.mark.parametrize("error", [KeyError("x"), SystemExit(3), ExceptionGroup("two", [KeyError("x")])])
@pytest.mark.parametrize("produce_fails", [False, True])
async def test_errors_of_the_body_come_out_as_they_are(error, produce_fails):
    async def produce(on_piece):
        await on_piece(Piece("a", (1,)))
        if produce_fails:
            raise ValueError("the generation's own")
        await anyio.sleep_forever()

    async def use():
        async with GenerationStream(produce) as stream:
            await anext(stream)
            await anyio.wait_all_tasks_blocked()
            raise error

    with pytest.raises(type(error)) as caught:
        await use()
    assert caught.value is error


@both
async def test_cancelling_the_consumer_cancels_the_producer():
    closed = []

    async def produce(on_piece):
        try:
            await on_piece(Piece("a", (1,)))
            await anyio.sleep_forever()
        finally:
            closed.append(True)

    with anyio.CancelScope() as scope:
        async with GenerationStream(produce) as stream:
            async for _ in stream:
                scope.cancel()
        pytest.fail("must not go on")
    assert scope.cancelled_caught
    assert closed == [True]
    await anyio.lowlevel.checkpoint()


@both
async def test_cancelling_in_the_body_leaves_no_scope_behind():
    with anyio.move_on_after(0.01) as scope:
        async with GenerationStream(three) as stream:
            await anext(stream)
            await anyio.sleep_forever()
    assert scope.cancelled_caught
    with anyio.fail_after(5):
        await anyio.lowlevel.checkpoint()


# -- several prompts


@both
async def test_several_prompts_come_back_in_order():
    prompts = [PROMPT, PROMPT[:3], list(b"x"), PROMPT[5:]]

    async def one(ids):
        return await local_model().generation(ids, max_new_tokens=6).run()

    results = await generate_many(prompts, one)
    assert [result.token_ids for result in results] == [
        local_model().generate(ids, max_new_tokens=6) for ids in prompts
    ]
    assert await generate_many([], one) == []


@both
async def test_the_first_error_cancels_the_others_and_comes_out_bare():
    cancelled = []

    async def one(number):
        if number == 2:
            await anyio.wait_all_tasks_blocked()
            raise NoRouteError("nobody")
        try:
            await anyio.sleep_forever()
        finally:
            cancelled.append(number)

    with pytest.raises(NoRouteError, match="nobody"):
        await generate_many(range(5), one)
    assert sorted(cancelled) == [0, 1, 3, 4]


@both
async def test_only_so_many_prompts_at_the_same_time():
    running, most = 0, 0

    async def one(number):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await anyio.lowlevel.checkpoint()
        running -= 1
        return number

    assert await generate_many(range(20), one, max_concurrent=3) == list(range(20))
    assert most == 3
