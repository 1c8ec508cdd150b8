import json
import math
from dataclasses import replace

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Graph, Leaf, Set, Signal, Table
from hsa.signals.batch import collate
from hsa.tree.positions import KINDS
from tests.model_inputs import ENCODERS, KEYS, MODALITIES, exact, num_leaves

OUTPUTS = 11
SIZES = {"width": 13, "heads": 3, "head_dim": 5, "feed_forward": 17, "position_width": 14}
OPERATORS = ("hierarchical", "multiscale", "clustered", "bottom-up", "flat", "none")


def config(task="classification", name="hierarchical", outputs=OUTPUTS, **more):
    encoder = EncoderConfig(**{"kind": name, **SIZES, **ENCODERS[name]})
    return ModelConfig(encoder, MODALITIES, outputs, kinds=KINDS, keys=KEYS, task=task, **more)


def signals():
    row = Signal(Table(["title", "price"]), [Signal.of([3, 1, 4], "text"), Leaf(0.5, "number")])
    return [row, Leaf(7, "text"), Signal.of([1, 5], "text", Set(2)), Signal.of([2, 6], "text", Graph(2, [(0, 1)]))]


POOLINGS = ("mean", "max", "attention", "first", "last")


@pytest.mark.parametrize(
    ("name", "pooling"),
    [*((name, "mean") for name in ENCODERS), *(("hierarchical", pooling) for pooling in POOLINGS[1:])],
)
def test_classes_per_tree(name, pooling):
    model = exact(Classifier(config(name=name, pooling=pooling)))
    logits = model(collate(signals()))
    assert logits.shape == (len(signals()), OUTPUTS)
    for i, signal in enumerate(signals()):
        torch.testing.assert_close(model(collate([signal]))[0], logits[i], rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", [n for n in ENCODERS if n != "bottom-up" and "pooled" not in n])
def test_classes_per_leaf(name):
    model = exact(Classifier(config("tokens", name)))
    batch = collate(signals())
    logits = model(batch)
    assert logits.shape == (sum(map(num_leaves, signals())), OUTPUTS)
    torch.testing.assert_close(logits, model.head(model.norm(model.encoder(batch)[0])))


@pytest.mark.parametrize("name", ["bottom-up", "hierarchical pooled"])
def test_pooled_leaves_have_no_classes(name):
    with pytest.raises(
        InvalidInput,
        match=r"task: expected an encoder that keeps leaves, got 'tokens' for",
    ):
        config("tokens", name)
    with pytest.raises(
        InvalidInput, match=r"task: expected one of classification, regression, tokens, got 'translation'"
    ):
        config("translation")


def test_numbers_are_scaled_back():
    plain, scaled = (
        exact(Classifier(config("regression", outputs=1, center=center, scale=scale)))
        for center, scale in ((0.0, 1.0), (31.0, 7.0))
    )
    batch = collate(signals())
    assert plain(batch).shape == (len(signals()),)
    torch.testing.assert_close(scaled(batch), plain(batch) * 7 + 31)


@pytest.mark.parametrize("kind", OPERATORS)
@pytest.mark.parametrize(
    "sizes",
    [
        {"width": 64, "heads": 2, "layers": 1},
        {"width": 128, "heads": 4, "layers": 2},
        {"width": 48, "heads": 3, "head_dim": 8, "layers": 5, "feed_forward": 300, "position_width": 0},
    ],
)
@pytest.mark.parametrize("modalities", [MODALITIES, {"text": Modality(tokens=101)}])
def test_variants_have_as_many_parameters(kind, sizes, modalities):
    reference = ModelConfig(EncoderConfig(**sizes), modalities, OUTPUTS, kinds=KINDS, keys=KEYS)
    variant = equal_parameters(reference, replace(reference.encoder, kind=kind))
    assert variant.encoder.kind == kind
    ours, theirs = (count_parameters(Classifier(c)) for c in (variant, reference))
    assert ours == pytest.approx(theirs, rel=0.01)


def test_frozen_parameters_do_not_count():
    trained, frozen = (
        Classifier(ModelConfig(EncoderConfig(**SIZES), {"text": Modality(tokens=101, width=7, frozen=f)}, OUTPUTS))
        for f in (False, True)
    )
    assert count_parameters(trained) - count_parameters(frozen) == 101 * 7


@pytest.mark.parametrize("name", ENCODERS)
def test_a_configuration_survives_json(name):
    original = config(name=name, pooling="attention", head=19, center=math.pi, scale=1e-30)
    back = ModelConfig.from_dict(json.loads(json.dumps(original.to_dict())))
    assert back == original
    assert isinstance(back.encoder.windows, tuple)


def test_missing_fields_of_a_configuration_have_defaults():
    least = ModelConfig(EncoderConfig(), {"text": Modality(tokens=3)}, 2)
    assert (
        ModelConfig.from_dict(
            {"encoder": {"architecture": "tree"}, "modalities": {"text": {"tokens": 3}}, "outputs": 2}
        )
        == least
    )


@pytest.mark.parametrize("where", ["ModelConfig", "EncoderConfig", "Modality"])
def test_an_unknown_field(where):
    data = config().to_dict()
    part = {"ModelConfig": data, "EncoderConfig": data["encoder"], "Modality": data["modalities"]["text"]}[where]
    part["novelty"] = 1
    with pytest.raises(InvalidInput, match=f"{where}: expected .*, got the unknown field 'novelty'.*another version"):
        ModelConfig.from_dict(data)
