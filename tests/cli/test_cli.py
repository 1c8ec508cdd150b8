"""The program `hsa` as a whole, `hsa inspect` and `hsa info`."""

import gzip
import io
import json
import os
import re
import subprocess
import sys
from itertools import pairwise

import pytest

import hsa
from hsa.cli.main import run
from hsa.signals.batch import collate
from hsa.signals.readers import from_nested, read_text, train_tokenizer
from hsa.training.data.prepare import prepare
from hsa.training.options import DataOptions

TEXT = "Two cats sat. One slept!\n\nThen what? Nothing happened for a while."


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command in this process and return its exit code, stdout and stderr."""

    def run_it(*arguments, columns=80, stdin=""):
        monkeypatch.setenv("COLUMNS", str(columns))
        data = stdin if isinstance(stdin, bytes) else stdin.encode()
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as caught:
            run(list(arguments))
        return caught.value.code, *capsys.readouterr()

    return run_it


def as_json(result):
    code, out, err = result
    assert (code, err) == (0, "")
    return json.loads(out)


def test_inspect_runs_in_its_own_process():
    done = subprocess.run(
        [sys.executable, "-c", "from hsa.cli.main import run; run()", "inspect", "--rows", "3"],
        capture_output=True,
        encoding="utf-8",
        env={"COLUMNS": "80", "PYTHONIOENCODING": "utf-8"},
        check=True,
    )
    assert done.stderr == ""
    assert done.stdout.startswith("sample text\nSequence(12)")
    assert "times cheaper" in done.stdout


@pytest.mark.parametrize("arguments", [["--version"], ["--help"], ["train", "--help"], ["train", "--help-all"]])
def test_help_and_version_do_not_import_torch(arguments):
    code = f"""if True:
        import sys
        from hsa.cli.main import run
        try:
            run({arguments})
        finally:
            print({{"torch", "numpy", "sentencex", "tokenizers"}} & set(sys.modules))
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, encoding="utf-8", check=True)
    assert done.stderr == ""
    assert done.stdout.endswith("\nset()\n")


@pytest.mark.parametrize("arguments", [["inspect"], ["inspect", "--json"], ["--help"]])
def test_a_closed_pipe_is_not_an_error(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    code = "from hsa.cli.main import run; run()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, b"")


def test_json_facts_are_those_of_the_library(call, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    facts = as_json(call("inspect", str(path), "--json", "--width", "48", "--heads", "3"))
    tree = collate([read_text(TEXT)]).hierarchy
    n = tree.num_leaves
    assert (facts["source"], facts["leaves"], facts["families"], facts["depth"]) == (str(path), n, tree.num_families, 3)
    assert facts["modalities"] == {"text": n}
    cost = facts["attention"]
    assert (cost["width"], cost["heads"]) == (48, 3)
    assert cost["flat"] == hsa.flops_flat(n, width=48, heads=3)
    assert cost["tree"] == hsa.flops(tree, width=48, heads=3).attention
    windows = hsa.Hierarchy.regular([n], cost["windows_branching"])
    assert cost["windows"] == hsa.flops(windows, width=48, heads=3).attention
    assert cost["times_cheaper_tree"] == round(cost["flat"] / cost["tree"], 2)
    assert cost["times_cheaper_windows"] == round(cost["flat"] / cost["windows"], 2)


def test_levels_count_every_node_once(call):
    facts = as_json(call("inspect", "--json"))
    levels = facts["levels"]
    assert [level["nodes"] for level in levels[:2]] == [1, 12]
    assert levels[-1]["nodes"] == levels[-1]["leaves"] == facts["leaves"]
    assert sum(level["families"] for level in levels) == facts["families"]
    for above, below in pairwise(levels):
        assert above["smallest"] <= above["mean"] <= above["largest"]
        assert above["mean"] == round(below["nodes"] / above["families"], 2)
    assert 55 <= levels[2]["nodes"] <= 65  # sentences of the sample


def test_stdin_json_files_and_tokenizers(call, tmp_path):
    from_file, nested = tmp_path / "a.txt", tmp_path / "b.json"
    from_file.write_text(TEXT)
    facts = as_json(call("inspect", str(from_file), "--json"))
    piped = as_json(call("inspect", "-", "--json", stdin=TEXT))
    assert piped == {**facts, "source": "<stdin>"}
    assert as_json(call("inspect", "--json", "-", stdin=TEXT)) == piped

    content = {"title": "x", "none": None, "rows": [[1, 2], [3.5, "a"], []]}
    nested.write_text(json.dumps(content))
    facts = as_json(call("inspect", str(nested), "--json"))
    wanted = from_nested(content, drop_empty=True)
    assert facts["leaves"] == wanted.num_leaves == 5
    assert facts["depth"] == wanted.depth
    assert facts["modalities"] == {"text": 2, "number": 3}
    assert [level["kinds"] for level in facts["levels"]] == [["Table"], ["Sequence"], ["Sequence"], []]

    tokenizer = train_tokenizer([TEXT], 300)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    facts = as_json(call("inspect", str(from_file), "--tokenizer", str(tmp_path / "tokenizer.json"), "--json"))
    assert facts["leaves"] == read_text(TEXT, tokenizer).num_leaves


def test_formats(call, tmp_path):
    content = '{"title": "x", "rows": [[1, 2], [3.5]]}'
    path = tmp_path / "A.JSON"
    path.write_text(content)
    facts = as_json(call("inspect", str(path), "--json"))
    assert facts["modalities"] == {"text": 1, "number": 3}
    piped = call("inspect", "-", "--format", "json", "--json", stdin="\ufeff" + content)
    assert as_json(piped) == {**facts, "source": "<stdin>"}
    as_text = as_json(call("inspect", str(path), "--format", "text", "--json"))
    assert as_text["leaves"] == as_json(call("inspect", "-", "--json", stdin=content))["leaves"] > 4
    path.rename(tmp_path / "a.data")
    facts["source"] = str(tmp_path / "a.data")
    assert as_json(call("inspect", facts["source"], "--format", "json", "--json")) == facts


def test_languages_without_rules_are_named(call):
    code, out, err = call("inspect", "-", "--language", "klingon", stdin=TEXT)
    assert (code, err.count("\n")) == (0, 1)
    assert err.startswith("language: sentencex has no rules for 'klingon' and uses those of a related language")
    assert ", de, el, en, " in err
    assert call("inspect", "-", "--language", "de", stdin=TEXT) == (0, out, "")


@pytest.mark.parametrize("columns", [80, 120])
def test_output_fits_the_terminal(call, columns):
    code, out, err = call("inspect", columns=columns)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert max(map(len, lines)) <= columns
    assert any(len(line) > 70 for line in lines)
    for heading in ("sample text", "Levels · leaves: ", "Attention per layer · "):
        assert sum(line.startswith(heading) for line in lines) == 1
    # No table row is broken over two lines.
    for row in ("paragraphs", "sentences", "tokens", "every leaf sees every leaf", "this tree", "16 × 8 × 8 × 16"):
        assert sum(row in line for line in lines) == 1


def test_rows_cut_the_tree(call):
    _, out, _ = call("inspect", "--rows", "5")
    assert out.splitlines()[6:8] == ["…", ""]


def test_a_lone_value(call, tmp_path):
    path = tmp_path / "a.json"
    path.write_text("5")
    facts = as_json(call("inspect", str(path), "--json"))
    assert (facts["leaves"], facts["depth"], facts["attention"]["times_cheaper_tree"]) == (1, 0, None)
    code, out, _ = call("inspect", str(path))
    assert code == 0
    assert "Leaf(5, 'number')" in out


@pytest.mark.parametrize(
    ("content", "arguments", "where", "problem"),
    [
        (None, [], "{path}", "no such file"),
        (b"\xff", [], "{path}", "the byte 0xff at offset 0"),
        (b" ", [], "{path}", "expected at least one word"),
        (b"a\0b", [], "{path}", "binary data (it has NUL bytes)"),
        (b"Hi.", ["--rows", "0"], "rows", "expected a positive integer, got 0"),
        (b"Hi.", ["--rows=-2", "--json"], "rows", "expected a positive integer, got -2"),
        (b"Hi.", ["--width", "0"], "width", "expected a positive integer, got 0"),
        (b"Hi.", ["--heads=-3"], "heads", "expected a positive integer, got -3"),
        (b"Hi.", ["--tokenizer", "none.json"], "none.json", "no such file"),
    ],
)
def test_errors_are_one_line_without_traceback(call, tmp_path, content, arguments, where, problem):
    path = tmp_path / "a.txt"
    if content is not None:
        path.write_bytes(content)
    code, out, err = call("inspect", str(path), *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(where.format(path=path) + ": ")
    assert problem in err


def test_bad_json(call, tmp_path):
    path = tmp_path / "a.json"
    for content, message in (
        ('{"a":\n oops}', f"{path}: line 2, column 2: invalid JSON (Expecting value); expected JSON\n"),
        ("[[], null]", "a.json: no values, only empty containers; expected at least one value\n"),
        ("[" * 100_000, f"{path}: expected at most 200 levels, got JSON nested too deeply to read. Flatten it\n"),
    ):
        path.write_text(content)
        assert call("inspect", str(path)) == (2, "", message)
    message = "format: expected a file, or - for stdin, got json without a file\n"
    assert call("inspect", "--format", "json") == (2, "", message)


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1.5E+400", "9" * 400])
def test_numbers_that_are_not_finite(call, number):
    content = f'{{"NaN": ["1e999 \\" NaN", 1e-999, -2.5],\n "b": {number}, "c": NaN}}'
    shown = number if len(number) < 20 else f"a number of {len(number):,} characters"
    message = f"<stdin>: line 2, column 7: expected a finite number, got {shown}\n"
    assert call("inspect", "-", "--format", "json", stdin=content) == (2, "", message)


def test_bad_stdin(call):
    for data, where, got in (
        (b"a\nb\xff", "<stdin>: line 2", "the byte 0xff at offset 3"),
        (b"\x89PNG\0", "<stdin>", "binary data (it has NUL bytes)"),
    ):
        code, out, err = call("inspect", "-", stdin=data)
        assert (code, out) == (2, "")
        wanted = f"{where}: expected text in utf-8, got {re.escape(got)}. .*pass its encoding, such as --encoding .*\n"
        assert re.fullmatch(wanted, err, re.IGNORECASE)


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (
            ["inspect", "--widt", "3"],
            "unknown option --widt; did you mean --width? hsa inspect --help-all lists the options",
        ),
        (["inspect", "--xyz"], "unknown option --xyz; hsa inspect --help-all lists the options"),
        (
            ["train", "--epoch", "3"],
            "unknown option --epoch; did you mean --epochs? hsa train --help lists the options",
        ),
        (["train", "--modulis", "3"], "did you mean --modulus? hsa train --help-all lists the options"),
        (["train", "--xyz"], "unknown option --xyz; hsa train --help-all lists the options"),
        (["inspct"], "unknown command 'inspct'; did you mean inspect? hsa --help lists the commands"),
        (["inspect", "--rows", "x"], "into int. hsa inspect --help shows the usage"),
        (["inspect", "--format", "xml"], 'Choose from: "text", "json", "csv", "tsv", "jsonl".'),
        (["convert", "model"], "DATA: no value given; hsa convert --help shows the usage"),
        (["train", "--models"], "--models: no value given; hsa train --help shows the usage"),
        (["train", "a.csv", "--text", "--label", "b"], "--text: no value given; hsa train --help shows the usage"),
        (["info", "more"], "unexpected argument 'more'; hsa info --help shows the usage"),
    ],
)
def test_usage_errors_are_one_line_and_exit_with_2(call, arguments, hint):
    code, out, err = call(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert hint in err


@pytest.mark.parametrize("package", ["cyclopts", "rich"])
def test_missing_packages_say_what_to_install(call, monkeypatch, package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    code, _, err = call("inspect")
    assert code == 2
    assert err.count("\n") == 1
    assert "install it with: pip install 'hsa[all]'" in err
    assert package in err


def test_info(call, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    code, out, err = call("info")
    assert (code, err) == (0, "")
    rows = {line.split()[0]: line for line in out.splitlines() if line.startswith("  ")}
    assert rows["hsa"].split()[1] == call("--version")[1].strip()
    assert "sentencex" in rows["text"]
    for operator in ("hierarchical_attention", "multiscale_attention", "clustered_attention", "energy"):
        assert "torch (cpu" in rows[operator]
        assert "reference (cpu" in rows[operator]
    for operator in ("hierarchical_attention", "multiscale_attention"):
        if "triton (cuda" not in rows[operator]:
            assert "triton (unavailable)" in rows[operator]
            assert rows["unavailable"].split()[1] == "triton:"  # and why, once
    values = [line.split(maxsplit=1)[1] for line in out.splitlines() if line.startswith("  ")]
    phrases = [phrase for value in values for phrase in value.split(": ")[1:]]
    assert len(set(phrases)) == len(phrases)


ROWS = [{"title": "Two cats. They sat.", "stars": "3.5"}, {"title": "A dog", "stars": ""}]


def write_table(path):
    lines = {".csv": ",", ".tsv": "\t"}
    suffix = path.name.removesuffix(".gz").removeprefix("a")
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
        return path
    if suffix in lines:
        content = "\n".join(lines[suffix].join(row) for row in [ROWS[0].keys(), *(row.values() for row in ROWS)])
    else:
        content = json.dumps(ROWS) if suffix == ".json" else "\n".join(map(json.dumps, ROWS))
    path.write_bytes(gzip.compress(content.encode()) if path.suffix == ".gz" else content.encode())
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".ndjson", ".parquet", ".csv.gz", ".json.gz", ".json"])
def test_tables_are_inspected_row_by_row(call, tmp_path, suffix):
    path = write_table(tmp_path / f"a{suffix}")
    first = as_json(call("inspect", str(path), "--json", *(["--row", "1"] if suffix == ".json" else [])))
    assert first["source"].startswith(f"{path}: row 1")
    assert first["source"].endswith(" of 2")
    titles = train_tokenizer([row["title"] for row in ROWS], 8192)
    assert first["modalities"] == {"text": read_text(ROWS[0]["title"], titles).num_leaves, "number": 1}
    assert [level["kinds"] for level in first["levels"]] == [["Table"], ["Sequence"], ["Sequence"], ["Sequence"], []]
    second = as_json(call("inspect", str(path), "--json", "--row", "2"))
    assert second["modalities"] == {"text": read_text("A dog", titles).num_leaves}
    only = as_json(call("inspect", str(path), "--json", "--text", "title", "stars"))
    both = train_tokenizer([value for row in ROWS for value in row.values()], 8192)
    assert only["leaves"] == sum(read_text(value, both).num_leaves for value in ROWS[0].values())
    code, out, err = call("inspect", str(path), "--row", "2", "--number", "stars")
    assert (code, out) == (2, "")
    assert "column 'stars': expected a finite number, got an empty cell" in err


def test_a_row_is_the_tree_that_training_sees(call, tmp_path, monkeypatch):
    """Check tokens, cuts and windows against the data sets of a training with default options."""
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    texts = [" ".join([f"word{i} other"] * (30 * i + 1)) + ". The end." for i in range(20)]
    path = tmp_path / "a.csv"
    path.write_text("text,stars,label\n" + "".join(f"{text},{i},{i % 2}\n" for i, text in enumerate(texts)))
    columns = ("--text", "text", "--number", "stars")
    prepared = prepare(path, DataOptions(text=("text",), number=("stars",), label="label"))
    checked = 0
    for part in (prepared.train, prepared.validation, prepared.test):
        for i, name in enumerate(part.names):
            row = int(re.search(r"row (\d+)", name)[1])
            facts = as_json(call("inspect", str(path), *columns, "--row", str(row), "--json"))
            tree = part.select([i]).batch.hierarchy
            assert (facts["leaves"], facts["families"], facts["depth"]) == (
                tree.num_leaves,
                tree.num_families,
                tree.depth,
            )
            assert max(level["largest"] or 0 for level in facts["levels"]) <= 128
            checked += facts["leaves"] == 512
    assert checked > 5  # long rows are cut
    facts = as_json(
        call("inspect", str(path), *columns, "--row", "20", "--json", "--max-tokens", "9", "--max-family", "3")
    )
    assert (facts["leaves"], max(level["largest"] or 0 for level in facts["levels"])) == (9, 3)
    facts = as_json(call("inspect", str(path), *columns, "--row", "20", "--json", "--max-tokens", "0"))
    assert facts["leaves"] > 512
    out = call("inspect", str(path), *columns, "--row", "1")[1]
    assert "'word'" in out or "'word0'" in out  # texts of tokens, not their ids


def test_limits_apply_to_other_files_when_asked(call, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(TEXT)
    assert as_json(call("inspect", str(path), "--json", "--max-tokens", "5"))["leaves"] == 5
    code, _, err = call("inspect", str(path), "--skip-bad")
    assert (code, err) == (2, "skip_bad: expected a table, got a file that is no table. Leave it out\n")


def test_rows_that_cannot_be_read_are_skipped_when_asked(call, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("title,stars\na,1\nb,\nc,x\nd,4\ne,\n")
    arguments = ("inspect", str(path), "--number", "stars", "--row", "2")
    code, out, err = call(*arguments)
    assert (code, out) == (2, "")
    assert err.rstrip().endswith("or pass --skip-bad to leave out what cannot be read")
    code, out, err = call(*arguments, "--skip-bad", "--json")
    assert (code, json.loads(out)["source"]) == (0, f"{path}: row 4 (line 5) of 5")
    assert err.startswith(f"2 skipped, the first: {path}: row 2 (line 3), column 'stars'")
    code, _, err = call(*arguments[:-1], "5", "--skip-bad")
    assert (code, "no row from row 5 on can be read" in err) == (2, True)


def test_delimiters_and_encodings_of_inspected_files(call, tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("title;stars\nÉtat;3,5\n", encoding="utf-16")
    code, _, err = call("inspect", str(path))
    assert (code, err) == (
        2,
        f"{path}: expected text in utf-8, got text in utf-16. Pass its encoding: --encoding utf-16\n",
    )
    assert as_json(call("inspect", str(path), "--encoding", "utf-16", "--json"))["modalities"]["text"] > 1
    piped = call("inspect", "-", "--format", "csv", "--delimiter", "|", "--json", stdin="a|b\n1|2\n")
    assert as_json(piped)["modalities"] == {"number": 2}
    text = tmp_path / "a.txt"
    text.write_text("État.", encoding="cp1252")
    assert as_json(call("inspect", str(text), "--encoding", "cp1252", "--json"))["leaves"] == 2
    assert "delimiter: expected no value" in call("inspect", str(text), "--delimiter", ";")[2]
    (tmp_path / "a.html").write_text("<p>a")
    assert "encoding: expected no value" in call("inspect", str(tmp_path / "a.html"), "--encoding", "cp1252")[2]


def test_tables_from_stdin_and_as_text(call, tmp_path):
    path = write_table(tmp_path / "a.csv")
    facts = as_json(call("inspect", str(path), "--json"))
    piped = as_json(call("inspect", "-", "--format", "csv", "--json", stdin=path.read_text()))
    assert piped == {**facts, "source": facts["source"].replace(str(path), "<stdin>")}
    assert as_json(call("inspect", str(path), "--format", "text", "--json"))["depth"] == 3
    path.rename(tmp_path / "a.data")
    assert as_json(call("inspect", str(tmp_path / "a.data"), "--format", "csv", "--json"))["leaves"] == facts["leaves"]


def test_columns_with_images_and_columns_that_cannot_be_read(call, tmp_path):
    from PIL import Image

    Image.new("RGB", (64, 48)).save(tmp_path / "cat.png")
    path = tmp_path / "a.jsonl"
    path.write_text('{"photo": "cat.png", "other": "dog.png", "tags": ["a"], "ok": true, "none": null}')
    code, out, err = call("inspect", str(path), "--json")
    assert code == 0
    assert json.loads(out)["modalities"] == {"text": 3, "number": 1, "patch": 12}
    assert err == f"{path}: row 1 (line 1): left out, because only text, numbers and images are read: 'tags' (list)\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.csv", "--row", "0"], "row: expected 1 to 2, the rows of a.csv, got 0"),
        (["a.csv", "--row", "3"], "row: expected 1 to 2, the rows of a.csv, got 3"),
        (
            ["a.csv", "--text", "titel"],
            "a.csv: no column 'titel'; expected one of 'title', 'stars'. Did you mean 'title'?",
        ),
        (["a.txt", "--row", "1"], "a.txt: expected one of .csv, .tsv, "),
        (["--row", "1"], "row: no table is given; expected a file, or - for stdin with --format csv, tsv or jsonl"),
        (["-", "--text", "x"], "columns: no table is given; expected a file, or - for stdin with --format csv"),
        (["--format", "csv"], "format: no table is given; expected a file"),
        (["-", "--format", "csv"], "<stdin>: expected rows, got an empty file"),
    ],
)
def test_bad_tables(call, tmp_path, monkeypatch, arguments, message):
    write_table(tmp_path / "a.csv")
    monkeypatch.chdir(tmp_path)
    code, out, err = call("inspect", *arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(message)
