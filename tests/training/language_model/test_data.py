import json

import numpy as np
import pytest

from hsa.errors import InvalidInput
from hsa.signals.readers.tokens import train_tokenizer
from hsa.table_format import TableFormat
from hsa.training.language_model.data import (
    CHAPTER,
    END,
    PARAGRAPH,
    clean,
    closing_tokens,
    encode_documents,
    held_out_texts,
    prepare_text,
)

SPECIAL = (END, PARAGRAPH, CHAPTER)


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))


def story(n):
    return "\n\n".join(f"Cat {n} sat on mat {i}. It was warm!" for i in range(6))


def decoded(data, part):
    return data.tokenizer.decode(getattr(data, part).tolist(), skip_special_tokens=False)


def test_blank_lines():
    assert clean("\r\na \r\n \r\nb\n\n\n\n\nc\nd\n") == "a \n\nb\n\n\nc\nd"


def test_decoding_restores_documents():
    texts = ["A cat.\n\nA mat.\n\n\nNext.", "Über 😀", "x" * 1000]
    tokenizer = train_tokenizer(texts, 300, special_tokens=SPECIAL)
    ids = encode_documents(texts, tokenizer)
    assert ids.dtype == np.uint16
    assert tokenizer.decode(ids.tolist(), skip_special_tokens=False) == END.join([*texts, ""])
    assert (ids == tokenizer.token_to_id(PARAGRAPH)).sum() == (ids == tokenizer.token_to_id(CHAPTER)).sum() == 1


def test_closing_tokens():
    tokenizer = train_tokenizer(['"Go." he said. "Go."'] * 5, 270, special_tokens=SPECIAL)
    closes = {tokenizer.id_to_token(token): height for token, height in closing_tokens(tokenizer).items()}
    assert {closes[mark] for mark in ".!?"} == {2}
    assert closes['."'] == 2
    assert (closes[PARAGRAPH], closes[CHAPTER], closes[END]) == (3, 4, 5)
    assert not {"a", "Ċ", "Ġ"} & set(closes)


def test_one_text_is_cut_at_paragraphs(tmp_path):
    path = tmp_path / "story.txt"
    path.write_text("\n\n".join(f"Paragraph {i}." for i in range(100)))
    data = prepare_text(path, vocabulary=300)
    parts = [decoded(data, part).removesuffix(END) for part in ("train", "validation", "test")]
    assert "\n\n".join(parts) == path.read_text()
    assert [len(part) / len(path.read_text()) for part in parts] == pytest.approx([0.9, 0.05, 0.05], abs=0.02)
    assert data.characters == sum(map(len, parts))


def test_many_texts_are_split_by_document(tmp_path):
    for n in range(40):
        (tmp_path / "texts" / f"{n % 3}").mkdir(parents=True, exist_ok=True)
        (tmp_path / "texts" / f"{n % 3}" / f"{n}.md").write_text(story(n))
    (tmp_path / "texts" / "notes.bin").write_bytes(b"\0")
    data = prepare_text(tmp_path / "texts", vocabulary=300, seed=1)
    result = {part: decoded(data, part).split(END)[:-1] for part in ("train", "validation", "test")}
    assert {part: len(texts) for part, texts in result.items()} == {"train": 36, "validation": 2, "test": 2}
    assert sorted(text for texts in result.values() for text in texts) == sorted(story(n) for n in range(40))


def test_books_are_split_by_the_split_column(tmp_path):
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [
        {"headings": ["One", "Two"], "paragraphs": [["A.\n\n\n\nB.", ""], ["C."]], "split": split}
        for split in ("test", "train", "validation")
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "books.parquet")
    data = prepare_text(tmp_path / "books.parquet", vocabulary=300)
    for part in ("train", "validation", "test"):
        assert decoded(data, part) == "One\n\nA.\n\nB.\n\n\nTwo\n\nC." + END


def test_columns_of_a_table(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"title": f"T{i}", "body": None if i else "B", "n": i}) + "\n" for i in range(30))
    )
    data = prepare_text(path, text=("title", "body"), vocabulary=300)
    whole = "".join(decoded(data, part) for part in ("train", "validation", "test"))
    assert sorted(whole.split(END)[:-1]) == sorted(["T0\n\nB", *(f"T{i}" for i in range(1, 30))])


def test_cache(tmp_path, monkeypatch):
    path = tmp_path / "story.txt"
    path.write_text(story(1))
    messages = []
    first = prepare_text(path, vocabulary=300, say=messages.append)
    assert [s.split()[0] for s in messages] == ["reading", "training", "encoding"]
    again = prepare_text(path, vocabulary=300, say=messages.append)
    assert len(messages) == 3
    assert np.array_equal(first.train, again.train)
    assert first.closes == again.closes
    path.write_text(story(2))
    prepare_text(path, vocabulary=300, say=messages.append)
    assert len(messages) == 6


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file or folder"),
        ("empty.txt", b" \n ", "data: no text; expected at least one document"),
        ("binary.txt", b"\0\1", "binary data"),
        ("latin.txt", b"caf\xe9", "0xe9"),
        (
            "rows.csv",
            b"a,b\n1,2\n",
            r"no columns to read are given; expected one or more of 'a', 'b'\. Name the columns that hold text with --text",
        ),
    ],
)
def test_data_that_cannot_be_read(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput, match=message):
        prepare_text(tmp_path / name)


def test_a_folder_without_texts(tmp_path):
    (tmp_path / "texts").mkdir()
    with pytest.raises(InvalidInput, match="no text files in the folder"):
        prepare_text(tmp_path / "texts")


def test_encodings_and_delimiters(tmp_path):
    text = "C'était l'été. " * 40
    for name in ("a.txt", "folder/a.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="cp1252")
        data = path if path.parent == tmp_path else path.parent
        assert held_out_texts(data, table=TableFormat(encoding="cp1252")) == [text.strip()]
        with pytest.raises(
            InvalidInput, match=r"a\.txt: line 1: expected text in utf-8, .* such as --encoding cp1252$"
        ):
            held_out_texts(data)
        with pytest.raises(InvalidInput, match=r"^delimiter: expected no value, got ';' for"):
            held_out_texts(data, table=TableFormat(delimiter=";"))
    path = tmp_path / "a.csv"
    path.write_text(f"text~id\n{text}~1\n", encoding="cp1252")
    assert held_out_texts(path, ("text",), TableFormat("~", "cp1252")) == [text.strip()]
