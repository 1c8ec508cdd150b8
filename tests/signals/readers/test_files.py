import builtins
import json
import subprocess
import sys

import pytest
from PIL import Image

from hsa.errors import InvalidInput, MissingExtra
from hsa.signals import Leaf, Sequence, Signal
from hsa.signals.readers import (
    SUFFIXES,
    load_rows,
    read_file,
    read_html,
    read_image,
    read_json,
    read_markdown,
    read_python,
    read_text,
    text_of,
    train_tokenizer,
)

TEXTS = {
    ".txt": ("One. Two.", read_text),
    ".md": ("# One\n\nTwo.", read_markdown),
    ".markdown": ("# One\n\nTwo.", read_markdown),
    ".html": ("<p>One<p>Two", read_html),
    ".htm": ("<p>One<p>Two", read_html),
    ".json": ('{"a": ["One two.", 3]}', read_json),
    ".py": ("one = 2", read_python),
}


@pytest.mark.parametrize("suffix", [suffix for suffix, kind in SUFFIXES.items() if kind != "image"])
def test_the_suffix_chooses_the_reader(tmp_path, suffix):
    path = tmp_path / f"a{suffix.upper()}"
    text, read = TEXTS[suffix]
    path.write_text(text)
    tokenizer = train_tokenizer(["a"], 256)
    assert read_file(path) == read(text)
    assert read_file(str(path), tokenizer) == read(text, tokenizer)
    assert text_of(path) == ("One\n\nTwo" if read is read_html else text)


@pytest.mark.parametrize("suffix", [suffix for suffix, kind in SUFFIXES.items() if kind == "image"])
def test_pictures(tmp_path, suffix):
    path = tmp_path / f"a{suffix}"
    Image.new("RGB", (50, 40)).save(path)
    assert read_file(path) == read_image(path)
    assert text_of(path) is None
    assert read_file(path, image_reader=lambda path: read_image(path, patch=8)).domain.shape == (5, 6)


def test_pictures_of_a_page_are_in_its_folder(tmp_path):
    (tmp_path / "a.html").write_text("Cat: <img src=cat.png>")
    with pytest.raises(InvalidInput, match=r"cat.png: no such file in the folder"):
        read_file(tmp_path / "a.html")
    assert read_file(tmp_path / "a.html", on_bad="skip").modalities == ("text",)
    Image.new("RGB", (50, 40)).save(tmp_path / "cat.png")
    assert read_file(tmp_path / "a.html").modalities == ("text", "patch")


def test_json():
    tokenizer = train_tokenizer(["a"], 256)
    signal = read_json('{"a": "Hi. You", "b": [true, 2, null], "c": {"d": []}}', tokenizer)
    assert signal.domain.keys == ("a", "b")
    assert [tokenizer.decode(s.values.tolist()) for s in signal.members[0].members] == ["Hi.", "You"]
    assert signal.members[1] == Signal.of([1.0, 2.0], "number")
    assert read_json("3") == Signal(Sequence(1), [Leaf(3.0, "number")])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a":\n}', "json: line 2, column 1: invalid JSON"),
        ("[]", "json: no values; expected at least one"),
        ("[1, NaN]", "json: expected a finite number, got nan"),
        ("[1e39]", "json: expected a finite number, got 1e[+]39. Scale it: models compute in float32"),
        ('{"a": 1, "a": 2}', "json: line 1: expected distinct keys, got the key 'a' twice"),
        ("[" * 201 + "]" * 201, "json: expected at most 200 levels, got JSON nested too deeply to read"),
        ("[" * 600 + "1" + "]" * 600, "json: expected .*, got JSON nested too deeply to read"),
        ("[" * 99_999, "json: expected .*, got JSON nested too deeply to read"),
        ("9" * 9999, "json: line 1: expected .*, got a number too long"),
    ],
)
def test_bad_json(text, message):
    with pytest.raises(InvalidInput, match=message):
        read_json(text)


def test_json_of_many_levels():
    assert read_json("[" * 200 + "1" + "]" * 200).depth == 200
    assert read_json(json.dumps([{"a": [i]} for i in range(500)])).num_leaves == 500  # wide, not deep


def test_unknown_suffixes(tmp_path):
    for use in (read_file, text_of):
        with pytest.raises(InvalidInput, match=r"a.pdf: expected one of .txt, .md, .*\.webp, got the suffix '.pdf'"):
            use(tmp_path / "a.pdf")
        with pytest.raises(InvalidInput, match=r"a.txt: no such file"):
            use(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("module", "package", "use"),
    [
        ("markdown_it", "markdown-it-py", lambda: read_markdown("a")),
        ("selectolax", "selectolax", lambda: read_html("a")),
        ("PIL", "pillow", lambda: read_image(b"")),
        ("pyarrow", "pyarrow", lambda: load_rows("a.parquet")),
    ],
)
def test_missing_packages_say_what_to_install(monkeypatch, module, package, use):
    original = builtins.__import__

    def without(name, *arguments, **keywords):
        if name.partition(".")[0] == module:
            raise ImportError(name)
        return original(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(MissingExtra, match=rf"'{package}'; install it with: pip install 'hsa\[readers\]'"):
        use()


def test_importing_readers_loads_no_heavy_package():
    heavy = {"PIL", "markdown_it", "pyarrow", "selectolax", "sentencex", "tokenizers"}
    code = f"import sys, hsa.signals.readers; print(sorted({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
