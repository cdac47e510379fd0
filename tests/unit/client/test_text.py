import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from local_model import SPACE, local_model, piece_ids, space_tokenizer

from petals_async.client.text import CONTEXT_TOKENS, WINDOW_TOKENS, Detokenizer, TextAssembler
from petals_async.errors import RequestError

END, PAD, TEXTLESS = 257, 258, 280
"""An end token, another special one, and an id of the model that the tokenizer doesn't have."""


def byte_ids(text):
    return list(text.encode())


def assemble(ids, stops=(), prompt_ids=(), tokenizer=None):
    """Return the pieces, how many tokens were taken, and the assembler."""
    assembler = TextAssembler(tokenizer or local_model().tokenizer, stops, prompt_ids)
    pieces = []
    for token in ids:
        pieces.append(assembler.push(token))
        if assembler.stopped:
            return pieces, len(pieces), assembler
    pieces.append(assembler.finish())
    return pieces, len(ids), assembler


def first_stop(text, stops):
    """Cut by brute force: the stop string that is complete first, of those the one that begins first."""
    for end in range(len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


any_bytes = st.lists(st.integers(0, 255), max_size=40)
some_text = st.lists(st.sampled_from(list("aab.é€🙂")), max_size=30).map(lambda chars: byte_ids("".join(chars)))
with_specials = st.lists(st.sampled_from([97, 98, 0xE2, 0x82, 0xAC, END, PAD, TEXTLESS]), max_size=40)
repeated = st.builds(
    lambda part, n: part * n, st.lists(st.integers(128, 255), min_size=1, max_size=4), st.integers(1, 20)
)
new_ids = any_bytes | some_text | with_specials | repeated
stop_strings = st.lists(st.text(alphabet="ab.é€", min_size=1, max_size=4), max_size=4)


@settings(deadline=None)
@given(new_ids, any_bytes)
def test_pieces_are_what_the_tokenizer_decodes_and_hold_no_prompt_text(ids, prompt_ids):
    pieces, _, assembler = assemble(ids, (), prompt_ids)
    assert "".join(pieces) == assembler.text == local_model().tokenizer.decode(ids, skip_special_tokens=True)


@settings(deadline=None)
@given(new_ids, stop_strings, some_text)
def test_the_text_ends_before_the_first_stop_string(ids, stops, prompt_ids):
    pieces, taken, assembler = assemble(ids, stops, prompt_ids)
    whole = local_model().tokenizer.decode(ids, skip_special_tokens=True)
    assert ("".join(pieces), assembler.stopped) == first_stop(whole, stops)
    assert assembler.text == "".join(pieces)
    earlier = local_model().tokenizer.decode(ids[: taken - 1], skip_special_tokens=True).rstrip("\ufffd")
    assert not first_stop(earlier, stops)[1], "stopped a token too late"


@settings(deadline=None)
@given(
    st.lists(st.sampled_from(["a", SPACE + "a", SPACE, "b", ".", "é", "€", "🙂", "</s>"]), max_size=30),
    st.integers(0, 30),
)
def test_spaces_at_the_seam_of_prompt_and_text_are_kept(pieces, cut):
    prompt_ids, ids = piece_ids("<s>", *pieces[:cut]), piece_ids(*pieces[cut:])
    tokenizer = space_tokenizer()
    got, _, _ = assemble(ids, (), prompt_ids, tokenizer)
    before = tokenizer.decode(prompt_ids, skip_special_tokens=True)
    assert before + "".join(got) == tokenizer.decode(prompt_ids + ids, skip_special_tokens=True)


def test_a_space_before_the_first_word_is_dropped_at_the_start_only():
    tokenizer, ids = space_tokenizer(), piece_ids(SPACE + "a", SPACE + "b")
    assert "".join(assemble(ids, (), piece_ids("<s>"), tokenizer)[0]) == "a b"
    assert "".join(assemble(ids, (), piece_ids("<s>", SPACE + "c"), tokenizer)[0]) == " a b"
    assert "".join(assemble(ids, (), piece_ids("<s>", SPACE), tokenizer)[0]) == " a b"


def test_many_characters_in_byte_tokens_come_out_whole():
    text = "漢字かな交じり文🙂" * 10
    pieces, _, _ = assemble(piece_ids(*text), (), piece_ids("<s>", "あ"), space_tokenizer())
    assert "".join(pieces) == text
    assert all(len(piece) <= 1 for piece in pieces)


def test_an_incomplete_character_waits():
    assembler = TextAssembler(local_model().tokenizer)
    assert [assembler.push(byte) for byte in byte_ids("a€b")] == ["a", "", "", "€", "b"]
    assert (assembler.push(0xE2), assembler.finish()) == ("", "\ufffd")


def test_the_beginning_of_a_stop_string_waits():
    assembler = TextAssembler(local_model().tokenizer, ["###"])
    assert [assembler.push(byte) for byte in byte_ids("a##b#")] == ["a", "", "", "##b", ""]
    assert assembler.finish() == "#"
    assert not assembler.stopped


@pytest.mark.parametrize(
    ("text", "stops", "expected"),
    [
        ("STOP and on", ["STOP"], ""),
        ("one two", ["e t"], "on"),
        ("aaab", ["aab"], "a"),
        ("abcd", ["abcd", "bc"], "a"),
        ("xab", ["ab", "b"], "x"),
        ("a€b", ["€"], "a"),
    ],
)
def test_stop_strings(text, stops, expected):
    pieces, _, assembler = assemble(byte_ids(text), stops)
    assert ("".join(pieces), assembler.stopped) == (expected, True)


def test_a_stop_string_inside_a_token():
    assembler = TextAssembler(_WordTokenizer(["one", " STOP two", "three"]), ["STOP"])
    assert [assembler.push(0), assembler.push(1)] == ["one", " "]
    assert assembler.stopped
    assert (assembler.push(2), assembler.finish(), assembler.text) == ("", "", "one ")


def test_a_stop_string_in_the_prompt_or_across_its_end_does_not_count():
    pieces, _, assembler = assemble(byte_ids("OP on"), ["STOP"], byte_ids("STOP ST"))
    assert ("".join(pieces), assembler.stopped) == ("OP on", False)


def test_a_stop_string_of_broken_bytes_is_found_at_the_end():
    pieces, _, assembler = assemble([97, 0xE2], ["\ufffd"])
    assert ("".join(pieces), assembler.stopped) == ("a", True)


@pytest.mark.parametrize("ids", [[97] * 2000, [0xFF] * 2000, [0xF0, 0x9F, 0x92] * 700, [END, TEXTLESS] * 1000])
def test_the_cost_of_a_token_is_bounded(ids):
    tokenizer = _CountingTokenizer(local_model().tokenizer)
    detokenizer = Detokenizer(tokenizer, byte_ids("a long prompt" * 100))
    before = tokenizer.decoded
    for token in ids:
        detokenizer.push(token)
    assert tokenizer.longest <= WINDOW_TOKENS
    assert tokenizer.decoded - before <= len(ids) * (WINDOW_TOKENS + CONTEXT_TOKENS)


def test_without_a_tokenizer_there_is_no_text():
    assembler = TextAssembler(None)
    assert (assembler.push(97), assembler.finish(), assembler.text, assembler.textless) == ("", "", "", True)
    with pytest.raises(RequestError, match="tokenizer"):
        TextAssembler(None, ["STOP"])


class _WordTokenizer:
    all_special_ids = ()
    added_tokens_decoder = {}  # noqa: RUF012

    def __init__(self, words):
        self._words = words

    def convert_ids_to_tokens(self, token):
        return self._words[token]

    def decode(self, ids, **_):
        return "".join(self._words[token] for token in ids)


class _CountingTokenizer:
    def __init__(self, tokenizer):
        self._tokenizer = tokenizer
        self.decoded = self.longest = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def decode(self, ids, **options):
        self.decoded += len(ids)
        self.longest = max(self.longest, len(ids))
        return self._tokenizer.decode(ids, **options)
