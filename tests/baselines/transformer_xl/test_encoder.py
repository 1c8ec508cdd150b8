"""Transformer-XL as an encoder: equivalences, receptive field and gradients of the memory."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.baselines.transformer_xl.encoder import TransformerXLConfig, TransformerXLEncoder
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.models.registry import config_from_dict
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Leaf, Signal
from hsa.signals.batch import Batch, collate
from tests.model_inputs import MODALITIES, exact, num_leaves, readable

CONFIG = TransformerXLConfig(width=14, heads=2, layers=3, feed_forward=11, segment=5, memory=3)
TEXT = {"text": Modality(tokens=97)}


def encoder(modalities=TEXT, **changes):
    return exact(TransformerXLEncoder(replace(CONFIG, **changes), modalities))


def texts(*lengths, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return [Signal.of(torch.randint(97, (n,), generator=draw).tolist(), "text") for n in lengths]


def close(result, wanted):
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-10)


@given(readable(), st.integers(1, 6), st.integers(0, 7))
def test_a_document_does_not_depend_on_its_batch(signals, segment, memory):
    model = encoder(MODALITIES, segment=segment, memory=memory)
    whole, forest = model(collate(signals))
    assert forest.lengths == [num_leaves(signal) for signal in signals]
    assert int(forest.structure.height.max(initial=0)) <= 1
    close(whole, torch.cat([model(collate([signal]))[0] for signal in signals]))


@given(st.lists(st.integers(1, 29), min_size=1, max_size=5), st.integers(1, 6))
def test_long_memory_equals_one_long_segment(lengths, segment):
    """The memory reaches back to the first token in every layer."""
    batch = collate(texts(*lengths))
    close(encoder(segment=segment, memory=max(lengths))(batch)[0], encoder(segment=max(lengths), memory=0)(batch)[0])


@given(st.lists(st.integers(1, 29), min_size=1, max_size=5), st.integers(1, 6))
def test_without_memory_segments_are_independent_texts(lengths, segment):
    signals = texts(*lengths)
    parts = [
        Signal.of([leaf.value for leaf in signal.members[i : i + segment]], "text")
        for signal in signals
        for i in range(0, len(signal.members), segment)
    ]
    model = encoder(segment=segment, memory=0)
    close(model(collate(signals))[0], model(collate(parts))[0])


@pytest.mark.parametrize("memory", [0, 2, 3, 9])
@pytest.mark.parametrize("layers", [1, 2])
def test_receptive_field(memory, layers):
    """Changing a token changes later outputs within reach of its segment and one memory per layer, and no others."""
    model, segment, length = encoder(memory=memory, layers=layers, segment=4), 4, 23
    tokens = torch.arange(length)

    def outputs(ids):
        return model(collate([Signal.of(ids.tolist(), "text")]))[0].detach()

    usual = outputs(tokens)
    for changed in range(length):
        other = tokens.clone()
        other[changed] = 90
        differs = (outputs(other) - usual).abs().amax(-1) > 0
        reached = {changed}
        for _ in range(layers):
            reached = {
                i for i in range(length) if any(max(0, i // segment * segment - memory) <= j <= i for j in reached)
            }
        assert set(differs.nonzero()[:, 0].tolist()) == reached


def test_gradients_stay_inside_a_segment():
    model, segment, length = encoder(segment=4, memory=8), 4, 11
    batch = collate([Signal.of(list(range(length)), "text")])
    weight = model.embedding.tables["text"].weight
    for i in range(length):
        (slope,) = torch.autograd.grad(model(batch)[0][i].sum(), weight)
        assert slope[:length].abs().amax(-1).nonzero()[:, 0].tolist() == list(range(i // segment * segment, i + 1))


def test_gradients_without_memory():
    model = encoder(width=6, layers=1, feed_forward=3, segment=3, memory=0)
    plan = model._segments(collate(texts(5, 2)).hierarchy)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: model.layers(x, plan), (x,))


def test_memory_length_after_training():
    signals = collate(texts(17, 9))
    model = encoder(memory=2, test_memory=7, dropout=0.0)
    close(model(signals)[0], encoder(memory=7)(signals)[0])
    close(model.train()(signals)[0], encoder(memory=2)(signals)[0])
    assert encoder(memory=2, test_memory=0).layers.memory == 0
    assert encoder(memory=2).layers.memory == 2


def test_dropout_only_in_training():
    model, batch = encoder(dropout=0.5), collate(texts(17, 9))
    close(model(batch)[0], model(batch)[0])
    model.train()
    assert (model(batch)[0] != model(batch)[0]).any()


def test_prepare_builds_the_plan_and_single_tokens_work():
    model, batch = encoder(), collate([Leaf(3, "text"), *texts(1, 12)])
    model.prepare(batch)
    plan = model._segments(batch.hierarchy)
    x, forest = model(batch)
    assert model._segments(batch.hierarchy) is plan
    close(x[:1], model(collate([Signal.of([3], "text")]))[0])
    assert forest.lengths == [1, 1, 12]
    assert x.isfinite().all()


def test_an_empty_selection():
    batch = collate(texts(4, 3)).select([])
    assert isinstance(batch, Batch)
    assert encoder()(batch)[0].shape == (0, CONFIG.width)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"memory": -1}, "memory: expected 0 tokens or more, got -1"),
        ({"test_memory": -1}, "test_memory: expected 0 tokens or more, or None for as many as in training, got -1"),
        ({"segment": 0}, "segment: expected 1 token or more, got 0"),
        ({"heads": 3}, "heads: expected .*, got 3 heads .* 14"),
        ({"dropout": 1.0}, r"dropout: expected .*, got 1\.0"),
        ({"layers": 0}, "layers: expected .*, got 0"),
    ],
)
def test_invalid_sizes(changes, message):
    with pytest.raises(InvalidInput, match=message):
        replace(CONFIG, **changes)


def test_classifier_of_equal_size_survives_json():
    assert config_from_dict(json.loads(json.dumps(asdict(CONFIG)))) == CONFIG
    ours = ModelConfig(EncoderConfig(width=26, heads=2, layers=2), TEXT, outputs=3)
    config = equal_parameters(ours, replace(CONFIG, width=26))
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    wanted, result = (count_parameters(Classifier(c)) for c in (ours, config))
    assert abs(wanted - result) <= CONFIG.layers * 26
    model = Classifier(replace(config, task="tokens")).eval()
    assert model(collate(texts(12, 1))).shape == (13, 3)
