"""Prompts into token ids: text, ids, chats, and lists of these."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from petals_async.errors import RequestError

KINDS = "a str, a list of token ids, a list of {'role', 'content'} messages, or a list of these"
"""What a prompt may be, for error messages."""


def encode_prompts(prompt: Any, tokenizer: Any, vocab_size: int) -> tuple[list[list[int]], bool]:
    """Return the token ids of one prompt or of several.

    Args:
        prompt: One of
            a `str`, tokenised as it stands, without a template;
            token ids: a list, or a torch tensor or numpy array of shape (n,) or (1, n);
            a chat: a list of {"role", "content"} dicts, put into the tokenizer's template, ready for the answer;
            a list of these, of any lengths.
        tokenizer: From transformers; None if the model has none.
        vocab_size: Ids are below it.

    Returns:
        The ids of each prompt, and whether a list of prompts was given.

    Raises:
        RequestError: Another type, an empty prompt, an id outside the vocabulary (BAD_TOKEN), text without a
            tokenizer, a chat without a template, or one that the template refuses.
    """
    if _is_list_of_prompts(prompt):
        return [_encode(one, tokenizer, vocab_size, f"prompt {index}") for index, one in enumerate(prompt)], True
    return [_encode(prompt, tokenizer, vocab_size, "the prompt")], False


def _is_list_of_prompts(prompt: Any) -> bool:
    if not isinstance(prompt, (list, tuple)) or not prompt:
        return False
    return not (_all_of(prompt, Integral) or _all_of(prompt, Mapping))


def _all_of(items: Sequence[Any], kind: Any) -> bool:
    return all(isinstance(item, kind) for item in items)


def _encode(prompt: Any, tokenizer: Any, vocab_size: int, name: str) -> list[int]:
    if isinstance(prompt, str):
        ids = _from_text(prompt, tokenizer)
    elif hasattr(prompt, "tolist"):
        ids = _from_array(prompt, name)
    elif isinstance(prompt, (list, tuple)) and prompt and _all_of(prompt, Mapping):
        ids = _from_chat(prompt, tokenizer, name)
    elif isinstance(prompt, (list, tuple)):
        ids = list(prompt)
    else:
        raise RequestError(f"{name} must be {KINDS}, got {type(prompt).__name__}")
    return _check_ids(ids, vocab_size, name)


def _from_text(text: str, tokenizer: Any) -> list[int]:
    if tokenizer is None:
        raise RequestError("the model directory has no tokenizer: give token ids instead of text")
    _check_unicode(text)
    ids: list[int] = tokenizer(text, verbose=False).input_ids
    return ids


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"the text holds half a surrogate pair at character {error.start}") from error


def _from_array(array: Any, name: str) -> list[int]:
    shape = tuple(array.shape)
    if len(shape) == 2 and shape[0] == 1:
        array = array[0]
    elif len(shape) != 1:
        raise RequestError(
            f"{name} must have the shape (n,) or (1, n), got {shape}; several prompts are given as a list",
            reason="BAD_SHAPE",
        )
    ids: list[int] = array.tolist()
    return ids


def _from_chat(messages: Sequence[Mapping[str, Any]], tokenizer: Any, name: str) -> list[int]:
    for index, message in enumerate(messages):
        if not (isinstance(message.get("role"), str) and isinstance(message.get("content"), str)):
            raise RequestError(f"message {index} of {name} must have 'role' and 'content', both str")
        _check_unicode(message["role"] + message["content"])
    if tokenizer is None:
        raise RequestError("the model directory has no tokenizer: give token ids instead of a chat")
    if not tokenizer.chat_template:
        raise RequestError("the model's tokenizer has no chat template: give a str or token ids instead of a chat")
    return _apply_template([dict(message) for message in messages], tokenizer, name)


def _apply_template(messages: list[dict[str, Any]], tokenizer: Any, name: str) -> list[int]:
    from jinja2 import TemplateError

    try:
        ids: list[int] = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    except TemplateError as error:
        raise RequestError(f"the chat template refuses {name}: {error}") from error
    return ids


def _check_ids(ids: Sequence[Any], vocab_size: int, name: str) -> list[int]:
    if not ids:
        raise RequestError(f"{name} is empty: it must have at least one token")
    for index, token in enumerate(ids):
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(f"{name} must be {KINDS}; item {index} is {type(token).__name__}")
        if not 0 <= int(token) < vocab_size:
            raise RequestError(
                f"token id {token} at {index} of {name} is outside the vocabulary of {vocab_size}", reason="BAD_TOKEN"
            )
    return [int(token) for token in ids]
