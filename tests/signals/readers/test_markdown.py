import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hsa import collate
from hsa.errors import InvalidInput
from hsa.signals import Signal, Table
from hsa.signals.readers import read_markdown, read_text, train_tokenizer

ROOT = Path(__file__).parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]


def words(node):
    """Return the signal as nested lists, with tables as dictionaries and families of tokens as strings."""
    if node.values is not None:
        return " ".join(node.values)
    parts = [words(member) for member in node.members]
    return dict(zip(node.domain.keys, parts, strict=True)) if isinstance(node.domain, Table) else parts


def read(text):
    return words(read_markdown(text))


def test_sections_nest_as_headings_do():
    text = "Before.\n\n# A\n\nText of A.\n\n### C\n\nOf C.\n\n## B\n\nOf B.\n\n# D\n"
    section_c = {"heading": ["C"], "body": [["Of C ."]]}
    section_b = {"heading": ["B"], "body": [["Of B ."]]}
    section_a = {"heading": ["A"], "body": [["Text of A ."], section_c, section_b]}
    assert read(text) == [["Before ."], section_a, {"heading": ["D"]}]


def test_blocks():
    assert read("One. Two\nlines.") == [["One .", "Two lines ."]]
    assert read("- a\n- b\n  1. c\n\n     d") == [[[["a"]], [["b"], [[["c"], ["d"]]]]]]
    assert read("```py\nif x:\n    y\n\nz\n```") == [["if x :", "y", "z"]]
    assert read("> Quoted.\n>\n> # H\n> body") == [[["Quoted ."], {"heading": ["H"], "body": [["body"]]}]]
    assert read("| a | b c |\n|---|---|\n| d. | |\n") == [[[["a"], ["b c"]], [["d ."]]]]
    assert read("Title\n=====\ntext\n\n---\n\nmore") == [{"heading": ["Title"], "body": [["text"], ["more"]]}]
    assert read("<!-- no -->\n\n<p>In <b>HTML</b>.</p>\n<p>Two\n\nend") == [["In HTML ."], ["Two"], ["end"]]


def test_inline():
    assert read("**Bold** `co de` [text](http://x) ![a cat](c.png) <i>it</i>  \n~~old~~ <http://y>") == [
        ["Bold co de text a cat it old http : / / y"]
    ]


def test_front_matter_is_left_out_and_rules_are_not_front_matter():
    assert read("---\ntitle: x\n---\n# A") == [{"heading": ["A"]}]
    assert read("---\ntitle: x\n...\nbody") == [["body"]]
    assert read("---\n\na\n\n---\n\nb") == [["a"], ["b"]]
    assert read("---\na: open") == [["a : open"]]


def test_an_empty_heading_leaves_the_body():
    assert read("#\n\ntext") == [{"body": [["text"]]}]


def test_token_ids_decode_to_sentences_and_lines():
    tokenizer = train_tokenizer(["a"], 256)
    signal = read_markdown("# Two cats\n\nThey sat.\n\n    if x:\n        y\n", tokenizer)
    (section,) = signal.members
    texts = [[tokenizer.decode(s.values.tolist()) for s in block.members] for block in section.members[1].members]
    assert texts == [["They sat."], ["if x:", "    y"]]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_real_pages(page):
    text = page.read_text()
    signal = read_markdown(text)
    headings = re.findall(r"^#+ (.*)", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    assert signal.modalities == ("text",)
    if headings:
        plain = " ".join(re.sub(r"[`*]", "", headings[0]).split())
        first = next(member for member in signal.members if isinstance(member.domain, Table))
        assert first.members[0] == read_text(plain).members[0]


@given(st.text("#->*_`|<a1. \n\t[]()!", max_size=60))
def test_any_text_is_read_or_has_no_words(text):
    try:
        outcome = read_markdown(text)
    except InvalidInput as error:
        outcome = str(error)
    assert isinstance(outcome, Signal) or "no tokens" in outcome


def test_deep_nesting():
    assert read_markdown("> " * 40 + "deep").depth == 40 + 3
    assert read_markdown("> " * 100 + "deep").depth == 100 + 3


@pytest.mark.parametrize("mark", ["> ", ">", "- ", "1. ", "> - "])
@pytest.mark.parametrize("levels", [49, 60, 100, 5000])
def test_text_below_the_deepest_level_is_kept(mark, levels):
    signal = read_markdown("top\n\n" + mark * levels + "deep\n\nend")
    assert collate([signal]).values["text"][0] == "top"
    assert [word for word in collate([signal]).values["text"] if word.isalpha()] == ["top", "deep", "end"]


def test_lists_indented_beyond_the_deepest_level_are_kept():
    signal = read_markdown("\n".join("  " * i + f"- w{i}" for i in range(150)))
    words = collate([signal]).values["text"]
    assert [word for word in words if word != "-"] == [f"w{i}" for i in range(150)]


def test_emphasis_deeper_than_the_stack_of_python():
    assert read("*" * 3000 + "deep" + "*" * 3000) == [["deep"]]
    assert read("*a _b " * 500 + "x" + "_*" * 500) == [["a b " * 500 + "x"]]


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "![" * 50_000, "[" * 50_000 + "](b)" * 50_000, "a" + " " * 200_000 + "b"]
)
def test_time_grows_with_the_length(text):
    began = time.perf_counter()
    read_markdown(text)
    assert time.perf_counter() - began < 10  # less than a second; a quadratic reader takes minutes


def test_errors():
    with pytest.raises(InvalidInput, match=r"a.md: no tokens; expected at least one word"):
        read_markdown("<!-- nothing -->", where="a.md")
    with pytest.raises(InvalidInput, match=r"markdown: expected a string, got a value of type bytes"):
        read_markdown(b"abc")
