"""Random damage to checkpoints and models: nothing resumes or loads from a file that is not what was written."""

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import hsa
from hsa.errors import InvalidInput
from hsa.files import load_state, save_state
from hsa.models import LanguageModel, LanguageModelConfig, save_language_model
from hsa.signals import train_tokenizer


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """Return the folder of a model."""
    folder = tmp_path_factory.mktemp("saved") / "model"
    tokenizer = train_tokenizer(["It was a dark and stormy night."], 280)
    config = LanguageModelConfig(tokenizer.get_vocab_size(), width=8, heads=2, layers=1)
    save_language_model(folder, LanguageModel(config), tokenizer)
    hsa.load(folder)
    return folder


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    path = tmp_path_factory.mktemp("state") / "checkpoint.pt"
    save_state(path, {"weights": torch.arange(500.0), "progress": {"epoch": 3, "loss": 0.25}, "name": "run"})
    load_state(path, "a checkpoint", "Delete it")
    return path


@st.composite
def damages(draw):
    """Draw a function of bytes that returns others."""
    kind = draw(st.sampled_from(["flip", "cut", "append", "zero", "swap"]))
    where, size, bit = draw(st.floats(0, 1, exclude_max=True)), draw(st.integers(1, 64)), draw(st.integers(0, 7))

    def damage(data):
        at, changed = int(where * len(data)), bytearray(data)
        if kind == "flip":
            changed[at] ^= 1 << bit
        elif kind == "cut":
            del changed[at:]
        elif kind == "append":
            changed += b"x" * size
        elif kind == "zero":
            changed[at : at + size] = bytes(len(changed[at : at + size]))
        else:
            changed[at : at + size] = changed[at : at + size][::-1]
        return bytes(changed)

    return damage


@given(damage=damages())
def test_checkpoints(damage, state):
    data = state.read_bytes()
    changed = damage(data)
    path = state.with_name("damaged.pt")
    path.write_bytes(changed)
    if changed == data:
        load_state(path, "a checkpoint", "Delete it")
        return
    with pytest.raises(InvalidInput, match=r"damaged.pt: .*Delete it"):
        load_state(path, "a checkpoint", "Delete it")


@given(damage=damages(), number=st.integers(0, 99))
def test_models(damage, number, model):
    folder = model.with_name("damaged")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(model, folder)
    files = sorted(folder.iterdir())
    path = files[number % len(files)]
    data = path.read_bytes()
    changed = damage(data)
    path.write_bytes(changed)
    if changed.split() != data.split():  # the last line end of a text does not matter
        with pytest.raises(InvalidInput, match=str(folder)):
            hsa.load(folder)
