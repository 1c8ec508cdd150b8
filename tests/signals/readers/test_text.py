import builtins
import time

import pytest

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals import Sequence, Signal
from hsa.signals.readers import read_text, read_text_file, train_tokenizer

TEXT = "Two cats sat.  One of\nthem, Mr. Tom, slept!\n \t\nThen what?\r\n\r\n\r\nNothing."


def words(signal):
    return [[list(sentence.values) for sentence in paragraph.members] for paragraph in signal.members]


def test_paragraphs_sentences_words():
    assert words(read_text(TEXT)) == [
        [["Two", "cats", "sat", "."], ["One", "of", "them", ",", "Mr", ".", "Tom", ",", "slept", "!"]],
        [["Then", "what", "?"]],
        [["Nothing", "."]],
    ]
    assert read_text(TEXT).domain == Sequence(3)
    assert read_text(TEXT).modalities == ("text",)


def test_line_wrapping_does_not_change_the_signal():
    assert read_text(TEXT.replace("of\nthem", "of them")) == read_text(TEXT) == read_text(TEXT.replace(" sat", "\nsat"))


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer([TEXT] * 3, 300)


def decoded(signal, tokenizer):
    return [[tokenizer.decode(s.values.tolist()) for s in paragraph.members] for paragraph in signal.members]


def test_token_ids_decode_to_the_sentences(tokenizer):
    signal = read_text(TEXT, tokenizer)
    assert decoded(signal, tokenizer) == [
        ["Two cats sat.", "One of them, Mr. Tom, slept!"],
        ["Then what?"],
        ["Nothing."],
    ]
    assert type(signal.members[0].members[0].members[0].value) is int


def test_tokenizers_of_every_form_agree(tokenizer, tmp_path):
    class HuggingFaceLike:
        def encode(self, text, add_special_tokens=True):
            assert not add_special_tokens
            return tokenizer.encode(text).ids

    path = tmp_path / "tokenizer.json"
    tokenizer.save(str(path))
    wanted = read_text(TEXT, tokenizer)
    assert wanted == read_text(TEXT, path) == read_text(TEXT, str(path)) == read_text(TEXT, HuggingFaceLike())


def test_padding_and_truncation_are_ignored_and_left_alone(tokenizer):
    copy = type(tokenizer).from_str(tokenizer.to_str())
    copy.enable_padding(length=17)
    copy.enable_truncation(2)
    assert read_text(TEXT, copy) == read_text(TEXT, tokenizer)
    assert copy.truncation["max_length"] == 2
    assert copy.padding["length"] == 17


def test_sentences_without_tokens_are_left_out():
    class OnlyCats:
        def encode(self, text, add_special_tokens):
            return [5] * text.count("cat")

    text = "A cat. No dog. Two cats, cats!\n\nNo dog."
    sentences = [Signal.of([5], "text"), Signal.of([5, 5], "text")]
    assert read_text(text, OnlyCats()) == Signal(Sequence(1), [Signal(Sequence(2), sentences)])


def test_train_tokenizer():
    trained = train_tokenizer(["low lower lowest"] * 5, 261, special_tokens=["<s>"])
    assert trained.get_vocab_size() == 261
    assert trained.token_to_id("<s>") == 0
    unseen = "Grüße, 世界 🙂\n"
    assert trained.decode(trained.encode(unseen).ids) == unseen
    for arguments, message in (
        ((["a"], 255), "vocab_size: expected 256 or more: 256 bytes and the special tokens, got 255"),
        (("a", 300), "texts: expected a list of strings, got one string. Wrap it: [text]"),
    ):
        with pytest.raises(InvalidInput) as caught:
            train_tokenizer(*arguments)
        assert str(caught.value) == message


def test_files(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbf" + TEXT.encode())
    assert read_text_file(path) == read_text(TEXT)
    assert read_text_file(str(path), tokenizer) == read_text(TEXT, tokenizer)
    path.write_bytes("Grüße.".encode("latin-1"))
    assert read_text_file(path, language="de", encoding="latin-1") == read_text("Grüße.")
    path.write_bytes("Grüße.".encode("utf-16"))  # its NUL bytes are no NUL characters
    assert read_text_file(path, encoding="utf-16") == read_text("Grüße.")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "no such file; expected a readable text file"),
        ("directory", "expected a readable text file, got a folder"),
        (
            b"fine so far \xff",
            "expected text in utf-8, got the byte 0xff at offset 12. "
            "If it is text in another encoding, convert it to utf-8",
        ),
        (
            b"\x89PNG\r\n\0\0",
            "expected text in utf-8, got binary data (it has NUL bytes). "
            "If it is text in another encoding, convert it to utf-8",
        ),
        (b"", "no tokens; expected at least one word"),
        (b" \n\n\t\n", "no tokens; expected at least one word"),
    ],
)
def test_file_errors_name_the_file(tmp_path, content, message):
    path = tmp_path / "a.txt"
    if content == "directory":
        path.mkdir()
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        read_text_file(path)
    assert str(caught.value) == f"{path}: {message}"


def test_bad_arguments(tmp_path):
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{")
    with pytest.raises(InvalidInput, match=r"text: expected a string, got a value of type bytes"):
        read_text(b"abc")
    with pytest.raises(InvalidInput, match=r"tokenizer: expected a tokenizers.Tokenizer, .*, got a value of type int"):
        read_text("abc", 5)
    with pytest.raises(
        InvalidInput, match=r"tokenizer.json: expected a tokenizer.json, got a file that does not load \(.*\)"
    ):
        read_text("abc", broken)
    with pytest.raises(InvalidInput, match=r"none.json: no such file; expected a tokenizer.json"):
        read_text("abc", tmp_path / "none.json")


@pytest.mark.parametrize("package", ["sentencex", "tokenizers"])
def test_missing_packages_say_what_to_install(monkeypatch, package):
    original = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] == package:
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=rf"'{package}'; install it with: pip install 'hsa\[text\]'"):
        read_text("abc")


def test_half_a_megabyte_is_quick():
    paragraph = "The gauge was read every morning at the same hour, and nobody asked why. It rained. " * 7
    text = "\n\n".join([paragraph] * 850)
    began = time.perf_counter()
    signal = read_text(text)
    assert signal.num_families == 1 + 850 + 850 * 14
    assert time.perf_counter() - began < 10  # about half a second on a slow machine; a quadratic reader takes minutes


def test_long_runs_of_spaces_are_quick():
    began = time.perf_counter()
    assert read_text("a" + " " * 300_000 + "b\n   c" + "\t" * 300_000).num_leaves == 3
    assert time.perf_counter() - began < 10  # milliseconds; a quadratic reader takes minutes


@pytest.mark.parametrize("encoding", ["rot13", "hex", "punycode", "nonsense", "a\0b"])
def test_encodings_that_are_not_of_text_files(tmp_path, encoding):
    (tmp_path / "a.txt").write_text("One. Two.")
    with pytest.raises(InvalidInput, match=r"a.txt: the encoding .* is not one of text files .*; expected an encoding"):
        read_text_file(tmp_path / "a.txt", encoding=encoding)


@pytest.mark.parametrize("space", ["\xa0", "\x85", "\u2028", "\u3000"])
def test_spaces_of_several_bytes(space):
    signal = read_text(f"Mr {space}. Ito stayed{space}in. B {space}.")
    assert "stayed in" in " ".join(word for sentence in signal.members[0].members for word in sentence.values)
