import errno
import json

import pytest
import safetensors.torch
import torch

from hsa.checksums import SUMS
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.saved import CONFIG, WEIGHTS, load_model, save_model
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Leaf, Signal, Table
from hsa.signals.batch import collate
from hsa.tree.positions import KINDS
from tests.model_inputs import ENCODERS, KEYS, MODALITIES
from tests.sealing import reseal


def model(name="hierarchical", **changes):
    sizes = {"width": 13, "heads": 3, "head_dim": 5, "position_width": 14, "layers": 2, **changes}
    config = EncoderConfig(**{"kind": name, **sizes, **ENCODERS[name]})
    return Classifier(ModelConfig(config, MODALITIES, 2, kinds=KINDS, keys=KEYS)).eval()


def batch():
    row = Signal(Table(["title", "price"]), [Signal.of([3, 1, 4], "text"), Leaf(0.5, "number")])
    return collate([row, Leaf(7, "text")])


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("name", ENCODERS)
def test_a_loaded_model_is_the_saved_one(name, tmp_path):
    saved = model(name)
    save_model(tmp_path / "new" / "folder", saved, ("no", "yés"))
    loaded, classes = load_model(tmp_path / "new" / "folder")
    assert classes == ("no", "yés")
    assert loaded.config == saved.config
    assert not loaded.training
    assert torch.equal(loaded(batch()), saved(batch()))
    assert set(files(tmp_path / "new" / "folder")) == {CONFIG, WEIGHTS, SUMS}


def test_a_model_saved_before_entmax_existed(tmp_path):
    saved = model()
    save_model(tmp_path, saved)
    about = json.loads((tmp_path / CONFIG).read_text())
    for name in ("entmax", "entmax_levels"):
        del about["encoder"][name]
    (tmp_path / CONFIG).write_text(json.dumps(about))
    reseal(tmp_path)
    loaded, _ = load_model(tmp_path)
    assert loaded.config.encoder.entmax is None
    assert torch.equal(loaded(batch()), saved(batch()))


@pytest.mark.parametrize("missing", [CONFIG, WEIGHTS])
def test_a_missing_file(missing, tmp_path):
    save_model(tmp_path, model())
    (tmp_path / missing).unlink()
    with pytest.raises(InvalidInput, match=f"{missing}: no such file; expected the"):
        load_model(tmp_path)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[1, 2]", b"null", b'{"model": "another"}', b"\0" * 999])
@pytest.mark.parametrize("damaged", [CONFIG, WEIGHTS])
def test_a_damaged_file(damaged, content, tmp_path):
    save_model(tmp_path, model())
    (tmp_path / damaged).write_bytes(content)
    with pytest.raises(InvalidInput, match=f"{tmp_path / damaged}: expected"):
        load_model(tmp_path)


def test_weights_cut_short(tmp_path):
    save_model(tmp_path, model())
    whole = (tmp_path / WEIGHTS).read_bytes()
    (tmp_path / WEIGHTS).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InvalidInput, match=f"{WEIGHTS}: expected .*, got a damaged file"):
        load_model(tmp_path)


def without(name):
    return lambda about: about.pop(name)


@pytest.mark.parametrize(
    "change",
    [
        without("classes"),
        without("encoder"),
        without("modalities"),
        without("outputs"),
        lambda about: about.update(novelty=1),
        lambda about: about.update(encoder=[1]),
        lambda about: about.update(encoder={"width": "wide"}),
        lambda about: about["encoder"].update(kind="dense"),
        lambda about: about["modalities"].update(text={}),
    ],
)
def test_a_configuration_from_which_no_model_can_be_built(change, tmp_path):
    save_model(tmp_path, model())
    about = json.loads((tmp_path / CONFIG).read_text())
    change(about)
    (tmp_path / CONFIG).write_text(json.dumps(about))
    reseal(tmp_path)
    with pytest.raises(InvalidInput, match=f"{tmp_path / CONFIG}: expected"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: model(layers=1), "expected those of this model, got weights without 'encoder.layers.1"),
        (lambda: model(layers=3), "expected those of this model, got weights with 'encoder.layers.2"),
        (lambda: model(feed_forward=7), r"expected shape \(26, 13\), got '.*feed_forward.*' of shape \(7, 13\)"),
    ],
)
def test_the_weights_of_another_model(other, message, tmp_path):
    save_model(tmp_path, model())
    save_model(tmp_path / "other", other())
    (tmp_path / "other" / WEIGHTS).replace(tmp_path / WEIGHTS)
    reseal(tmp_path)
    with pytest.raises(InvalidInput, match=f"{tmp_path / WEIGHTS}: {message}.*another model"):
        load_model(tmp_path)


def test_a_full_disk_leaves_the_saved_model_whole(tmp_path, monkeypatch):
    old, save_file = model(), safetensors.torch.save_file
    save_model(tmp_path, old, ("no", "yes"))
    before = files(tmp_path)

    def half(tensors, path, metadata):
        save_file(tensors, path, metadata)
        with open(path, "r+b") as file:
            file.truncate(99)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(safetensors.torch, "save_file", half)
    with pytest.raises(InvalidInput, match=f"{WEIGHTS}: cannot be written .*No space left.*No file was replaced"):
        save_model(tmp_path, Classifier(old.config))
    assert files(tmp_path) == before
    assert torch.equal(load_model(tmp_path)[0](batch()), old(batch()))


def test_a_model_is_loaded_to_a_device(tmp_path):
    config = ModelConfig(EncoderConfig(width=8), {"text": Modality(tokens=3)}, 2)
    save_model(tmp_path, Classifier(config))
    assert {p.device.type for p in load_model(tmp_path, "meta")[0].parameters()} == {"meta"}
