from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.saved import save_model
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Grid, Leaf, Signal
from hsa.signals.batch import uncollate
from hsa.training import length_costs as module
from hsa.training.accelerator import make_accelerator
from hsa.training.data.data_set import Example, build
from hsa.training.length_costs import document_of, length_costs
from hsa.training.options import TrainingOptions
from tests.comparisons import prepared
from tests.tasks import TOKENS


def with_train(examples, **more):
    """Prepared data with these signals as training data."""
    made = [Example(signal, ("no", "yes")[i % 2], str(i)) for i, signal in enumerate(examples)]
    return replace(prepared(), train=build(made, "classification"), **more)


@pytest.mark.parametrize("length", [1, 5, 7, 64, 257, 1031])
def test_documents_have_the_requested_length(length):
    data = prepared()
    document = document_of(data, length)
    assert (document.hierarchy.num_trees, document.hierarchy.num_leaves) == (1, length)
    values = data.train.batch.values["text"]
    assert torch.equal(document.values["text"], values.repeat(-(-length // len(values)))[:length])


def test_documents_of_parts_contribute_their_parts():
    data = prepared()
    document = document_of(data, 40)
    sentences = [signal for tree in uncollate(data.train.batch) for signal in tree.members]
    (result,) = uncollate(document)
    assert result.depth == 2
    assert list(result.members)[:-1] == sentences[: result.domain.size - 1]


def test_documents_without_parts_are_parts():
    """Cases: a sentence, a single leaf, and leaves beside sentences."""
    mixed = Signal.of([1, 2], "text")
    trees = [Signal.of([3, 4, 5], "text"), Leaf(6, "text"), Signal(mixed.domain, [mixed, Leaf(7, "text")])]
    (result,) = uncollate(document_of(with_train(trees), 7))
    assert list(result.members) == trees


def test_families_obey_max_family():
    data = prepared()
    data = replace(data, input_spec=replace(data.input_spec, max_family=5))
    document = document_of(data, 211)
    assert document.hierarchy.num_leaves == 211
    assert max(document.hierarchy.structure.num_children) <= 5


def test_data_that_cannot_be_concatenated():
    images = [Signal.of(np.arange(size), "text", Grid((size,))) for size in (3, 7, 5)]
    data = with_train(images, kinds=("grid",))
    assert document_of(data, 7).hierarchy.num_leaves == 7
    assert document_of(data, 8) is None
    assert document_of(data, 4) is None  # grids cannot be cut


def test_length_zero():
    with pytest.raises(InvalidInput, match=r"^length: expected 1 or more, got 0$"):
        document_of(prepared(), 0)


@pytest.fixture
def folders(tmp_path):
    result = {}
    for kind in ("flat", "none"):
        config = ModelConfig(
            EncoderConfig(width=12, heads=2, layers=1, kind=kind, position_width=8),
            {"text": Modality(tokens=TOKENS)},
            outputs=2,
        )
        result[kind] = tmp_path / kind
        save_model(result[kind], Classifier(config), ("no", "yes"))
    return result


def measure(folders, **more):
    return length_costs(folders, prepared(), make_accelerator(TrainingOptions(), cpu=True), **more)


def test_costs_of_every_model_and_length(folders):
    calls = []
    result = measure(folders, lengths=(13, 29), watch=lambda *next_one: calls.append(next_one))
    assert calls == [(name, length) for name in ("flat", "none") for length in (13, 29)]
    assert [(cost.kind, cost.length) for cost in result] == calls
    # Softmax attention: the square of the length.
    assert result[1].operations / result[0].operations == pytest.approx((29 / 13) ** 2, rel=1e-9)
    assert [cost.operations for cost in result[2:]] == [0, 0]
    assert all(cost.seconds > 0 for cost in result)


def test_slow_models_are_not_measured_at_greater_lengths(folders, monkeypatch):
    monkeypatch.setattr(module, "median_seconds", lambda run, repeats, **more: 1.5)
    result = measure(folders, lengths=(13, 29), longest_pass=1.0)
    assert [(cost.kind, cost.length) for cost in result] == [("flat", 13), ("none", 13)]


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_out_of_memory(folders, monkeypatch, error):
    def full(*arguments, **more):
        raise error

    monkeypatch.setattr(module, "median_seconds", full)
    assert measure(folders, lengths=(13, 29)) == []


def test_a_frozen_encoder_runs_once_per_model(folders):
    calls = []

    def transform(batch):
        calls.append(batch.hierarchy.num_leaves)
        return batch

    data = prepared()
    data = replace(data, input_spec=SimpleNamespace(transform=transform, max_family=0))
    length_costs(folders, data, make_accelerator(TrainingOptions(), cpu=True), lengths=(13,))
    assert calls == [13, 13]  # for each model
