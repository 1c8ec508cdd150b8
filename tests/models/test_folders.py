import json

import pytest

from hsa.errors import InvalidInput
from hsa.models.folders import model_folder
from hsa.models.saved import is_transformers, save_model
from tests.tasks import classifier


@pytest.fixture
def run(tmp_path):
    """Folder of two models."""
    for name in ("flat", "hierarchical"):
        save_model(tmp_path / "run" / name, classifier(), ("no", "yes"))
    return tmp_path / "run"


def write_results(run, results):
    (run / "results.json").write_text(json.dumps(results))


def test_a_model_stands_for_itself(run):
    assert model_folder(run / "flat") == run / "flat"


def test_a_run_stands_for_its_first_model(run):
    write_results(run, [{"model": "hierarchical"}, {"model": "flat"}])
    assert model_folder(run) == run / "hierarchical"


@pytest.mark.parametrize("results", [{}, [3], [{"name": "flat"}], "flat"])
def test_results_of_something_else(run, results):
    write_results(run, results)
    with pytest.raises(
        InvalidInput, match=r"results\.json: expected the results of a run of hsa train, got other content"
    ):
        model_folder(run)


def test_a_run_without_a_finished_model(run):
    write_results(run, [])
    with pytest.raises(InvalidInput, match="run: no model of this run was finished; expected a model or a run"):
        model_folder(run)


def test_several_models_without_an_order_are_listed(run):
    message = f"{run}: expected one of {run}/flat, {run}/hierarchical, got a folder of 2 models"
    with pytest.raises(InvalidInput, match=f"^{message}$"):
        model_folder(run)
    for i in range(9):
        save_model(run / f"model-{i}", classifier())
    with pytest.raises(InvalidInput, match=r"model-2 and 6 more, got a folder of 11 models$"):
        model_folder(run)


def test_the_only_model_of_a_folder(tmp_path):
    save_model(tmp_path / "compare" / "flat" / "0.001" / "0", classifier())
    (tmp_path / "compare" / "other").mkdir()
    assert model_folder(tmp_path / "compare") == tmp_path / "compare" / "flat" / "0.001" / "0"


def test_transformers_models(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert is_transformers(tmp_path)
    assert model_folder(tmp_path) == tmp_path
    model = tmp_path / "convert" / "model"  # as hsa convert writes it
    model.mkdir(parents=True)
    (tmp_path / "config.json").rename(model / "config.json")
    assert model_folder(tmp_path / "convert") == model


def test_folders_that_hold_no_model(tmp_path):
    expected = "expected a model or a run that hsa train wrote"
    with pytest.raises(InvalidInput, match=f"none: no such folder; {expected}$"):
        model_folder(tmp_path / "none")
    with pytest.raises(InvalidInput, match=f"{expected}, got an empty folder$"):
        model_folder(tmp_path)
    for name in "abcdefg":
        (tmp_path / f"{name}.txt").write_text("text")
    with pytest.raises(InvalidInput, match=f"{expected}, got a folder without config.json, with a.txt, b.txt, .*, …$"):
        model_folder(tmp_path)
    (tmp_path / "flat").mkdir()
    (tmp_path / "flat" / "checkpoint.pt").write_text("")
    for folder in (tmp_path, tmp_path / "flat"):
        with pytest.raises(InvalidInput, match=r"got unfinished training .*\. Finish it with: hsa train --resume$"):
            model_folder(folder)


def test_files(run):
    with pytest.raises(
        InvalidInput,
        match=f"expected the folder of a model .* wrote, got a file. Pass its folder, {run}/flat$",
    ):
        model_folder(run / "flat" / "model.safetensors")
    (run / "notes.txt").write_text("")
    with pytest.raises(
        InvalidInput, match=r"notes\.txt: expected the folder of a model or a run that hsa train wrote, got a file$"
    ):
        model_folder(run / "notes.txt")


def test_an_unfinished_copy_is_no_model(tmp_path):
    """Ignore the temporary folder that a killed process left."""
    save_model(tmp_path / "run" / "flat" / ".files.7.part", classifier())
    with pytest.raises(InvalidInput, match="expected a model"):
        model_folder(tmp_path / "run")
