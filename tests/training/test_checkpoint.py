import errno
import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from hsa.errors import InvalidInput
from hsa.files import save_state, save_tensors, write_json, write_text
from hsa.models.saved import load_model, save_model
from hsa.training import checkpoint
from hsa.training.loop import CHECKPOINT
from tests.tasks import classifier, trainer


def content(seed=0, **progress):
    model = classifier(seed=seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(trainer().train.batch).sum().backward()
    optimizer.step()
    return model, optimizer, checkpoint.gather(model, optimizer, progress)


def full_disk(monkeypatch, module, name):
    """Simulate a disk that becomes full while a file is written."""
    write = getattr(module, name)

    def fail(data, target, *more):
        write(data, target, *more)
        os.truncate(getattr(target, "name", target), 100)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(module, name, fail)


def test_save_and_restore(tmp_path):
    path = tmp_path / CHECKPOINT
    model, optimizer, saved = content(steps=[1, 2], best={"score": 0.5, "none": None})
    expected = torch.rand(3)
    torch.set_rng_state(saved["random"]["cpu"])
    expected = torch.rand(3)
    checkpoint.save(path, saved)

    other = classifier(seed=5)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.3)
    progress = checkpoint.restore(path, checkpoint.load(path), other, other_optimizer)
    assert progress == {"steps": [1, 2], "best": {"score": 0.5, "none": None}}
    assert torch.equal(torch.rand(3), expected)
    for name, tensor in model.state_dict().items():
        assert torch.equal(other.state_dict()[name], tensor)
    for mine, its in zip(other.parameters(), model.parameters(), strict=True):
        for name, value in optimizer.state[its].items():
            assert torch.equal(other_optimizer.state[mine][name], value)


def test_a_full_disk_keeps_the_previous_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / CHECKPOINT
    model, _, saved = content()
    checkpoint.save(path, saved)
    before = path.read_bytes()
    full_disk(monkeypatch, torch, "save")
    with pytest.raises(InvalidInput) as caught:
        checkpoint.save(path, content(seed=5)[2])
    assert str(caught.value).startswith(f"{path}: ")
    assert "[Errno 28] No space left on device" in str(caught.value)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == [CHECKPOINT]
    for name, tensor in model.state_dict().items():
        assert torch.equal(checkpoint.load(path)["model"][name], tensor)


def test_a_disk_that_fills_up_while_training(tmp_path, monkeypatch):
    """The run stops with a one-line error, and can be resumed from the last checkpoint."""
    run = trainer(folder=tmp_path)
    save, saves = torch.save, []

    def fill_up(data, target):
        saves.append(target)
        save(data, target)
        if len(saves) == 2:
            raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(torch, "save", fill_up)
    with pytest.raises(InvalidInput, match=r"cannot be written"):
        run.fit()
    assert [p.name for p in tmp_path.iterdir()] == [CHECKPOINT]
    again = trainer(folder=tmp_path)
    again.resume()
    assert again.progress.epoch == 1
    history = again.fit()
    assert [record.loss for record in history] == [record.loss for record in trainer().fit()]


def test_a_full_disk_keeps_the_previous_model(tmp_path, monkeypatch):
    save_model(tmp_path, classifier(), ("no", "yes"))
    full_disk(monkeypatch, safetensors.torch, "save_file")
    with pytest.raises(InvalidInput, match=r"model\.safetensors: .*cannot be written"):
        save_model(tmp_path, classifier(seed=5), ("no", "yes"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["SHA256SUMS", "config.json", "model.safetensors"]
    model, _ = load_model(tmp_path)
    assert all(torch.equal(t, classifier().state_dict()[name]) for name, t in model.state_dict().items())


def test_a_full_disk_leaves_no_partial_file(tmp_path, monkeypatch):
    full_disk(monkeypatch, safetensors.torch, "save_file")
    with pytest.raises(InvalidInput, match="No file was written"):
        save_tensors(tmp_path / "a.safetensors", {"a": torch.ones(99)})
    assert list(tmp_path.iterdir()) == []


def test_writing_below_a_file(tmp_path):
    (tmp_path / "a").write_text("")
    for write in (write_text, write_json):
        with pytest.raises(InvalidInput, match="cannot be written"):
            write(tmp_path / "a" / "b", "text")


def test_files_have_default_permissions(tmp_path):
    save_tensors(tmp_path / "a", {"a": torch.ones(3)})
    (tmp_path / "b").write_text("")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda data: data[: len(data) // 2],
            r"expected a checkpoint of hsa, got a damaged file \(it does not end .*\. Delete it",
        ),
        (lambda data: b"", "got a damaged file"),
        (lambda data: b"not at all\n" * 99, "got a damaged file"),
    ],
)
def test_damaged_checkpoints(tmp_path, damage, message):
    path = tmp_path / CHECKPOINT
    trainer(folder=tmp_path)._save()
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(InvalidInput, match=message) as caught:
        trainer(folder=tmp_path).resume()
    assert caught.value.where == str(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("other", [{"model": {}}, [1, 2], torch.ones(3)])
def test_files_that_are_not_checkpoints(tmp_path, other):
    path = tmp_path / CHECKPOINT
    save_state(path, other)
    with pytest.raises(InvalidInput, match=r"expected a checkpoint of hsa(, format 2)?, got another kind of file"):
        checkpoint.load(path)


def test_a_checkpoint_cannot_run_code(tmp_path):
    class Harm:
        def __reduce__(self):
            return Path.touch, (tmp_path / "harm",)

    save_state(tmp_path / CHECKPOINT, {"format": checkpoint.FORMAT, "model": Harm()})
    with pytest.raises(InvalidInput, match="got a damaged file"):
        checkpoint.load(tmp_path / CHECKPOINT)
    assert not (tmp_path / "harm").exists()


def test_missing_checkpoint(tmp_path):
    with pytest.raises(
        InvalidInput, match=r"no such file; expected a checkpoint\. There is nothing to resume; start without --resume"
    ):
        checkpoint.load(tmp_path / CHECKPOINT)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (classifier(width=14), r"shape \(13, 14\), got .*\(13, 12\).*another model"),
        (classifier(layers=2), "'encoder.layers.1"),
        (classifier(position_width=0), "'encoder.features"),
    ],
)
def test_the_weights_of_another_model(tmp_path, model, message):
    _, _, saved = content()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(InvalidInput, match=message):
        checkpoint.restore(tmp_path / CHECKPOINT, saved, model, torch.optim.AdamW(model.parameters()))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
