import json

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.generation.loading import is_transformers, load_writer, model_folder
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.models.saved import save_language_model
from hsa.signals.readers.tokens import train_tokenizer


@pytest.fixture
def saved(tmp_path):
    """The folder of a model, the model and its tokenizer."""
    tokenizer = train_tokenizer(["the cat"], 260)
    config = LanguageModelConfig(
        tokenizer.get_vocab_size(), width=8, heads=2, layers=2, attention=("flat", "multiscale")
    )
    model = LanguageModel(config)
    save_language_model(tmp_path / "run" / "multiscale", model, tokenizer)
    return tmp_path / "run" / "multiscale", model, tokenizer


def test_what_was_saved_comes_back(saved):
    folder, model, tokenizer = saved
    loaded, found = load_writer(folder)
    assert loaded.config == model.config
    assert not loaded.training
    tokens = torch.arange(11)
    assert torch.equal(loaded(tokens, [11]), model.eval()(tokens, [11]))
    assert found.to_str() == tokenizer.to_str()


def test_the_first_model_of_a_run(saved):
    folder = saved[0]
    (folder.parent / "results.json").write_text(json.dumps([{"model": "multiscale"}, {"model": "flat"}]))
    assert model_folder(folder.parent) == folder
    load_writer(folder.parent)
    (folder.parent / "results.json").write_text("[]")
    with pytest.raises(InvalidInput, match=r"results\.json: given something else"):
        model_folder(folder.parent)


def test_folders_without_a_language_model(saved, tmp_path):
    folder = saved[0]
    with pytest.raises(InvalidInput, match="no such folder"):
        load_writer(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"config\.json: given no such file"):
        load_writer(tmp_path)
    (folder / "tokenizer.json").rename(folder / "other.json")
    with pytest.raises(InvalidInput, match=r"tokenizer\.json: given no such file"):
        load_writer(folder)
    about = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**about, "width": 7}))
    with pytest.raises(InvalidInput, match="makes no model"):
        load_writer(folder)
    (folder / "config.json").write_text(json.dumps({**about, "width": 16}))
    with pytest.raises(InvalidInput, match=r"model\.safetensors: given 'embedding\.weight'|another model"):
        load_writer(folder)
    (folder / "config.json").write_text(json.dumps({"format": 2, "model": "classifier"}))
    with pytest.raises(InvalidInput, match=r"that of a classifier.*hsa train --task lm"):
        load_writer(folder)


def test_models_of_transformers_are_told_apart(saved, tmp_path):
    assert not is_transformers(saved[0])
    assert not is_transformers(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    assert is_transformers(tmp_path)
