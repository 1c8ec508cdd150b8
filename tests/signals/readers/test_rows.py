import csv
import gzip
import io
import json
import math
import time
import tracemalloc
from decimal import Decimal

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from pyarrow import parquet

from hsa.errors import InvalidInput
from hsa.signals import Leaf, Table
from hsa.signals.readers import load_rows, read_image, read_row, read_text, train_tokenizer

ROWS = [{"text": "Two cats.", "label": "a,b"}, {"text": 'Lines\nand "quotes"', "label": ""}]

KNOWN = "one of .csv, .tsv, .json, .jsonl, .ndjson, .parquet, or .gz of a text format"


def write(path, rows):
    suffix = path.name.removesuffix(".gz").rpartition(".")[2]
    if suffix == "parquet":
        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    buffer = io.StringIO(newline="")
    if suffix in ("csv", "tsv"):
        writer = csv.DictWriter(buffer, rows[0], delimiter="," if suffix == "csv" else "\t")
        writer.writeheader()
        writer.writerows(rows)
    elif suffix == "json":
        json.dump(rows, buffer)
    else:
        buffer.write("\n".join(map(json.dumps, rows)))
    data = buffer.getvalue().encode()
    path.write_bytes(gzip.compress(data) if path.name.endswith(".gz") else data)


FORMATS = ["csv", "tsv", "json", "jsonl", "ndjson", "parquet", "csv.gz", "jsonl.gz", "CSV"]


@pytest.mark.parametrize("suffix", FORMATS)
def test_round_trips(tmp_path, suffix):
    path = tmp_path / f"data.v2.{suffix}"
    write(path.with_name(path.name.lower()), ROWS)
    path.with_name(path.name.lower()).rename(path)
    rows = load_rows(path)
    assert rows.columns == ("text", "label")
    assert len(rows) == 2
    assert [rows.row(i) for i in range(2)] == ROWS
    assert rows.column("text") == [row["text"] for row in ROWS]
    assert rows.where(1).startswith(f"{path}: row 2")


values = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=9)


@given(st.lists(st.tuples(values, values.filter(str.strip)), min_size=1, max_size=5), st.sampled_from(FORMATS[:5]))
def test_any_text_survives(tmp_path_factory, pairs, suffix):
    path = tmp_path_factory.getbasetemp() / f"any.{suffix}"
    rows = [{"a": a, "b": b} for a, b in pairs]
    write(path, rows)
    loaded = load_rows(path)
    assert [loaded.row(i) for i in range(len(loaded))] == rows


def test_the_line_of_a_row_is_the_line_in_which_it_begins(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('a,b\n1,"x\ny\nz"\n\n2,w\n3\n')
    rows = load_rows(path)
    assert [rows.where(i).partition(": ")[2] for i in range(3)] == [
        "row 1 (line 2)",
        "row 2 (line 6)",
        "row 3 (line 7)",
    ]
    assert rows.row(2) == {"a": "3", "b": None}
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n\n{"b": 2}\r\n')
    rows = load_rows(path)
    assert rows.where(1).endswith("row 2 (line 3)")
    assert [rows.row(i) for i in range(2)] == [{"a": 1, "b": None}, {"a": None, "b": 2}]


def test_long_fields_and_the_limit_of_others(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a\n" + "x" * 300_000)
    before = csv.field_size_limit()
    assert len(load_rows(path).row(0)["a"]) == 300_000
    assert csv.field_size_limit() == before


def test_columns_without_a_name_and_byte_order_marks(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b"\xef\xbb\xbf,text, 2020\n0,x,y\n")
    assert load_rows(path).columns == ("column 1", "text", "2020")


def test_types_of_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"n": 1, "x": 0.5, "d": Decimal("1.50"), "image": {"bytes": b"ab", "path": None}}, {"n": None}]
    write(path, rows)
    loaded = load_rows(path)
    assert loaded.row(0) == rows[0]
    assert loaded.column("n") == [1, None]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"", "a.csv: expected rows, got an empty file"),
        ("a.csv", b"\n \n", "a.csv: expected rows, got an empty file"),
        ("a.csv", b"a,b\n", "a.csv: no rows; expected at least one"),
        (
            "a.csv",
            b"a,b,a\n1,2,3",
            "a.csv: line 1: expected distinct names, got the column 'a' 2 times. Name the col",
        ),
        (
            "a.csv",
            b"5.1,3,x\n1,2,3",
            "a.csv: line 1: '5.1' is a number; expected the names of the columns. Name the columns",
        ),
        ("a.csv", b",\n1,2", "a.csv: line 1: no names of columns"),
        ("a.csv", b'a\n"x\ny"\n1,2', "a.csv: row 2 (line 4): expected at most 1, one for each of 'a', got 2 fields"),
        (
            "a.csv",
            b'a\nb\n"x\ny\n',
            "a.csv: line 3: expected fields in quotes that are closed, got a row that cannot be read (unexpected end",
        ),
        ("a.csv", b"a\nb\n\xff", "a.csv: line 3: expected text in utf-8, got the byte 0xff at offset 4"),
        ("a.csv", b"a\n\0", "a.csv: expected text in utf-8, got binary data"),
        ("a.jsonl", b'{"a": 1}\n{"a": }', "a.jsonl: line 2, column 7: invalid JSON (Expecting value); expected JSON"),
        ("a.jsonl", b'{"a": 1}\n\n[1]', "a.jsonl: row 2 (line 3): expected an object, got a JSON list"),
        ("a.jsonl", b"[" * 100_000, "a.jsonl: expected at most 200 levels, got JSON nested too deeply"),
        ("a.json", b'[{"a": 1, "b": 2, "a": 3}]', "a.json: line 1: expected distinct keys, got the key 'a' twice"),
        ("a.jsonl", b'{}\n{"a": 1, "a": 3}', "a.jsonl: line 2: expected distinct keys, got the key 'a' twice"),
        ("a.json", b'[{"a": 1},\n{"a": }]', "a.json: line 2, column 7: invalid JSON"),
        ("a.json", b'{"a": 1}', "a.json: expected a list of objects, got a JSON dict"),
        ("a.json", b"[{}, 3]", "a.json: row 2: expected an object, got a JSON int"),
        ("a.json", b"[]", "a.json: no rows; expected at least one"),
        ("a.csv.gz", b"a\n1", "a.csv.gz: expected a gzip file, got damaged data (Not a gzipped file"),
        ("a.csv.gz", gzip.compress(b"a\n1" * 99, mtime=0)[:20], "a.csv.gz: expected a gzip file, got damaged data"),
        ("a.parquet", b"PAR1", "a.parquet: expected a Parquet file, got damaged data ("),
        (
            "a.xlsx",
            b"",
            f"a.xlsx: expected {KNOWN}, got the suffix '.xlsx'",
        ),
        (
            "csv",
            b"",
            f"csv: expected {KNOWN}, got the suffix ''",
        ),
        ("a.csv", None, "a.csv: no such file"),
        ("a.parquet", None, "a.parquet: no such file"),
    ],
)
def test_errors_name_file_and_line(tmp_path, name, content, message):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InvalidInput) as caught:
        load_rows(tmp_path / name)
    assert str(caught.value).startswith(f"{tmp_path}/{message}")


def test_missing_columns_name_the_closest(tmp_path):
    write(tmp_path / "a.csv", ROWS)
    with pytest.raises(InvalidInput, match=r"a.csv: no column 'lable'; expected one of 'text', 'label'. Did you m"):
        load_rows(tmp_path / "a.csv").column("lable")
    with pytest.raises(
        InvalidInput, match=r"row: no column 'tex'; expected one of 'text', 'label'. Did you mean 'text'\?"
    ):
        read_row(ROWS[0], text=["tex"])


def test_a_row_is_a_table_of_its_columns(tmp_path):
    Image.new("RGB", (20, 30)).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    picture = read_image(tmp_path / "a.png")
    row = {"n": "3.5", "t": "Two cats.", "p": "a.png", "q": data, "r": {"bytes": data}, "s": {"path": "a.png"}, "u": 7}
    signal = read_row(row, text=["t", "u"], number=["n"], image=["p", "q", "r", "s"], folder=tmp_path)
    assert signal.domain == Table(["t", "u", "n", "p", "q", "r", "s"])
    assert list(signal.members) == [read_text("Two cats."), read_text("7"), Leaf(3.5, "number"), *[picture] * 4]
    tokenizer = train_tokenizer(["a"], 256)
    assert read_row(row, text=["t"], number=["n"], tokenizer=tokenizer).members[0] == read_text("Two cats.", tokenizer)


def test_missing_texts_and_pictures_are_left_out():
    row = {"a": "x", "b": None, "c": math.nan, "d": " ", "e": {"bytes": None, "path": None}, "f": 0}
    assert read_row(row, text=["a", "b", "d"], number=["f"], image=["c", "e"]).domain == Table(["a", "f"])
    with pytest.raises(InvalidInput, match=r"a.csv: row 3: no values; expected at least one in 'b', 'c'"):
        read_row(row, text=["b", "c"], where="a.csv: row 3")


@pytest.mark.parametrize("value", [None, "", "  ", math.nan, "nan", "NaN", "inf", "1e39", 1e300, "1e999"])
def test_missing_numbers_and_numbers_that_are_not_finite_are_refused_alike(value):
    with pytest.raises(
        InvalidInput, match=r"^a.csv: row 3, column 'n': expected a finite number, got (an empty cell|.)"
    ):
        read_row({"n": value, "t": "x"}, number=["n"], text=["t"], where="a.csv: row 3")


def test_a_single_column_of_text_gives_the_signal_of_the_text():
    assert read_row({"t": "Two cats."}, text=["t"]) == read_text("Two cats.")
    assert read_row({"t": "a", "u": None}, text=["t", "u"]).domain == Table(["t"])
    assert read_row({"n": 1}, number=(name for name in ["n"])).domain == Table(["n"])


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"n": "many"}, {"number": ["n"]}, "row, column 'n': expected a finite number, got 'many'"),
        ({"n": math.inf}, {"number": ["n"]}, "row, column 'n': expected a finite number, got inf"),
        ({"n": [1]}, {"number": ["n"]}, "row, column 'n': expected a finite number, got [1]"),
        ({"n": 10**400}, {"number": ["n"]}, "row, column 'n': expected a finite number, got 1000"),
        ({"t": ["a"]}, {"text": ["t"]}, "row, column 't': expected text, got a list"),
        ({"p": "none.png"}, {"image": ["p"]}, "row, column 'p' (none.png): no such file"),
        ({"p": b"x"}, {"image": ["p"]}, "row, column 'p': no readable image"),
        ({"t": "a"}, {"text": "t"}, "text: expected a list of columns, got 't'. Write text=['t']"),
        ({"t": "1"}, {"text": ["t"], "number": ["t"]}, "row: expected each column once, got the column 't' twice"),
        ({"t": "a"}, {}, "columns: none given; expected at least one of text, number or image"),
    ],
)
def test_bad_rows(row, columns, message):
    with pytest.raises(InvalidInput) as caught:
        read_row(row, **columns)
    assert str(caught.value).startswith(message)


def test_halves_of_surrogate_pairs():
    assert read_row({"t": json.loads('"a \\ud800 b"')}, text=["t"]).num_leaves == 3


def test_many_rows_are_quick(tmp_path):
    write(tmp_path / "a.csv", ROWS * 25_000)
    began = time.perf_counter()
    assert len(load_rows(tmp_path / "a.csv")) == 50_000
    assert time.perf_counter() - began < 10  # a tenth of a second; a quadratic reader takes minutes


def test_pictures_outside_the_folder_are_not_opened(tmp_path, monkeypatch):
    folder = tmp_path / "data"
    (folder / "in").mkdir(parents=True)
    for path in (tmp_path / "secret.png", folder / "in" / "a.png"):
        Image.new("RGB", (20, 30)).save(path)
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "above").symlink_to(tmp_path)
    monkeypatch.chdir(folder)
    picture = read_image(folder / "in" / "a.png")
    names = ["../secret.png", "in/../../secret.png", str(tmp_path / "secret.png"), "link.png", "above/secret.png"]
    for name in names:
        for value in (name, {"path": name}):
            for root in (folder, None):
                with pytest.raises(InvalidInput) as caught:
                    read_row({"p": value}, image=["p"], folder=root, where="a.csv: row 3")
                assert str(caught.value).startswith(f"a.csv: row 3, column 'p' ({name}): no such file in the folder; ")
                assert "copy the file, not a link to it, into the folder" in str(caught.value)
    for value in ("in/a.png", "above/data/in/a.png", str(folder / "in" / "a.png")):
        assert read_row({"p": value}, image=["p"], folder=folder).members[0] == picture
    trusted = read_row(
        {"p": tmp_path / "secret.png"}, image=["p"], folder=folder
    )  # a path of Python code, not of a file
    assert trusted.members[0] == picture
    for value in ("x" * 5000, "a\0b", "."):
        with pytest.raises(InvalidInput, match="no such file in the folder"):
            read_row({"p": value}, image=["p"], folder=folder)


@pytest.mark.parametrize("suffix", ["csv.gz", "parquet"])
def test_compressed_data_are_bounded(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"bomb.{suffix}"
    rows = [{"text": "x" * 1000}] * 20_000
    write(path, rows)
    assert path.stat().st_size < 200_000
    assert len(load_rows(path)) == 20_000
    monkeypatch.setattr("hsa.files.MAX_UNPACKED", 10_000_000)
    tracemalloc.start()
    with pytest.raises(
        InvalidInput, match=r"bomb.*: expected at most 10,000,000 bytes after decompression, got more data"
    ):
        load_rows(path)
    assert tracemalloc.get_traced_memory()[1] < 30_000_000
    tracemalloc.stop()


def test_categories_of_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    names = pyarrow.array(["a", "b"] * 2000).dictionary_encode()
    parquet.write_table(pyarrow.table({"kind": names, "n": list(range(4000))}), path)
    rows = load_rows(path)
    assert rows.row(3999) == {"kind": "b", "n": 3999}
    assert rows.column("kind") == ["a", "b"] * 2000


def test_times_that_python_cannot_represent(tmp_path):
    path = tmp_path / "a.parquet"
    times = {"ns": pyarrow.array([1], pyarrow.timestamp("ns")), "late": pyarrow.array([10**8], pyarrow.date32())}
    parquet.write_table(pyarrow.table({"t": ["a"], **times}), path)
    rows = load_rows(path)
    assert rows.row(0) == {"t": "a", "ns": "timestamp[ns] 1", "late": "date32[day] 100000000"}
    assert rows.column("ns") == ["timestamp[ns] 1"]


def test_parquet_that_is_not_utf8(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(pyarrow.table({"t": ["zebra"] * 3}), path, compression="none")
    path.write_bytes(path.read_bytes().replace(b"zebra", b"z\xff\xffra"))
    with pytest.raises(InvalidInput, match=r"a.parquet: expected a Parquet file, got damaged data \(.*UTF8"):
        load_rows(path)


# Delimiters and encodings


@pytest.mark.parametrize(
    ("name", "text", "columns"),
    [
        ("a.csv", "a;b\n1,5;2\n3;4\n", ("a", "b")),
        ("a.csv", "a\tb\nx, y\tz\n", ("a", "b")),
        ("a.csv", "a|b\n1|2", ("a", "b")),
        ("a.csv", 'name, first;age\n"Tom; Kit";3\n', ("name, first", "age")),
        ("a.csv", "a;b\n", None),
        ("a.csv", "a,b\n1;2,3;4\n", ("a", "b")),  # the usual delimiter, wherever it fits
        ("a.csv", "a,b;c\n1,2;3\n", ("a", "b;c")),
        ("a.csv", "a,b\nx\n", ("a", "b")),  # rows may be short
        ("a.csv", "text\nx; y\nz\n", ("text",)),
        ("a.tsv", "a,b\n1,2\n", ("a", "b")),
        ("a.tsv", "a, b\tc\n1\t2\n", ("a, b", "c")),
    ],
)
def test_delimiters_are_recognised(tmp_path, name, text, columns):
    path = tmp_path / name
    path.write_text(text)
    if columns is None:
        with pytest.raises(InvalidInput, match="no rows"):
            load_rows(path)
    else:
        assert load_rows(path).columns == columns


def test_delimiters_that_are_not_recognised_are_asked_for(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("text;label\ngood; fine;pos\n")
    message = r"a\.csv: line 1: expected names .*, got the single column 'text;label'. Pass --delimiter ';', or"
    with pytest.raises(InvalidInput, match=message):
        load_rows(path)
    with pytest.raises(InvalidInput, match=r"row 1 \(line 2\): expected at most 2, .*, got 3 fields"):
        load_rows(path, delimiter=";")
    assert load_rows(path, delimiter=",").columns == ("text;label",)
    path.write_text("a;b|c\n1;2|3\n")  # two fit
    with pytest.raises(InvalidInput, match=r"the single column 'a;b\|c'"):
        load_rows(path)


def test_given_delimiters(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("a~b\tc\n1~2\t3\n")
    assert load_rows(path, delimiter="~").row(0) == {"a": "1", "b\tc": "2\t3"}
    for tab in ("\t", "tab", "\\t"):
        assert load_rows(path, delimiter=tab).columns == ("a~b", "c")
    for wrong in ("", ";;", '"', "\n"):
        with pytest.raises(InvalidInput, match=r"^delimiter: expected one character, such as ';', or tab, got"):
            load_rows(path, delimiter=wrong)
    for name in ("a.jsonl", "a.parquet"):
        write(tmp_path / name, ROWS)
        with pytest.raises(InvalidInput, match=r"^delimiter: expected no value except for .csv and .tsv, got ';' for"):
            load_rows(tmp_path / name, delimiter=";")
    with pytest.raises(InvalidInput, match=r"^encoding: expected no value for a .parquet file"):
        load_rows(tmp_path / "a.parquet", encoding="cp1252")


@pytest.mark.parametrize("name", ["a.csv", "a.csv.gz"])
@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "cp1252", "utf-8-sig", "utf-32"])
def test_encodings(tmp_path, name, encoding):
    text = "name,likes\nÉva,fish\n"
    data = text.encode(encoding)
    path = tmp_path / name
    path.write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    assert load_rows(path, encoding=encoding).row(0) == {"name": "Éva", "likes": "fish"}
    if encoding == "utf-8-sig":
        assert load_rows(path).columns == ("name", "likes")
        return
    with pytest.raises(InvalidInput, match=r"Pass its encoding|pass its encoding") as caught:
        load_rows(path)
    assert str(caught.value).startswith(f"{path}: ")
    if encoding == "cp1252":
        assert f"{path}: line 2: expected text in utf-8, got the byte 0xc9" in str(caught.value)
    if encoding == "utf-32":
        assert "utf-16. Pass" not in str(caught.value)
    if encoding == "utf-16":
        assert str(caught.value).endswith("got text in utf-16. Pass its encoding: --encoding utf-16")


def test_unknown_encodings(tmp_path):
    write(tmp_path / "a.csv", ROWS)
    with pytest.raises(InvalidInput, match=r"^encoding: the encoding 'utf8x' is not one of text files"):
        load_rows(tmp_path / "a.csv", encoding="utf8x")
