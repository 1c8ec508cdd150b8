"""Pieces: from one text each, spread over the data, and never both searched and reported on."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa.errors import InvalidInput
from hsa.huggingface.fidelity.examples import Examples
from hsa.huggingface.fidelity.pieces import cut_pieces, split_pieces
from tests.huggingface.fidelity.small import tokenizer
from tests.huggingface.tiny_models import WORDS

KNOWN = tokenizer()


def texts(*lengths, seed=0):
    generator = random.Random(seed)
    return Examples("tales", [(" ".join(generator.choices(WORDS, k=n)),) for n in lengths])


def ids_of(some):
    return [KNOWN(text, add_special_tokens=False)["input_ids"] for (text,) in some.texts]


def source_of(piece, some):
    """Return the text that contains a piece, as long as that is one."""
    shown = ",".join(map(str, piece))
    return [i for i, ids in enumerate(ids_of(some)) if shown in ",".join(map(str, ids))]


def test_every_piece_comes_from_one_text():
    some = texts(50, 100, 35, 20)
    pieces = cut_pieces(some, KNOWN, 17)
    assert [source_of(piece, some) for piece in pieces.ids] == [[0]] * 2 + [[1]] * 5 + [[2]] * 2 + [[3]]
    assert {len(piece) for piece in pieces.ids} == {17}
    assert pieces.ids[1] == ids_of(some)[0][17:34]
    assert str(pieces) == "10 pieces of 17 tokens from 4 texts"


def test_short_texts_are_joined():
    some = texts(10, 50, 11, 12, 9)
    first, second, third, fourth, _ = ids_of(some)
    pieces = cut_pieces(some, KNOWN, 31)
    assert pieces.ids == [second[:31], (first + third + fourth)[:31]]
    assert pieces.texts == 4
    assert str(cut_pieces(some, KNOWN, 31, 1)) == "1 piece of 31 tokens from 1 text"


def test_few_pieces_come_from_texts_in_all_parts_of_the_data():
    some = texts(*[40] * 20)
    pieces = cut_pieces(some, KNOWN, 17, 5)
    assert [source_of(piece, some) for piece in pieces.ids] == [[0], [4], [8], [12], [16]]
    more = cut_pieces(some, KNOWN, 17, 25)  # the second pieces only after all first ones
    assert [source_of(piece, some) for piece in more.ids] == [[i] for i in (*range(20), *range(5))]
    assert more.ids[20] == ids_of(some)[0][17:34]


def test_no_text_is_read_twice_or_further_than_needed(monkeypatch):
    read = []
    call = type(KNOWN).__call__
    monkeypatch.setattr(
        type(KNOWN), "__call__", lambda self, text, **rest: (read.append(len(text)), call(self, text, **rest))[1]
    )
    some = texts(*[4000] * 30)
    assert len(cut_pieces(some, KNOWN, 17, 3)) == 3
    assert len(read) == 1 + 3  # what joins two texts, and three texts
    assert max(read) == 8 * 17
    read.clear()
    assert len(cut_pieces(texts(9000), KNOWN, 17, 100)) == 100
    assert sum(read) < 3 * 8 * 17 * 100


def test_long_words_are_read_to_the_end():
    known = tokenizer()
    some = Examples("words", [(" ".join(["supercalifragilistic"] * 40),)])
    assert len(cut_pieces(some, known, 17, 9)) == 2


def test_texts_that_occur_twice_are_read_once():
    some = texts(40)
    assert len(cut_pieces(Examples("twice", some.texts * 2), KNOWN, 17)) == 2


def test_pieces_start_with_the_token_for_the_beginning():
    known = tokenizer()
    known.bos_token = "[CLS]"
    some = texts(50)
    pieces = cut_pieces(some, known, 17)
    assert pieces.ids == [[known.bos_token_id, *ids_of(some)[0][i : i + 16]] for i in (0, 16, 32)]


@given(
    first=st.integers(34, 90),
    others=st.lists(st.integers(1, 60), max_size=12),
    search=st.integers(1, 5),
    report=st.integers(1, 7),
)
def test_search_and_report_share_no_text(first, others, search, report):
    lengths = [first, *others]
    some = Examples("tales", [(" ".join([word] * n),) for word, n in zip(WORDS, lengths, strict=False)])
    held, rest = split_pieces(some, KNOWN, 17, search, report)
    assert 1 <= len(held) <= search
    assert 1 <= len(rest) <= report
    words = [{i for piece in part.ids for i in piece} for part in (held, rest)]
    several = cut_pieces(some, KNOWN, 17, search + report).texts > 1
    assert several != bool(words[0] & words[1])
    for ids in (*held.ids, *rest.ids):
        assert len(ids) == 17
        assert len(set(ids)) == 1 or all(lengths[i - 4] < 17 for i in set(ids))  # only short texts are joined


@given(
    lengths=st.lists(st.integers(1, 60), max_size=12),
    search=st.integers(1, 5),
    reports=st.tuples(*[st.integers(1, 20)] * 2),
)
def test_the_search_does_not_depend_on_the_report(lengths, search, reports):
    some = texts(40, *lengths)
    first, second = (split_pieces(some, KNOWN, 17, search, report)[0] for report in reports)
    assert first == second


def test_a_single_text_is_split():
    some = texts(100)
    search, report = split_pieces(some, KNOWN, 17, 4, 16)
    ids = ids_of(some)[0]
    assert search.ids == [ids[:17], ids[17:34]]
    assert report.ids == [ids[34:51], ids[51:68], ids[68:85]]


def test_texts_that_are_too_short():
    with pytest.raises(
        InvalidInput, match=r"tales: expected at least 2, .*, got one piece of 17 tokens. Pass smaller .*"
    ):
        split_pieces(texts(20), KNOWN, 17, 1, 1)
    for cut in (cut_pieces, lambda *rest: split_pieces(*rest, 2, 2)):
        with pytest.raises(InvalidInput, match=r"tales: expected at least 61 tokens, for one piece, got 30 tokens"):
            cut(texts(20, 10), KNOWN, 61)
