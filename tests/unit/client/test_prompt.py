import numpy as np
import pytest
import torch
from local_model import local_model

from petals_async.client.prompt import encode_prompts
from petals_async.errors import RequestError

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]


def encode(prompt, tokenizer=True, vocab_size=288):
    return encode_prompts(prompt, local_model().tokenizer if tokenizer is True else tokenizer, vocab_size)


@pytest.mark.parametrize(
    "prompt",
    [
        "Hi€",
        list("Hi€".encode()),
        tuple("Hi€".encode()),
        [np.int64(byte) for byte in "Hi€".encode()],
        np.array(list("Hi€".encode())),
        torch.tensor(list("Hi€".encode())),
        torch.tensor([list("Hi€".encode())]),
    ],
)
def test_one_prompt(prompt):
    ids, is_list = encode(prompt)
    assert (ids, is_list) == ([list("Hi€".encode())], False)
    assert all(type(token) is int for token in ids[0])
    assert encode([prompt, "x"]) == ([list("Hi€".encode()), [120]], True)


def test_text_is_tokenised_as_it_stands():
    tokenizer = local_model().tokenizer
    assert encode("<|user|> ?") == ([tokenizer("<|user|> ?").input_ids], False)


def test_a_chat_goes_through_the_template():
    tokenizer = local_model().tokenizer
    expected = tokenizer("<|system|>Be brief.<|end|><|user|>Hi<|end|><|assistant|>").input_ids
    assert encode(CHAT) == ([expected], False)
    assert encode([CHAT, CHAT[1:], "x", [1, 2, 3]])[0][0] == expected
    assert [len(ids) for ids in encode([CHAT, "x", [1, 2, 3]])[0]] == [len(expected), 1, 3]


def test_a_list_of_one_is_a_list():
    assert encode(["x"]) == ([[120]], True)
    assert encode([[5]]) == ([[5]], True)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("", "the prompt is empty"),
        ([], "the prompt is empty"),
        (torch.tensor([], dtype=torch.long), "empty"),
        (["x", ""], "prompt 1 is empty"),
        ([[1], []], "prompt 1 is empty"),
        ([5, 288], "token id 288 at 1 of the prompt is outside the vocabulary of 288"),
        ([-1], "token id -1"),
        ([[5], [300]], "token id 300 at 0 of prompt 1"),
        (None, "got NoneType"),
        (5, "got int"),
        (b"x", "got bytes"),
        ({"role": "user", "content": "x"}, "got dict"),
        ([1, "x"], "prompt 0 must be"),
        ([True], "item 0 is bool"),
        ([[1.5]], "item 0 is float"),
        ([[["x"]]], "item 0 is list"),
        (torch.tensor([0.5]), "item 0 is float"),
        (torch.zeros(2, 3, dtype=torch.long), r"\(2, 3\); several prompts are given as a list"),
        (np.int64(5), "shape"),
        ([{"role": "user"}], "message 0 of the prompt must have 'role' and 'content'"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "both str"),
        ("a\ud800", "surrogate pair at character 1"),
        ([{"role": "user", "content": "\ud800"}], "surrogate"),
    ],
)
def test_wrong_prompts(prompt, message):
    with pytest.raises(RequestError, match=message):
        encode(prompt)


def test_without_a_tokenizer():
    assert encode([1, 2], tokenizer=None) == ([[1, 2]], False)
    for prompt in ("x", CHAT, ["x"]):
        with pytest.raises(RequestError, match="no tokenizer"):
            encode(prompt, tokenizer=None)


def test_chats_that_the_template_does_not_take():
    with pytest.raises(RequestError, match="no chat template"):
        encode(CHAT, tokenizer=_with_template(None))
    with pytest.raises(RequestError, match="roles must alternate"):
        encode(CHAT, tokenizer=_with_template("{{ raise_exception('roles must alternate') }}"))


def _with_template(template):
    class Tokenizer(type(local_model().tokenizer)):
        pass

    tokenizer = Tokenizer(tokenizer_object=local_model().tokenizer.backend_tokenizer)
    tokenizer.chat_template = template
    return tokenizer
