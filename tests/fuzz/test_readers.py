"""Mutated files: a reader returns a signal or raises an error of ours, in time, and never anything else."""

import io
import time
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from hsa.errors import HsaError
from hsa.signals import load_rows, read_file, read_image, read_row


def image(kind):
    file = io.BytesIO()
    Image.linear_gradient("L").resize((33, 21)).convert("RGB").save(file, kind)
    return file.getvalue()


TEXTS = {
    "txt": "One sentence. Another one, of Dr. No!\n\nA second paragraph… with é and 🌍.\n",
    "md": """# A title

Text *with* `code` and [a link](x.md).

> a quote
> > deeper

- one
  - two

| a | b |
|---|---|
| 1 | 2 |
""",
    "html": """<html><head><title>T</title></head><body><h1>A</h1><p>Some <b>bold</b> text.<ul><li>x<li>y</ul>
<table><tr><td>1</table><img src='a.png'></body></html>""",
    "json": """{"a": [1, 2.5, {"b": "text, of two sentences. Yes."}], "c": null, "d": true}""",
    "py": """# coding: utf-8
import os


class A(B):
    'Doc.'

    def f(self, x=1, *y):
        return [z for z in y if z > x] or {'a': f'{x!r}'}
""",
    "csv": 'text,number\n"one, two",1.5\nthree,-2\n"a ""quote""",3e4\n',
    "tsv": "text\tnumber\none\t1\ntwo\t2\n",
    "jsonl": '{"text": "one", "number": 1}\n{"text": "two", "number": 2.5}\n',
}
IMAGES = {kind.lower(): image(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP")}
TOKENS = [b"<", b">", b"&#0;", b"]]>", b"<!--", b"\0", b"\xff\xfe", b"\r", b'"', b"'''", b"```", b"> " * 60, b"[" * 300]
TOKENS += [
    b"{" * 300,
    b"<div>" * 200,
    b"1e999",
    b"NaN",
    b"\xe2\x80\xa8",
    b"\xc2\xa0.",
    b"# coding: rot13\n",
    b"9" * 5000,
]
SECONDS = 10


@st.composite
def mutated(draw, seeds):
    name = draw(st.sampled_from(sorted(seeds)))
    data = bytearray(seeds[name] if isinstance(seeds[name], bytes) else seeds[name].encode())
    for _ in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, max(len(data) - 1, 0)))
        change = draw(st.sampled_from(["flip", "cut", "repeat", "insert", "swap"]))
        if change == "flip" and data:
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif change == "cut":
            del data[at : at + draw(st.integers(1, 40))]
        elif change == "repeat":
            data[at:at] = bytes(data[at : at + draw(st.integers(1, 60))]) * draw(st.integers(1, 50))
        elif change == "insert":
            data[at:at] = draw(st.sampled_from(TOKENS) | st.binary(min_size=1, max_size=6))
        elif data:
            other = draw(st.integers(0, len(data) - 1))
            data[at], data[other] = data[other], data[at]
    return name, bytes(data)


def read(path):
    if path.suffix not in (".csv", ".tsv", ".jsonl"):
        return read_file(path)
    return [read_row(row, text=["text"], number=["number"]) for row in load_rows(path)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("mutated")


@given(drawn=mutated(TEXTS))
def test_texts_and_tables(drawn, folder):
    name, data = drawn
    path = folder / f"a.{name}"
    path.write_bytes(data)
    began = time.process_time()
    with suppress(HsaError):
        read(path)
    assert time.process_time() - began < SECONDS


@given(drawn=mutated(IMAGES))
def test_images(drawn):
    _, data = drawn
    began = time.process_time()
    with suppress(HsaError):
        read_image(data)
    assert time.process_time() - began < SECONDS
