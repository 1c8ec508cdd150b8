import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.generation.token_decoder import TokenDecoder
from hsa.signals.readers.tokens import train_tokenizer

TOKENIZER = train_tokenizer(["the cat sat on the mat. Über"], 270, special_tokens=["<|end|>", "\n\n"])


def shown(text, stop=()):
    decoder = TokenDecoder(TOKENIZER, stop)
    parts = [decoder.add(token) for token in TOKENIZER.encode(text).ids]
    return [*parts, decoder.end()], decoder.stopped


@given(st.text())
def test_the_pieces_join_to_the_text(text):
    text = text.encode("utf-8", "replace").decode()
    assert "".join(shown(text)[0]) == text


def test_characters_are_shown_whole():
    parts, _ = shown("ü😀")
    assert [p for p in parts if p] == ["ü", "😀"]
    assert "�" in TokenDecoder(TOKENIZER).add(TOKENIZER.encode("😀").ids[1])  # a byte that cannot begin a character


def test_incomplete_characters_are_replaced():
    decoder = TokenDecoder(TOKENIZER)
    assert decoder.add(TOKENIZER.encode("😀").ids[0]) == ""
    assert decoder.end() == "�"


@given(st.text("abAB ", max_size=20), st.lists(st.text("abA", min_size=1, max_size=3), max_size=3))
def test_stop_strings_end_the_text_and_are_never_shown(text, stop):
    parts, stopped = shown(text, stop)
    complete = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    assert stopped == bool(complete)
    assert "".join(parts) == (text[: min(complete)[1]] if complete else text)


def test_only_text_that_may_begin_a_stop_string_is_held_back():
    parts, _ = shown("ENEND", ["END"])
    assert parts == ["", "", "EN", "", "", ""]


def test_tokens_of_structure_are_text():
    assert "".join(shown("a\n\nb<|end|>")[0]) == "a\n\nb<|end|>"


def test_unknown_ids_give_no_text():
    assert TokenDecoder(TOKENIZER).add(99_999) == ""


@pytest.mark.parametrize("stop", [[""], [3]])
def test_invalid_stop_strings(stop):
    with pytest.raises(InvalidInput, match=r"^stop: expected"):
        TokenDecoder(TOKENIZER, stop)
