"""Atomic writes, and errors that name the file."""

import errno
import os
import resource
import stat
import time

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.files import load_tensors, load_yaml, read_json, save_tensors, write_json, write_text, write_then_rename

TENSORS = {
    "a": torch.randn(3, 5),
    "b": torch.arange(7).to(torch.uint16),
    "turned": torch.randn(5, 3).T,
    "bits": torch.tensor([True, False]),
    "none": torch.empty(0, 2),
    "half": torch.randn(11).bfloat16(),
}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_tensors_and_their_metadata_come_back(tmp_path):
    save_tensors(tmp_path / "x.safetensors", TENSORS, {"hsa": "é"})
    tensors, metadata = load_tensors(tmp_path / "x.safetensors", "tensors")
    assert metadata == {"hsa": "é"}
    assert tensors.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_json_comes_back(tmp_path):
    data = {"é": [1, 2.5, None, "ü\n"]}
    write_json(tmp_path / "x.json", data)
    assert read_json(tmp_path / "x.json", "data") == data
    assert "é" in (tmp_path / "x.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError("of torch")])
@pytest.mark.parametrize("old", [None, "old"])
def test_a_failed_write_leaves_the_existing_file_unchanged(old, error, tmp_path):
    path = tmp_path / "x.txt"
    if old is not None:
        path.write_text(old)

    def write_half(temporary):
        temporary.write_text("half of i")
        raise error

    state = "No file was written" if old is None else "The existing file is unchanged"
    with pytest.raises(InvalidInput, match=rf"{path}: cannot be written .*; expected a writable folder .*\. {state}$"):
        write_then_rename(path, write_half)
    assert names(tmp_path) == ([] if old is None else ["x.txt"])
    assert old is None or path.read_text() == old


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_interrupted_write_leaves_no_temporary_file(error, tmp_path):
    (tmp_path / "x.txt").write_text("old")

    def interrupted(temporary):
        temporary.write_text("half of i")
        raise error

    with pytest.raises(error):
        write_then_rename(tmp_path / "x.txt", interrupted)
    assert names(tmp_path) == ["x.txt"]
    assert (tmp_path / "x.txt").read_text() == "old"


def save_large_tensors(path):
    save_tensors(path, {"x": torch.zeros(9999)})


def write_long_text(path):
    write_text(path, "x" * 9999)


def torch_save(path):
    write_then_rename(path, lambda temporary: torch.save(torch.zeros(9999), temporary))


@pytest.mark.parametrize("save", [save_large_tensors, write_long_text, torch_save])
def test_a_write_that_the_system_refuses(save, tmp_path):
    """Limit files to one kilobyte, as a quota or a full disk would."""
    path = tmp_path / "x"
    path.write_text("old")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
    try:
        with pytest.raises(InvalidInput, match=r"x: cannot be written"):
            save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(tmp_path) == ["x"]
    assert path.read_text() == "old"


def test_a_file_in_place_of_a_folder_and_a_folder_in_place_of_a_file(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InvalidInput, match=r"x\.txt: cannot be written"):
        write_text(tmp_path / "file" / "x.txt", "new")
    (tmp_path / "x.txt").mkdir()
    with pytest.raises(InvalidInput, match=r"x\.txt: cannot be written"):
        write_text(tmp_path / "x.txt", "new")
    assert names(tmp_path) == ["file", "x.txt"]


def test_files_have_the_permissions_that_the_umask_sets(tmp_path):
    write_text(tmp_path / "plain", "x")
    save_tensors(tmp_path / "tensors", TENSORS)
    mask = os.umask(0)
    os.umask(mask)
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o666 & ~mask}


@pytest.mark.parametrize("content", [None, b"", b"{", b"x" * 99])
def test_tensors_that_cannot_be_read(content, tmp_path):
    path = tmp_path / "x.safetensors"
    if content is not None:
        path.write_bytes(content)
    message = "no such file; expected a data set$" if content is None else r"expected a data set, got a damaged file \("
    with pytest.raises(InvalidInput, match=f"{path}: {message}"):
        load_tensors(path, "a data set")


@pytest.mark.parametrize(
    "content", [None, b"", b"{", b"\xff", b"[" * 100_000, b"[" * 201 + b"]" * 201, b'{"a": 1, "a": 2}']
)
def test_json_that_cannot_be_read(content, tmp_path):
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)
    unreadable = r"expected a report, got a file that cannot be read \("
    message = "no such file; expected a report$" if content is None else unreadable
    with pytest.raises(InvalidInput, match=f"{path}: {message}"):
        read_json(path, "a report")
    with pytest.raises(InvalidInput, match=f"{tmp_path}: {unreadable}"):
        read_json(tmp_path, "a report")


ALIASES = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 30))
BAD_YAML = {
    ALIASES: r"expected at most 10,000 values, got more, with those that aliases repeat \(line 13\)",
    "a: &a [1, *a]": r"got the alias \*a inside its own anchor \(line 1\)",
    "a: " + "[" * 100_000: r"expected at most 20 levels, got values nested too deeply \(line 1\)",
    "a: " + "{b: " * 50_000: r"expected at most 20 levels, got values nested too deeply \(line 1\)",
    "\n".join(" " * i + "a:" for i in range(500)): "expected at most 20 levels, got values nested too deeply",
    "a: 1\nb:\n  c: 1\n  c: 2": "expected each name once, got 'c' 2 times, from line 3 on",
    "a: 2020-99-99": "not valid YAML",
    "a: " + "9" * 9999: "not valid YAML",
    "a: x\n" * 100_000: "expected a recipe of at most 262,144 bytes, got a larger file",
    "a: !!python/object/apply:os.system [ls]": "not valid YAML",
}


@pytest.mark.parametrize("content", BAD_YAML, ids=lambda content: content[:12])
def test_yaml_that_cannot_be_read(tmp_path, content):
    path = tmp_path / "x.yaml"
    path.write_text(content)
    began = time.perf_counter()
    with pytest.raises(InvalidInput, match=f"{path}: .*{BAD_YAML[content]}"):
        load_yaml(path)
    assert time.perf_counter() - began < 10


def test_yaml_with_aliases(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text("a: &base {x: 1, y: [2, 3]}\nb: {<<: *base, x: 4}\nc: *base\n")
    assert load_yaml(path) == {"a": {"x": 1, "y": [2, 3]}, "b": {"x": 4, "y": [2, 3]}, "c": {"x": 1, "y": [2, 3]}}
