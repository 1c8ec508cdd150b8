import base64
import contextlib
import os
import pydoc
import time
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hsa.errors import InvalidInput
from hsa.signals import Graph, Set, Signal
from hsa.signals.readers import read_file, read_html, read_image, read_markdown, read_site, text_of, train_tokenizer
from hsa.signals.readers.html import load_html, visible_text


def blocks(signal):
    return [[" ".join(family.values) for family in block.members] for block in signal.members]


def read(text):
    return blocks(read_html(text))


def test_tags_that_begin_a_line_separate_blocks():
    assert read("<title>T</title><h1>A <i>b</i></h1><p>One. Two.<p>Three<ul><li>x<li>y</ul>tail") == [
        ["T"],
        ["A b"],
        ["One .", "Two ."],
        ["Three"],
        ["x"],
        ["y"],
        ["tail"],
    ]
    assert read("<table><tr><td>a<td>b</table><blockquote>c</blockquote><figcaption>d") == [["a"], ["b"], ["c"], ["d"]]
    assert read("bare <b>te</b>xt<br>next") == [["bare text next"]]
    assert read("a<pre>\nif x:\n  y\n\nz</pre>b &amp; c") == [["a"], ["if x :", "y", "z"], ["b & c"]]
    assert isinstance(read_html("x").domain, Set)


def test_scripts_and_other_invisible_content_are_left_out():
    text = "<style>s</style><script>let x = '<p>no</p>'</script><noscript><p>n</noscript><template>t</template><p>yes"
    assert read(text + "<!-- c --><svg><style>s</style></svg><iframe>i</iframe>") == [["yes"]]


@pytest.mark.parametrize(
    "broken", ["<p>yes", "<p><b>yes<p", "</div>yes</p></b>", "<table>yes", "<p class='x>'>yes", "<a<b>yes", "\0yes"]
)
def test_broken_pages(broken):
    assert read(broken) == [["yes"]]


@given(st.text("<>/ab='\"&;!- \n\0\ud800é", max_size=60))
def test_any_text_is_read_or_has_no_words(text):
    try:
        outcome = read_html(text)
    except InvalidInput as error:
        outcome = str(error)
    assert isinstance(outcome, Signal) or "at least one word or image" in outcome


def test_nesting_deeper_than_the_stack_of_python():
    assert read("<div>" * 5000 + "deep") == [["deep"]]


def numbered(tag, count):
    return "".join(f"<{tag} id={i}>" for i in range(count))


SLOW_PAGES = {
    "nesting": "<div>" * 200_000,
    "end tags that have no effect": "<div><table><tr><td></div></table>" * 60_000,
    "end tags in comments": "<div><!--</div>-->" * 100_000,
    "end tags in attributes": "<div title='</div>'>" * 100_000,
    "tags after an odd comment": "<!--><style><!--</style>" + "<div>" * 200_000 + "-->",
    "tags in a picture": "<svg><desc><style><!--</style>" + "<div>" * 200_000 + "-->",
    "formatting of every paragraph": "<p>" + numbered("b", 2_000) + "<p>x" * 20_000,
    "formatting around blocks": numbered("font", 20_000) + "<div>" * 20_000 + "</font>" * 20_000,
    "attributes": "<p " + " ".join(f"a{i}" for i in range(300_000)) + ">",
    "options": "<select>" + "<option>x" * 200_000,
}


@pytest.mark.parametrize("page", SLOW_PAGES.values(), ids=SLOW_PAGES.keys())
def test_pages_that_take_a_parser_minutes_are_refused(tmp_path, page):
    path = tmp_path / "a.html"
    path.write_text(page + "x")
    began = time.perf_counter()
    for read_page in (read_file, text_of):
        with pytest.raises(InvalidInput, match=r"a.html: expected a page that can be parsed in seconds, got tags"):
            read_page(path)
    with pytest.raises(InvalidInput, match=r"a.md: expected a page that can be parsed in seconds, got tags"):
        read_markdown(f"<div>{page}", where="a.md")
    assert time.perf_counter() - began < 10


@pytest.mark.parametrize(
    "page", ["<svg>" + "<!--<b>" * 200_000, "<object>" * 30_000 + "</td>" * 30_000, "<p a='" * 200_000]
)
def test_the_estimate_is_quick(page):
    began = time.perf_counter()
    with contextlib.suppress(InvalidInput):
        read_html(page + "x")
    assert time.perf_counter() - began < 10


LARGE_PAGES = {
    "paragraphs": "<p>x <b>y</b> <a href=z>w</a>" * 20_000,
    "blocks": ("<div>" * 30 + "<a href=y>x</a>" * 50 + "</div>" * 30) * 300,
    "lists": "<ul>" + "<li><a href=z><b>x</b></a>" * 20_000,
    "cells": "<table>" + ("<tr>" + "<td><font color=red>x" * 10) * 2_000,
    "open links": "".join(f"<a name={i}>x" for i in range(20_000)),
    "a script": "<script>" + "'<div>'+" * 100_000 + "</script>x",
    "overlaps": "".join(f"<a href={i}><div>x</a></div><i><b>y</i></b>" for i in range(10_000)),
    "options": "<select>" + "<option>x" * 5_000,
    "pictures": "<svg><g><path d='M0 0'/></g></svg>x" * 10_000,
}


@pytest.mark.parametrize("page", LARGE_PAGES.values(), ids=LARGE_PAGES.keys())
def test_large_pages_are_read(page):
    assert "x" in visible_text(page)


@pytest.mark.parametrize("module", ["json", "csv", "difflib", "textwrap"])
def test_pages_of_pydoc(module):
    thing = pydoc.locate(module)
    page = pydoc.html.page(pydoc.describe(thing), pydoc.html.document(thing, module))
    signal = read_html(page)
    words = {word for block in signal.members for sentence in block.members for word in sentence.values}
    assert signal.domain.size > 10
    assert set(thing.__all__[0].split("_")) <= words
    assert not any("\xa0" in word for word in words)
    assert module in visible_text(page)


def test_token_ids():
    tokenizer = train_tokenizer(["a"], 256)
    (block,) = read_html("<p>Two <b>cats</b>.", tokenizer).members
    assert tokenizer.decode(block.members[0].values.tolist()) == "Two cats."


@pytest.fixture
def site(tmp_path):
    folder = tmp_path / "site"
    (folder / "blog").mkdir(parents=True)
    (folder / "index.html").write_text(
        "<h1>Home</h1><img src=cat.png><img src='https://x.org/a.png'><img src='data:image/png;base64,AA'><img>"
        "<a href='blog/'>blog</a><a href='about#x'>about</a><a href='about.html?q'>again</a><a href='#top'>top</a>"
        "<a href='https://x.org/about.html'>out</a><a href='mailto:a@b'>mail</a><a href='http://[bad'>bad</a>"
        "<a href='missing.html'>missing</a>"
    )
    (folder / "about.html").write_text("<p>About. <a href='/index.html'>home</a>")
    (folder / "blog" / "index.htm").write_text("<p>Blog<img src='../%63at.png'><a href='../../../about.html'>up</a>")
    Image.new("RGB", (40, 30)).save(folder / "cat.png")
    return folder


def test_a_site_is_a_graph_of_pages(site):
    signal = read_site(site)
    assert signal.domain == Graph(3, [(0, 2), (1, 0), (2, 1), (2, 0)])
    about, blog, home = signal.members
    assert blocks(about) == [["About .", "home"]]
    assert read_image(site / "cat.png") in list(blog.members)
    assert [block.modalities for block in home.members] == [("text",), ("patch",), ("text",)]
    assert read_site(str(site)) == signal
    small = read_site(site, image_reader=partial(read_image, patch=8))
    assert small.members[2].members[1].values.shape[1:] == (8, 8, 3)


def test_nothing_outside_the_folder_is_read(site, tmp_path):
    (tmp_path / "secret.html").write_text("secret")
    Image.new("RGB", (16, 16)).save(tmp_path / "secret.png")
    whole = read_site(site)
    os.symlink(tmp_path / "secret.html", site / "link.html")
    os.symlink(tmp_path, site / "above")
    os.symlink(site, site / "blog" / "loop")
    assert read_site(site) == whole
    os.symlink(tmp_path / "secret.png", site / "link.png")
    for source in ("link.png", "../secret.png", str(tmp_path / "secret.png"), "a%00b.png", "x" * 5000 + ".png"):
        (site / "about.html").write_text(f"<p>About<img src='{source}'>")
        with pytest.raises(InvalidInput, match=r"no such file in the folder; expected the image that .*about.html"):
            read_site(site)


def test_bad_pictures(site):
    (site / "cat.png").write_bytes((site / "cat.png").read_bytes()[:60])
    with pytest.raises(InvalidInput, match=r"cat.png: no readable image"):
        read_site(site)
    (site / "about.html").write_text("About <img src=none.png>")
    left_out = []
    signal = read_site(site, on_bad="skip", left_out=left_out)
    assert signal.modalities == ("text",)
    assert [Path(name).name for name in left_out] == ["none.png", "cat.png", "cat.png"]
    with pytest.raises(InvalidInput, match=r"on_bad: expected 'raise' or 'skip', got 'ignore'"):
        read_site(site, on_bad="ignore")


def test_pictures_without_a_folder_are_left_out():
    assert read("x<img src=a.png>") == [["x"]]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ("é".encode(), "é"),
        ("é".encode("latin-1"), "é"),
        (b"\xef\xbb\xbf" + "é".encode(), "é"),
        (b"\xff\xfe" + "é".encode("utf-16-le"), "é"),
        (b"<meta charset=latin1>\x93", "“"),
        (b"<meta http-equiv=x content='text/html; charset=koi8-r'>" + "я".encode("koi8-r"), "я"),
        (b"<meta charset=nonsense>\xe9", "é"),
        (b"<meta charset='utf-16'>" + "é".encode(), "é"),
        (b"<meta charset=hex>\xe9", "é"),
        (b"<meta charset=punycode>\xe9", "é"),
        (b"<meta charset=unicode_escape>\\d\xe9", "\\dé"),
    ],
)
def test_encodings(tmp_path, data, text):
    path = tmp_path / "a.html"
    path.write_bytes(data)
    assert load_html(path).endswith(text)
    assert text_of(path) == text


def test_errors(tmp_path):
    with pytest.raises(InvalidInput, match=r"no \.html files; expected a folder of web pages"):
        read_site(tmp_path)
    with pytest.raises(InvalidInput, match="no such folder; expected a folder of web pages"):
        read_site(tmp_path / "none")
    (tmp_path / "empty.html").write_text("<html><script>x</script></html>")
    with pytest.raises(InvalidInput, match=r"empty.html: no tokens; expected at least one word or image in the page"):
        read_site(tmp_path)
    (tmp_path / "empty.html").write_bytes(b"\x89PNG\0\0")
    with pytest.raises(InvalidInput, match=r"empty.html: expected .*, got binary data"):
        read_site(tmp_path)
    with pytest.raises(InvalidInput, match=r"html: expected a string, got a value of type NoneType"):
        read_html(None)


def test_pictures_in_addresses_are_not_decoded():
    bomb = base64.b64encode(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + b"\xff" * 99).decode()
    assert read(f"x<img src='data:image/png;base64,{bomb}'>") == [["x"]]
