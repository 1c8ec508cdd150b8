import io
import json
import sysconfig
import textwrap
import tokenize
from pathlib import Path

import pytest

from hsa.errors import InvalidInput
from hsa.signals.readers import definitions, read_file, read_python, text_of, train_tokenizer
from hsa.signals.readers.python_source import load_python

LIBRARY = Path(sysconfig.get_paths()["stdlib"])
MODULES = sorted(path for name in ("json", "logging", "asyncio", "importlib") for path in (LIBRARY / name).glob("*.py"))
MODULES += [LIBRARY / name for name in ("ast.py", "dataclasses.py", "tokenize.py", "this.py", "typing.py")]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def nested(node):
    return " ".join(node.values) if node.values is not None else [nested(member) for member in node.members]


def tokens(node):
    return list(node.values) if node.values is not None else [t for member in node.members for t in tokens(member)]


def tokenized(source):
    return [
        token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type not in LAYOUT
    ]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_no_token_is_lost(path):
    source = load_python(path)
    assert tokens(read_python(source)) == tokenized(source)


EVERYTHING = '''
"""Doc."""
import os; x = 1;  # two, and a comment
@cache
@(
    other)
def f(a, *, b: int = 3) -> {1: 2}:
    if a: b = 1; return b
    elif b:  # comment
        pass
    else:
        if c: pass
    return lambda: (
        1,  # inside
        2)

class A(B):
    @property
    def g(self): return "é"; y
    async def h(self):
        async with a as b: pass
        async for é in "ü": (yield é); z

try: pass
except* E as e: pass
else: pass
finally: pass
match x:
    case {"a": 1} if y: pass
    case _:
        pass
for i in y: pass
else: pass
while x[1:2]: break
'''


def test_blocks_nest():
    assert nested(read_python(EVERYTHING)) == [
        '"""Doc."""',
        "import os ;",
        "x = 1 ;",
        [
            "@ cache @ ( other ) def f ( a , * , b : int = 3 ) -> { 1 : 2 } :",
            ["if a :", "b = 1 ;", "return b", ["elif b :", "pass"], ["else :", ["if c :", "pass"]]],
            "return lambda : ( 1 , 2 )",
        ],
        [
            "class A ( B ) :",
            ["@ property def g ( self ) :", 'return "é" ;', "y"],
            [
                "async def h ( self ) :",
                ["async with a as b :", "pass"],
                ['async for é in "ü" :', "( yield é ) ;", "z"],
            ],
        ],
        ["try :", "pass", ["except * E as e :", "pass"], ["else :", "pass"], ["finally :", "pass"]],
        ["match x :", ['case { "a" : 1 } if y :', "pass"], ["case _ :", "pass"]],
        ["for i in y :", "pass", ["else :", "pass"]],
        ["while x [ 1 : 2 ] :", "break"],
    ]
    assert tokens(read_python(EVERYTHING)) == tokenized(EVERYTHING)


def test_line_ends_do_not_matter():
    for end in ("\r\n", "\r"):
        assert read_python(EVERYTHING.replace("\n", end)) == read_python(EVERYTHING)
    assert read_python("x = 1") == read_python("x = 1\n")


def test_token_ids_decode_to_the_source_of_statements():
    tokenizer = train_tokenizer(["a"], 256)
    source = "@a\ndef f(é):  # no\n    if x: y = [1,\n      2]; z\n"

    def decoded(node):
        return tokenizer.decode(node.values.tolist()) if node.values is not None else [decoded(m) for m in node.members]

    assert decoded(read_python(source, tokenizer)) == [["@a\ndef f(é):", ["if x:", "y = [1,\n      2];", "z"]]]
    module = LIBRARY / "json" / "decoder.py"
    assert read_file(module, tokenizer).num_families == read_file(module).num_families


def test_definitions():
    defined = list(definitions(EVERYTHING))
    assert [(name, kind) for name, kind, _ in defined] == [("f", "function"), ("A", "class")]
    assert defined[0][2].startswith("@cache\n@(\n    other)\ndef f")
    assert defined[0][2].endswith("2)")
    for path in MODULES:
        for _, kind, text in definitions(load_python(path)):
            ((again, same_kind, same_text),) = definitions(text)
            assert (same_kind, same_text, again) == (kind, text, again)
    names = [name for name, _, _ in definitions(Path(json.__file__).read_text())]
    assert names == ["dump", "dumps", "detect_encoding", "load", "loads"]
    assert list(definitions("x = 1")) == []


def test_long_chains_of_elif():
    source = "if a: pass\n" + "elif a: pass\n" * 500
    assert read_python(source).members[0].domain.size == 2 + 500


def test_deep_blocks():
    source = "".join(" " * i + "if x:\n" for i in range(90)) + " " * 90 + "y\n"
    assert read_python(source).depth == 92


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1\ny = (\n", r"m.py:2: invalid Python \('\(' was never closed\); expected Python source"),
        ("if x:\ny", "m.py:2: invalid Python"),
        ("print 'x'", "m.py:1: invalid Python"),
        ("", "m.py: no statements; expected at least one"),
        ("# comment", "m.py: no statements; expected at least one"),
        ("x = 1\0", "m.py.*: invalid Python"),
        ("x = '\ud800'", "m.py.*: invalid Python"),
        ("x = " + "-" * 100_000 + "1", "m.py: expected fewer levels, got source nested too deeply to parse"),
        ("x = " + "(" * 1000 + ")" * 1000, "m.py:1: invalid Python"),
        ("x" + ".y" * 100_000, "m.py: expected fewer levels, got source nested too deeply to parse"),
        (
            "if a: pass\n" + "elif a: pass\n" * 20_000,
            "m.py: expected fewer levels, got source nested too deeply to parse",
        ),
        ("".join(" " * i + "if x:\n" for i in range(150)), "m.py:.*: invalid Python"),
    ],
    ids=lambda value: value[:20].encode("ascii", "replace").decode(),
)
def test_bad_source(source, message):
    for read in (read_python, lambda *a, **k: list(definitions(*a, **k)) or read_python(*a, **k)):
        with pytest.raises(InvalidInput, match=message):
            read(source, where="m.py")


def test_warnings_about_the_source_are_silenced():
    assert read_python(r"x = '\d'; y = 1 is 1").num_leaves == 9


def test_encodings(tmp_path):
    path = tmp_path / "m.py"
    path.write_bytes("# -*- coding: latin-1 -*-\nx = 'é'\n".encode("latin-1"))
    assert tokens(read_file(path)) == ["x", "=", "'é'"]
    path.write_bytes(b"# coding: nonsense\n")
    with pytest.raises(
        InvalidInput, match=r"m.py: invalid Python \(unknown encoding: nonsense\); expected Python source"
    ):
        read_file(path)
    path.write_bytes(b"x = '\xff'\n")
    with pytest.raises(InvalidInput, match=r"m.py: invalid Python \(invalid or missing encoding declaration"):
        read_file(path)


@pytest.mark.parametrize(
    "encoding", ["rot13", "hex", "base64", "zlib", "undefined", "idna", "punycode", "unicode_escape", "nonsense"]
)
def test_encodings_that_are_not_of_text_files(tmp_path, encoding):
    path = tmp_path / "m.py"
    path.write_text(f"# coding: {encoding}\nx = '\\d'\n")
    for use in (read_file, text_of):
        with pytest.raises(InvalidInput, match=rf"m.py: (invalid Python|the encoding '?{encoding}).*; expected "):
            use(path)


def test_dedented_source_of_a_class():
    source = textwrap.dedent(
        """
        class A:
            x = 1  # kept
        y = 2
        """
    )
    assert list(definitions(source)) == [("A", "class", "class A:\n    x = 1  # kept")]
