import json
import os
import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from hsa.checksums import SUMS
from hsa.errors import InvalidInput
from hsa.files import cache_folder
from hsa.models.options import ModelOptions
from hsa.signals import Grid, Sequence, Table
from hsa.training.accelerator import make_accelerator
from hsa.training.data import prepare as preparing
from hsa.training.data.data_set import DataSet
from hsa.training.data.prepare import load_input_spec, open_source, prepare, save_input_spec
from hsa.training.data.sources import Columns, Rows, StandardLibrary
from hsa.training.experiment import train_models
from hsa.training.options import DataOptions, TrainingOptions
from tests.tables import WORDS, mixed_folder, picture, reviews, write_rows

TEXT = DataOptions(text=("text",), label="label", vocabulary=300)
TINY = ModelOptions(width=8, heads=2, position_width=8)
ONCE = TrainingOptions(epochs=1, batch_size=8)


@pytest.fixture(autouse=True)
def _one_thread_and_a_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "cache"))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def same(a: DataSet, b: DataSet) -> bool:
    return (a.digest, a.names, a.classes) == (b.digest, b.names, b.classes) and a.batch.domains == b.batch.domains


def train(prepared, folder, models=("hierarchical", "deepsets"), **options):
    accelerator = make_accelerator(ONCE, cpu=True)
    return train_models(models, TINY, prepared, replace(ONCE, **options), folder, accelerator)


# Rows


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".json", ".jsonl", ".parquet"])
def test_rows_of_every_format_are_the_same_data(tmp_path, suffix):
    rows = reviews()
    wanted = prepare(write_rows(tmp_path / "wanted.csv", rows), TEXT)
    actual = prepare(write_rows(tmp_path / f"reviews{suffix}", rows), TEXT)
    for name in ("train", "validation", "test"):
        assert getattr(actual, name).digest == getattr(wanted, name).digest
    assert (len(actual.train), len(actual.validation), len(actual.test)) == (32, 4, 4)
    assert actual.train.classes == ("neg", "pos")
    assert (actual.kinds, actual.keys, actual.name) == (("sequence",), (), f"reviews{suffix}")
    assert actual.modalities["text"].tokens == actual.input_spec.tokenizer.get_vocab_size() <= 300
    names = [name for part in (actual.train, actual.validation, actual.test) for name in part.names]
    assert len(set(names)) == 40
    for part in (actual.validation, actual.test):
        assert sorted(part.targets.tolist()) == [0, 0, 1, 1]


def test_the_tree_follows_the_text(tmp_path):
    rows = [{"text": "We saw it. It was good.\n\nAnd then?", "label": label} for label in "ab" * 10]
    actual = prepare(write_rows(tmp_path / "a.jsonl", rows), TEXT)
    assert actual.train.batch.domains[:16] == (Sequence(2),) * 16
    assert actual.train.batch.hierarchy.depth == 3


def test_rows_of_texts_images_and_numbers_become_tables(tmp_path):
    rows = reviews()
    for i, row in enumerate(rows):
        row["picture"] = f"pictures/{i}.png"
        picture(tmp_path / row["picture"], 60 if row["label"] == "pos" else 200)
    rows[3]["title"] = ""  # a missing value
    path = write_rows(tmp_path / "reviews.csv", rows)
    options = replace(TEXT, text=("title", "text"), image=("picture",), number=("stars",))
    actual = prepare(path, options)
    assert set(actual.kinds) == {"table", "sequence", "grid"}
    assert set(actual.keys) == {"title", "text", "picture", "stars"}
    assert set(actual.train.batch.distinct_domains) >= {Table(("title", "text", "stars", "picture")), Grid((2, 1))}
    assert actual.modalities["patch"].numbers == 16 * 16 * 3
    assert actual.modalities["number"].numbers == 1
    stars = actual.train.batch.values["number"]
    assert actual.modalities["number"].center == pytest.approx(float(stars.mean()))
    results = train(actual, tmp_path / "out")
    assert [result.model for result in results] == ["hierarchical", "deepsets"]
    assert all(np.isfinite(result.history[0].loss) for result in results)


def test_images_may_be_bytes_and_may_be_missing(tmp_path):
    data = picture(tmp_path / "a.png", 70).read_bytes()
    rows = [{"text": "good", "picture": {"bytes": data, "path": None}, "label": "ab"[i % 2]} for i in range(20)]
    rows[2]["picture"] = None
    actual = prepare(write_rows(tmp_path / "a.parquet", rows), replace(TEXT, image=("picture",)))
    assert sorted(
        {*actual.train.lengths.tolist(), *actual.test.lengths.tolist(), *actual.validation.lengths.tolist()}
    ) == [
        1,
        3,
    ]


def test_regression(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews())
    actual = prepare(path, replace(TEXT, label="stars", task="regression"))
    assert (actual.task, actual.train.classes, actual.train.targets.dtype) == ("regression", (), torch.float32)
    (result,) = train(actual, tmp_path / "out", models=("hierarchical",))
    assert result.scores.r2 is not None
    assert result.confusion == ()


def test_numbers_as_class_names(tmp_path):
    rows = [{"text": "good", "label": [1, 2.0, 2][i % 3]} for i in range(30)]
    assert prepare(write_rows(tmp_path / "a.jsonl", rows), TEXT).train.classes == ("1", "2")


def test_separate_data_for_validation_and_test(tmp_path):
    paths = {}
    for seed, (name, count) in enumerate({"train": 20, "validation": 7, "test": 9}.items()):
        paths[name] = write_rows(tmp_path / f"{name}.csv", reviews(count, seed))
    whole = prepare(paths["train"], replace(TEXT, validation=paths["validation"], test=paths["test"]))
    assert (len(whole.train), len(whole.validation), len(whole.test)) == (20, 7, 9)
    assert {name.partition(":")[0] for name in whole.test.names} == {str(paths["test"])}
    half = prepare(paths["train"], replace(TEXT, test=paths["test"]))
    assert (len(half.train), len(half.validation), len(half.test)) == (18, 2, 9)


def test_long_texts_are_cut_and_large_families_windowed(tmp_path):
    rows = [{"text": " ".join(WORDS["pos"] * 30), "label": "ab"[i % 2]} for i in range(20)]
    path = write_rows(tmp_path / "a.csv", rows)
    assert (prepare(path, replace(TEXT, max_tokens=50)).train.lengths == 50).all()
    windows = prepare(path, replace(TEXT, max_tokens=0, max_family=8)).train.batch.hierarchy.structure
    assert windows.num_children.max() <= 8


# Folders


def test_folders_with_files_of_several_kinds(tmp_path):
    actual = prepare(mixed_folder(tmp_path / "data"), DataOptions(vocabulary=300))
    assert len(actual.train) + len(actual.validation) + len(actual.test) == 40
    assert actual.train.classes == ("neg", "pos")
    assert set(actual.modalities) == {"text", "patch"}
    assert not any("xyz" in name for name in (*actual.train.names, *actual.test.names))
    results = train(actual, tmp_path / "out")
    assert all(np.isfinite(result.history[0].loss) for result in results)


def test_broken_html_is_read(tmp_path):
    folder = mixed_folder(tmp_path / "data")
    broken = folder / "pos" / "broken.html"
    broken.write_text("<html><body><div><p>The film <b>was <i>good</b></p></td><table><tr>ugly<td>we<scr")
    actual = prepare(folder, DataOptions(vocabulary=300))
    names = [*actual.train.names, *actual.validation.names, *actual.test.names]
    assert str(broken) in names


@pytest.mark.parametrize(
    "make", [lambda f: None, lambda f: (f / "a.txt").write_text("hi"), lambda f: (f / "inner").mkdir()]
)
def test_a_folder_without_class_folders(tmp_path, make):
    folder = tmp_path / "data"
    folder.mkdir()
    make(folder)
    message = rf"{folder}: no files in subfolders; expected {folder}/CLASS/FILE, where FILE ends in one of \.bmp, "
    with pytest.raises(InvalidInput, match=message):
        prepare(folder, DataOptions())


def test_a_folder_with_one_class(tmp_path):
    (tmp_path / "data" / "pos").mkdir(parents=True)
    for i in range(20):
        (tmp_path / "data" / "pos" / f"{i}.txt").write_text("good")
    message = r"classes: expected two or more, got one class in the training data, 'pos'\. Put the files of each class"
    with pytest.raises(InvalidInput, match=message):
        prepare(tmp_path / "data", DataOptions(vocabulary=300))


# The standard library


def test_the_standard_library_needs_no_data():
    actual = prepare(None, DataOptions(vocabulary=512, max_tokens=64), small=True)
    again = StandardLibrary(most=60, packages=6).definitions
    names = [*actual.train.names, *actual.validation.names, *actual.test.names]
    assert sorted(names) == sorted(name for _, name, _ in again)
    assert len(actual.train.classes) >= 2
    assert len(actual.train) > 100
    assert (np.bincount(actual.train.targets) > 0).all()
    assert (actual.train.lengths.max(), actual.name, actual.input_spec.kind) == (
        64,
        "Python standard library",
        "python",
    )


# The cache


def spoil(monkeypatch):
    """Make reading the data again an error."""

    def fail(*arguments):
        raise AssertionError("the data were read again")

    monkeypatch.setattr(preparing, "build", fail)


def test_cached_data_are_the_same(tmp_path, monkeypatch):
    path = write_rows(tmp_path / "a.csv", reviews())
    first = prepare(path, TEXT)
    assert {p.name for p in cache_folder().glob("*/*")} == {
        SUMS,
        *(f"{n}.safetensors" for n in ("train", "validation", "test")),
    }
    spoil(monkeypatch)
    second = prepare(path, TEXT)
    for name in ("train", "validation", "test"):
        assert same(getattr(first, name), getattr(second, name))
    assert first.modalities == second.modalities
    assert (first.kinds, first.keys) == (second.kinds, second.keys)
    assert first.input_spec.tokenizer.to_str() == second.input_spec.tokenizer.to_str()


def test_damaged_cached_data_are_read_again(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews())
    first = prepare(path, TEXT)
    for file in sorted(cache_folder().glob("*/*")):
        whole = file.read_bytes()
        for place in (len(whole) // 2, len(whole) - 1):
            damaged = bytearray(whole)
            damaged[place] ^= 16
            file.write_bytes(damaged)
            assert same(prepare(path, TEXT).train, first.train)
            assert file.read_bytes() == whole  # written again


def test_temporary_files_of_a_killed_run_leave_the_cache(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews())
    prepare(path, TEXT)
    (folder,) = cache_folder().iterdir()
    (folder / "train.safetensors").unlink()
    (folder / ".files.7.part").mkdir()
    prepare(path, TEXT)
    assert not list(folder.glob(".*"))


def change_the_file(path, options, seed):
    write_rows(path, reviews(seed=9))
    return options, seed


def change_an_image(path, options, seed):
    picture(path.parent / "0.png", 99)
    return options, seed


@pytest.mark.parametrize(
    "change",
    [
        change_the_file,
        change_an_image,
        lambda path, options, seed: (options, 1),
        lambda path, options, seed: (replace(options, max_tokens=3), seed),
        lambda path, options, seed: (replace(options, text=("text", "title")), seed),
        lambda path, options, seed: (replace(options, label="title"), seed),
    ],
)
def test_changed_data_are_not_read_from_the_cache(tmp_path, monkeypatch, change):
    rows = [{**row, "picture": "0.png"} for row in reviews()]
    picture(tmp_path / "0.png", 60)
    path = write_rows(tmp_path / "a.csv", rows)
    options = replace(TEXT, image=("picture",))
    prepare(path, options)
    os.utime(path, ns=(1, 1))
    prepare(path, options)
    spoil(monkeypatch)
    prepare(path, options)
    options, seed = change(path, options, 0)
    with pytest.raises((AssertionError, InvalidInput), match=r"read again|column 'picture'"):
        prepare(path, options, seed=seed)


def test_a_damaged_cache_is_replaced(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews())
    first = prepare(path, TEXT)
    (damaged,) = cache_folder().glob("*/test.safetensors")
    damaged.write_bytes(b"nonsense")
    assert same(prepare(path, TEXT).test, first.test)
    assert same(DataSet.load(damaged), first.test)


def test_cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HSA_CACHE", str(tmp_path / "here"))
    assert cache_folder() == tmp_path / "here"
    monkeypatch.delenv("HSA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "there"))
    assert cache_folder() == tmp_path / "there" / "hsa"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "hsa"


# Word vectors and input specs


def test_word_vectors(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews())
    words = ("good", "bad", "film", "saw")
    vectors = tmp_path / "vectors.txt"
    vectors.write_text("".join(f"{word} {i} {-i} 1.5\n" for i, word in enumerate(words)))
    options = replace(TEXT, word_vectors=vectors)
    actual = prepare(path, options)
    assert (actual.modalities["text"].width, actual.modalities["text"].frozen) == (3, True)
    assert actual.modalities["text"].tokens == actual.input_spec.tokenizer.get_vocab_size() == len(actual.vectors)
    (result,) = train(actual, tmp_path / "out", models=("hierarchical",))
    assert np.isfinite(result.history[0].loss)
    vectors.write_text("".join(f"{word} {i} {-i} 1.5\n" for i, word in enumerate(words[::-1])))
    other = prepare(path, options)  # other ids for the same words: not from the cache
    ids = {actual.input_spec.tokenizer.token_to_id("good"), other.input_spec.tokenizer.token_to_id("good")}
    assert len(ids) == 2
    assert other.train.digest != actual.train.digest


def test_save_and_load_an_input_spec(tmp_path):
    actual = prepare(write_rows(tmp_path / "a.csv", reviews()), replace(TEXT, number=("stars",))).input_spec
    save_input_spec(tmp_path / "model", actual)
    loaded = load_input_spec(tmp_path / "model")
    assert loaded.tokenizer.to_str() == actual.tokenizer.to_str()
    assert replace(loaded, tokenizer=None).__dict__ == replace(actual, tokenizer=None).__dict__


@pytest.mark.parametrize("content", ["{}", "[]", '{"kind": "rows"}', '{"kind": 1, "columns": 2}'])
def test_invalid_input_specs(tmp_path, content):
    (tmp_path / "input_spec.json").write_text(content)
    with pytest.raises(InvalidInput, match=r"input_spec\.json: (no field '|expected the fields)"):
        load_input_spec(tmp_path)


# Bad input


def bad(tmp_path, change=lambda rows: None, suffix=".jsonl", **options):
    """Return the error message about bad rows, without the path."""
    rows = reviews(20)
    change(rows)
    path = write_rows(tmp_path / f"a{suffix}", rows)
    with pytest.raises(InvalidInput) as caught:
        prepare(path, replace(TEXT, **options))
    message = str(caught.value)
    assert "\n" not in message
    return message.replace(f"{path}", "FILE").replace(f"{tmp_path}/", "")


SKIP = "ass --skip-bad to leave out what cannot be read"


COLUMNS = "'text', 'title', 'stars', 'label'"
ROW = "FILE: row 5 (line 5)"
LABEL = f"{ROW}, column 'label'"
SAME_WAY = f"Write all labels of the column in the same way, or p{SKIP}"
STARS = {"label": "stars", "task": "regression"}


@pytest.mark.parametrize("options", [{"text": ("txt",)}, {"label": "lable"}])
def test_unknown_columns(tmp_path, options):
    message = bad(tmp_path, **options)
    assert message.startswith("FILE: ")
    (name,) = (value if isinstance(value, str) else value[0] for value in options.values())
    close = {"txt": "text", "lable": "label"}[name]
    assert COLUMNS in message
    assert repr(name) in message
    assert message.endswith(f"id you mean {close!r}?")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"text": ()},
            f"no columns to read are given; expected one or more of {COLUMNS}. "
            "Name them with --text, --number or --image",
        ),
        ({"label": None}, f"no column to predict is given; expected one of {COLUMNS}. Name it with --label"),
    ],
)
def test_missing_columns(tmp_path, options, message):
    assert bad(tmp_path, **options) == f"FILE: {message}"


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        ({"label": None}, {}, f"{LABEL}: empty; expected a label. P{SKIP}"),
        ({"label": ""}, {}, f"{LABEL}: empty; expected a label. P{SKIP}"),
        ({"label": 1}, {}, f"{LABEL}: expected text, as in row 1, got 1 (a number). {SAME_WAY}"),
        ({"label": True}, {}, f"{LABEL}: expected text, as in row 1, got True (true or false). {SAME_WAY}"),
        ({"label": []}, {}, f"{LABEL}: expected a name or a number, got a label of type list. P{SKIP}"),
        ({"stars": "many"}, STARS, f"{ROW}, column 'stars': expected a finite number, got 'many'. P{SKIP}"),
        ({"stars": 10**400}, STARS, f"{ROW}, column 'stars': expected a finite number, got 1{'0' * 58}…. P{SKIP}"),
        (
            {"stars": 1e39},
            STARS,
            f"{ROW}, column 'stars': expected a finite number, got 1e+39. "
            f"Scale it: models compute in float32, up to 3.4e38, or p{SKIP}",
        ),
        ({"stars": "inf"}, STARS, f"{ROW}, column 'stars': expected a finite number, got 'inf'. P{SKIP}"),
    ],
)
def test_bad_labels(tmp_path, values, options, message):
    assert bad(tmp_path, lambda rows: rows[4].update(values), **options) == message


@pytest.mark.parametrize(
    ("values", "options", "where"),
    [
        ({"text": " "}, {}, ROW),
        ({"text": None}, {}, ROW),
        ({"text": ["a"]}, {}, f"{ROW}, column 'text'"),
        ({"stars": "x"}, {"number": ("stars",)}, f"{ROW}, column 'stars'"),
        ({"stars": ""}, {"number": ("stars",)}, f"{ROW}, column 'stars'"),
        ({"stars": None}, {"number": ("stars",)}, f"{ROW}, column 'stars'"),
        ({"stars": "nan"}, {"number": ("stars",)}, f"{ROW}, column 'stars'"),
    ],
)
def test_bad_values_are_reported_with_their_row(tmp_path, values, options, where):
    message = bad(tmp_path, lambda rows: rows[4].update(values), **options)
    assert message.startswith(f"{where}: ")
    assert message.endswith(SKIP)


def test_labels_that_do_not_fit(tmp_path):
    assert bad(tmp_path, task="regression").startswith(
        "FILE: row 1 (line 1), column 'label': expected a finite number, got 'pos'"
    )
    one_class = "expected two or more, got one class in the training data, 'pos'. Is --label the right column?"
    assert bad(tmp_path, lambda rows: [row.update(label="pos") for row in rows]) == f"column 'label': {one_class}"
    both = "FILE: column 'text': both read and predicted; expected one or the other. Choose another --label"
    assert bad(tmp_path, label="text").startswith(both)
    rows = [{"text": "good", "label": i / 7} for i in range(40)]
    with pytest.raises(
        InvalidInput,
        match=r"column 'label': expected several examples of each class, got 40 classes .* pass --task regression",
    ):
        prepare(write_rows(tmp_path / "b.jsonl", rows), TEXT)


def test_a_column_read_twice(tmp_path):
    message = bad(tmp_path, number=("text",))
    assert message.startswith("FILE: row 1 (line 1): ")
    assert "'text' twice" in message
    assert message.endswith(SKIP)


def test_mixed_labels_name_the_row_whichever_comes_first(tmp_path):
    rows = [{"text": "good", "label": label} for label in (1, 2, "pos", 1)]
    with pytest.raises(
        InvalidInput,
        match=r"row 3 \(line 3\), column 'label': expected a number, as in row 1, got 'pos' \(text\)",
    ):
        prepare(write_rows(tmp_path / "a.jsonl", rows), TEXT)


@pytest.mark.parametrize("content", [b"nonsense", b"", b"\x89PNG\r\n\x1a\n" + b"\0" * 50])
def test_damaged_images_are_reported_with_their_row(tmp_path, content):
    (tmp_path / "bad.png").write_bytes(content)
    picture(tmp_path / "good.png", 70)

    def change(rows):
        for i, row in enumerate(rows):
            row["picture"] = "bad.png" if i == 6 else "good.png"

    message = bad(tmp_path, change, image=("picture",))
    assert message.startswith("FILE: row 7 (line 7), column 'picture' (bad.png): ")
    assert message.endswith(SKIP)


def test_missing_images_are_reported_with_their_row(tmp_path):
    message = bad(tmp_path, lambda rows: [row.update(picture="a/b.png") for row in rows], image=("picture",))
    assert message.startswith("FILE: row 1 (line 1), column 'picture' (a/b.png): ")
    assert "no such file" in message


@pytest.mark.parametrize("name", ["../secret.png", "/dev/zero", "link.png", "x" * 5000, "a\0b"])
def test_images_outside_the_folder_are_reported_with_their_row(tmp_path, name):
    data = tmp_path / "data"
    data.mkdir()
    picture(tmp_path / "secret.png", 70)
    (data / "link.png").symlink_to(tmp_path / "secret.png")
    message = bad(data, lambda rows: rows[4].update(picture=name), image=("picture",))
    assert message.startswith(f"FILE: row 5 (line 5), column 'picture' ({name}): no such file in the folder")
    assert message.endswith(SKIP)


def test_rows_without_a_number_are_skipped_on_request(tmp_path):
    rows = reviews()
    for i, value in ((3, ""), (7, None), (9, "NaN")):
        rows[i]["stars"] = value
    path = write_rows(tmp_path / "a.jsonl", rows)
    prepared = prepare(path, replace(TEXT, number=("stars",), skip_bad=True))
    assert [re.search(r"row (\d+) .*column 'stars'", line)[1] for line in prepared.skipped] == ["4", "8", "10"]


def test_large_numbers_do_not_overflow(tmp_path):
    rows = [row | {"stars": 3e38 * (-1) ** i} for i, row in enumerate(reviews())]
    prepared = prepare(write_rows(tmp_path / "a.jsonl", rows), replace(TEXT, number=("stars",)))
    modality = prepared.modalities["number"]
    assert np.isfinite([modality.center, modality.scale]).all()


@pytest.mark.parametrize("encoding", ["rot13", "hex", "undefined", "nonsense"])
def test_a_file_in_no_encoding_of_text_is_skipped_on_request(tmp_path, encoding):
    mixed_folder(tmp_path)
    folder = next(path for path in sorted(tmp_path.iterdir()) if path.is_dir())
    (folder / "bad.py").write_text(f"# coding: {encoding}\nx = 1\n")
    with pytest.raises(InvalidInput, match=r"bad.py: .*encoding"):
        prepare(tmp_path, DataOptions())
    (message,) = prepare(tmp_path, DataOptions(skip_bad=True)).skipped
    assert "bad.py: " in message


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "", "empty"),
        ("a.jsonl", "\n\n", "empty"),
        ("a.csv", "text,label\n", "no rows"),
        ("a.json", "[]", "no rows"),
        ("a.parquet", "oops", "damaged"),
        ("a.xlsx", "oops", r"^expected one of \.csv, \.tsv, \.json.* or a folder per class, got a \.xlsx file$"),
        ("a", "oops", r"^expected one of \.csv.*, got a file without a suffix$"),
        ("a.csv", None, "^no such file or folder; expected a file of rows, or a folder per class$"),
    ],
)
def test_files_that_are_not_data(tmp_path, name, content, message):
    path = tmp_path / name
    if content is not None:
        path.write_text(content)
    with pytest.raises(InvalidInput) as caught:
        prepare(path, TEXT)
    where, _, rest = str(caught.value).partition(": ")
    assert where == str(path)
    assert re.search(message, rest)


def test_too_few_rows_to_split(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews(3))
    with pytest.raises(InvalidInput, match=r"data: no examples for validation; .* separate file with --validation"):
        prepare(path, TEXT)


def test_other_classes_in_the_test_data(tmp_path):
    path = write_rows(tmp_path / "a.csv", reviews())
    other = write_rows(tmp_path / "b.csv", [*reviews(3), {**reviews(1)[0], "label": "odd"}])
    message = r"b\.csv: row 4 \(line 5\): expected one of neg, pos, got the class 'odd'"
    with pytest.raises(InvalidInput, match=message):
        prepare(path, replace(TEXT, test=other))


def test_other_modalities_in_the_test_data(tmp_path):
    for label in WORDS:
        for i in range(6):
            (tmp_path / "a" / label).mkdir(parents=True, exist_ok=True)
            (tmp_path / "a" / label / f"{i}.txt").write_text(WORDS[label][i % 3])
        picture(tmp_path / "b" / label / "0.png", 70)
    message = r"data for test: expected the modalities of the training data \(text\), got patch"
    with pytest.raises(InvalidInput, match=message):
        prepare(tmp_path / "a", DataOptions(vocabulary=300, test=tmp_path / "b"))


def test_regression_needs_rows(tmp_path):
    with pytest.raises(InvalidInput, match=r"task: regression needs numbers to predict; expected a file of rows"):
        prepare(mixed_folder(tmp_path / "data"), DataOptions(task="regression"))


def test_bad_rows_can_be_skipped(tmp_path):
    rows = reviews(40)
    rows[3]["text"], rows[8]["label"], rows[11]["label"] = "", None, 7
    path = write_rows(tmp_path / "a.jsonl", rows)
    for _ in range(2):  # also with the cache
        actual = prepare(path, replace(TEXT, skip_bad=True))
        assert len(actual.train) + len(actual.validation) + len(actual.test) == 37
        assert [message.partition(" (")[0] for message in actual.skipped] == [f"{path}: row {i}" for i in (4, 9, 12)]
    with pytest.raises(InvalidInput):
        prepare(path, TEXT)


def test_bad_files_can_be_skipped(tmp_path):
    folder = mixed_folder(tmp_path / "data")
    (folder / "pos" / "bad.png").write_bytes(b"nonsense")
    (folder / "neg" / "bad.txt").write_bytes(b"\xff\xfe")
    (folder / "neg" / "bad.py").write_text("def (:")
    options = DataOptions(vocabulary=300)
    with pytest.raises(InvalidInput, match=rf"{folder}/neg/bad.*{SKIP}"):
        prepare(folder, options)
    actual = prepare(folder, replace(options, skip_bad=True))
    assert len(actual.skipped) == 3
    assert len(actual.train) + len(actual.validation) + len(actual.test) == 40


def test_rows_without_labels(tmp_path):
    path = write_rows(tmp_path / "a.csv", [{"text": "good"}])
    source = open_source(path, Columns(text=("text",)))
    assert isinstance(source, Rows)
    (example,) = source.examples(None, on_bad=lambda error: None)
    assert (example.target, example.where) == ("", f"{path}: row 1 (line 2)")


def test_json_files_in_folders(tmp_path):
    for label, value in (("a", 1.5), ("b", 2.5)):
        (tmp_path / "data" / label).mkdir(parents=True)
        for i in range(6):
            (tmp_path / "data" / label / f"{i}.json").write_text(json.dumps({"x": value, "y": ["good", i + 0.5]}))
    actual = prepare(tmp_path / "data", DataOptions(vocabulary=300))
    assert set(actual.modalities) == {"text", "number"}
    assert set(actual.keys) == {"x", "y"}
