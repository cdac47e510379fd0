"""New tokens into text, a piece at a time, up to the first stop string.

Two stages, each holding back what isn't settled yet:

1. `Detokenizer` decodes a short window of tokens: some that are shown already, as context, and the new ones. The
   context matters, since many tokenizers drop the space before the first token that they decode; at the start it is
   the end of the prompt, none of whose text is ever shown. A character that isn't whole yet (U+FFFD at the end of
   the decoded text) waits for its other bytes, which are `CHAR_TOKENS` tokens at most.
2. `TextAssembler` looks for stop strings, and keeps back the longest end of the text that one of them begins with.

The pieces together are what the tokenizer decodes from all new tokens, with special tokens skipped and spaces left
as they are (`clean_up_tokenization_spaces` would change text that was shown before).

Source: the prefix and read offsets of Hugging Face's text-generation-inference and of vLLM's detokenizer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from petals_async.errors import RequestError

REPLACEMENT = "\ufffd"
"""What decoders put in the place of bytes that make no character."""

CHAR_TOKENS = 4
"""Tokens of one character at most: UTF-8 has four bytes."""

PENDING_BYTES = 3
"""Bytes that a character which isn't whole yet may have; each may be a U+FFFD of its own."""

WINDOW_TOKENS = 16
"""Tokens that are decoded for one new one, at most."""

CONTEXT_TOKENS = 8
"""Tokens kept as context when a window is cut short, and looked at in the prompt; no less than CHAR_TOKENS."""


class Detokenizer:
    """Decodes one generation's new tokens, a token at a time, at a bounded cost for each.

    Args:
        tokenizer: From transformers.
        prompt_ids: The tokens before the new ones; their end is the context of the first.
    """

    def __init__(self, tokenizer: Any, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._window = self._context(prompt_ids)
        self._shown = len(self._decode(self._window))  # characters of the window's text that are out
        self._end = len(self._window)  # tokens of the window whose text is out as a whole

    def push(self, token_id: int) -> str:
        """Take one token; return the text that is settled now, which may be empty."""
        if self._is_silent(token_id):
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        end = max(self._shown, len(text) - self._unsettled(text))
        new, self._shown = text[self._shown : end], end
        if new and end == len(text):
            self._settle()
        elif len(self._window) >= WINDOW_TOKENS:
            self._cut(text)
        return new

    def finish(self) -> str:
        """Return what was held back, as it stands: a broken character becomes U+FFFD."""
        return self._decode(self._window)[self._shown :]

    def _decode(self, ids: Sequence[int]) -> str:
        if not ids:
            return ""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def _is_silent(self, token_id: int) -> bool:
        return token_id in self._special or self._tokenizer.convert_ids_to_tokens(token_id) is None

    def _unsettled(self, text: str) -> int:
        """Return how many characters at the end of the text may still change."""
        broken = len(text) - len(text.rstrip(REPLACEMENT))
        waiting = len(self._window) - self._end
        return broken if waiting < CHAR_TOKENS else min(broken, PENDING_BYTES)

    def _context(self, prompt_ids: Sequence[int]) -> list[int]:
        """Return the fewest last tokens of the prompt that make whole text, or all if they make none (spaces alone)."""
        spoken = [token for token in prompt_ids[-WINDOW_TOKENS:] if not self._is_silent(token)][-CONTEXT_TOKENS:]
        text = ""
        for start in reversed(range(len(spoken))):
            text = self._decode(spoken[start:])
            if text and not text.endswith(REPLACEMENT):
                return spoken[start:]
        return [] if text else spoken

    def _settle(self) -> None:
        """All text is out: keep the tokens of its last part as context, and drop those before when they are many."""
        start, self._end = self._end, len(self._window)
        if start > 0 and len(self._window) > CONTEXT_TOKENS:
            self._window = self._window[start:]
            self._shown = len(self._decode(self._window))
            self._end = len(self._window)

    def _cut(self, text: str) -> None:
        """Drop all but the last tokens of a long run of broken bytes: their characters don't reach back so far."""
        held = len(text) - self._shown
        dropped = len(self._window) - CONTEXT_TOKENS
        self._window = self._window[dropped:]
        self._shown = max(0, len(self._decode(self._window)) - held)
        self._end = max(0, self._end - dropped)


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """Return the ids that decoding skips."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return frozenset(tokenizer.all_special_ids) | {token for token, added in added.items() if added.special}


class TextAssembler:
    """One generation's text, up to the first stop string.

    A stop string is looked for in the new text alone, character by character, so it does not matter how the text is
    cut into tokens. Of several, the one that is complete first counts; of those, the one that begins first.

    Args:
        tokenizer: From transformers; None if the model has none: then there is no text.
        stop_strings: The text ends before the first of these.
        prompt_ids: The tokens before the new ones.

    Attributes:
        stopped: Whether a stop string was found; nothing more is shown then.

    Raises:
        RequestError: Stop strings without a tokenizer.
    """

    def __init__(self, tokenizer: Any, stop_strings: Sequence[str] = (), prompt_ids: Sequence[int] = ()) -> None:
        if tokenizer is None and stop_strings:
            raise RequestError("stop_strings need a tokenizer, and the model directory has none")
        self._detokenizer = None if tokenizer is None else Detokenizer(tokenizer, prompt_ids)
        self._stops = tuple(stop_strings)
        self._held = ""  # text that came, and may be the beginning of a stop string
        self._shown: list[str] = []
        self.stopped = False

    @property
    def textless(self) -> bool:
        """Whether there never is any text."""
        return self._detokenizer is None

    @property
    def text(self) -> str:
        """All text that was given out."""
        return "".join(self._shown)

    def push(self, token_id: int) -> str:
        """Take one token; return the text that may be shown now, which may be empty."""
        if self._detokenizer is None or self.stopped:
            return ""
        self._take(self._detokenizer.push(token_id))
        return self._show(len(self._held) if self.stopped else len(self._held) - self._possible_stop())

    def finish(self) -> str:
        """Return what was held back; no token comes any more. It may end in a stop string all the same."""
        if self._detokenizer is not None and not self.stopped:
            self._take(self._detokenizer.finish())
        return self._show(len(self._held))

    def _take(self, text: str) -> None:
        self._held += text
        found = [(index + len(stop), index) for stop in self._stops if (index := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            self._held = self._held[: min(found)[1]]

    def _possible_stop(self) -> int:
        """Return the length of the longest end of the held text that a stop string begins with."""
        return max((_overlap(self._held, stop) for stop in self._stops), default=0)

    def _show(self, count: int) -> str:
        text, self._held = self._held[:count], self._held[count:]
        if text:
            self._shown.append(text)
        return text


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of `text` that `stop` begins with, less than all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(stop[:length])), 0)
