"""`remove_run` removes what a run wrote, and nothing else."""

from pathlib import Path

import pytest

from hsa.checksums import SUMS, format_sums
from hsa.training.old_run import RUNS, remove_run


def write(folder, *names):
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")


def files(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def model(folder, *names):
    """Write a finished model with these files."""
    write(folder, "checkpoint.pt", "result.json", *names)
    (folder / SUMS).write_text(format_sums(dict.fromkeys(names, "0" * 64)))


def test_files_of_the_user_stay(tmp_path):
    model(tmp_path / "flat", "model.safetensors", "config.json")
    model(tmp_path / "han/0.001/2", "model.safetensors")
    write(tmp_path / "han/0.001/2", "ended.json")
    write(tmp_path / "hat/0.001/0", "ended.json")  # diverged
    write(tmp_path, "results.json", "references.json", "comparison.json", "first.json", "curves.png")
    (tmp_path / "report.md").write_text("# A\n\n![curves](curves.png)\n![no](../outside.png)\n")
    mine = {"photo.png", "flat/notes.txt", "flat/model.bin", "data/rows.csv", "han/0.001/table.csv"}
    write(tmp_path, *mine)
    remove_run(tmp_path)
    assert files(tmp_path) == mine
    assert {path.name for path in tmp_path.iterdir()} == {"photo.png", "flat", "data", "han"}


def test_a_folder_without_a_run_is_left_alone(tmp_path):
    mine = {"report.md", "results.json", "a/model.safetensors", "a/b/c/d/checkpoint.pt"}
    write(tmp_path, *mine)
    remove_run(tmp_path)
    assert files(tmp_path) == mine
    assert not any(any(tmp_path.glob(pattern)) for pattern in RUNS)


def test_lists_with_other_folders_and_damaged_lists(tmp_path):
    run = tmp_path / "run"
    model(run / "flat", "model.safetensors")
    (run / "flat" / SUMS).write_text(format_sums({"../../mine.txt": "0" * 64}))
    write(tmp_path, "mine.txt")
    remove_run(run)
    assert files(tmp_path) == {"mine.txt", "run/flat/model.safetensors"}
    model(run / "flat", "model.safetensors")
    (run / "flat" / SUMS).write_text("nonsense")
    remove_run(run)
    assert files(run) == {"flat/model.safetensors"}


def test_links_are_not_followed(tmp_path):
    model(tmp_path / "elsewhere/flat", "model.safetensors")
    before = files(tmp_path / "elsewhere")
    (tmp_path / "run").mkdir()
    (tmp_path / "run/flat").symlink_to(tmp_path / "elsewhere/flat", target_is_directory=True)
    remove_run(tmp_path / "run")
    assert files(tmp_path / "elsewhere") == before


@pytest.mark.parametrize("name", ["hierarchical/checkpoint.pt", "flat/result.json", "han/0.001/0/ended.json"])
def test_runs_are_recognised(tmp_path, name):
    write(tmp_path, name)
    assert any(any(Path(tmp_path).glob(pattern)) for pattern in RUNS)
