"""Configurations of the baselines from options: sizes, levels, and errors for data or options that do not fit."""

import pytest
import torch

from hsa.baselines.hat.model import HatConfig, HatEncoder
from hsa.baselines.options import DocumentOptions
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, count_parameters
from hsa.models.options import ModelOptions
from hsa.models.registry import configure, start_warm
from hsa.nn.embedding import Modality
from hsa.signals import Sequence, Signal
from hsa.training.data.data_set import Example, build
from hsa.training.data.prepare import Columns, InputSpec, PreparedData
from hsa.training.experiment import check_models, model_config

MODEL = ModelOptions(width=64, heads=4, layers=2)
OTHERS = ("han", "hat", "transformer-xl")


def config_of(name, model, documents, forest):
    return configure(name, model, {"documents": documents}, forest)


def prepared(depth):
    """Return documents with `depth` levels above their words."""

    def signal(level, i):
        if level == 1:
            return Signal.of(torch.arange(i % 3 + 2), "text")
        return Signal(Sequence(2), [signal(level - 1, i), signal(level - 1, i + 1)])

    data = build((Example(signal(depth, i), str(i % 2), f"document {i}") for i in range(6)), "classification")
    spec = InputSpec("rows", Columns(("text",), label="label"), 0, 0)
    modalities = {"text": Modality(tokens=4096)}
    return PreparedData(data, data, data, spec, modalities, ("sequence",), (), "classification")


@pytest.mark.parametrize("name", ["hierarchical", "multiscale", "deepsets", *OTHERS])
@pytest.mark.parametrize("reference", ["hierarchical", *OTHERS])
def test_models_match_the_parameters_of_the_reference(name, reference):
    data = prepared(2)
    configs = (model_config(data, MODEL, one, reference) for one in (name, reference))
    ours, wanted = (count_parameters(Classifier(config)) for config in configs)
    assert abs(ours / wanted - 1) < 0.005


def test_han_takes_its_levels_from_the_data():
    for depth, levels in ((1, 1), (2, 2), (3, 3), (5, 3)):
        forest = prepared(depth).train.batch.hierarchy
        result = config_of("han", MODEL, DocumentOptions(), forest)
        assert result.levels == levels
        assert result.head_dim == 16 // levels  # together the channels of one layer
    assert config_of("han", MODEL, DocumentOptions(levels=1, level_encoder="gru"), forest).encoder == "gru"


@pytest.mark.parametrize(
    ("layers", "layout", "pattern"),
    [
        (1, "interleaved", "SC"),
        (2, "interleaved", "SC"),
        (5, "interleaved", "SCSC"),
        (4, "late", "SSSC"),
        (2, "SSC", "SSC"),
    ],
)
def test_total_layers_of_hat(layers, layout, pattern):
    forest, options = prepared(2).train.batch.hierarchy, DocumentOptions(layout=layout)
    assert config_of("hat", ModelOptions(layers=layers), options, forest).pattern == pattern


def test_more_levels_than_the_data():
    forest = prepared(2).train.batch.hierarchy
    with pytest.raises(InvalidInput, match=r"levels: expected at most 2, the depth of these trees \(.*\), got 3"):
        config_of("han", MODEL, DocumentOptions(levels=3), forest)
    with pytest.raises(InvalidInput, match="segment_level: expected at most 2, the depth of these trees, got 3"):
        config_of("hat", MODEL, DocumentOptions(segment_level=3), forest)


@pytest.mark.parametrize(
    ("name", "value"), [("levels", 0), ("segment", 0), ("segment_level", -1), ("memory", -1), ("test_memory", -1)]
)
def test_options_below_their_minimum(name, value):
    with pytest.raises(InvalidInput, match=f"{name}: expected {value + 1} or more, got {value}"):
        DocumentOptions(**{name: value})
    assert getattr(DocumentOptions(**{name: value + 1}), name) == value + 1


def test_pretrained_encoder_of_hat_is_loaded_once(monkeypatch):
    loaded = []

    def warm_start(name, **options):
        loaded.append(name)
        config = HatConfig(width=32, heads=2, layers=1, segment=5, warm_start=name)
        return config, HatEncoder(config, {"text": Modality(tokens=11)}).state_dict()

    monkeypatch.setattr("hsa.baselines.hat.warm_start.warm_start", warm_start)
    options = DocumentOptions(segment=5, warm_start="a model")
    config = config_of("hat", MODEL, options, prepared(2).train.batch.hierarchy)
    encoder = HatEncoder(config, {"text": Modality(tokens=11)})
    fresh = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    start_warm(encoder)
    assert loaded == ["a model"]
    assert not torch.equal(encoder.state_dict()["marks.weight"], fresh["marks.weight"])


def test_invalid_combinations():
    with pytest.raises(InvalidInput, match=r"layout: expected .*, got 'interlaced'"):
        DocumentOptions(layout="interlaced")
    with pytest.raises(
        InvalidInput, match=r"expected hat, whose heads cannot be fused in another way, got 'hat\+talking'"
    ):
        check_models(["hat+talking"])
    with pytest.raises(InvalidInput, match="warm_start: expected hat among the models, got only han, flat"):
        DocumentOptions(warm_start="a model").check_models(["han", "flat"])
    with pytest.raises(InvalidInput, match="level_encoder: expected one of attention, gru, got 'lstm'"):
        DocumentOptions(level_encoder="lstm")
    with pytest.raises(InvalidInput, match="heads that divide the width"):
        config_of("han", ModelOptions(width=16, heads=3), DocumentOptions(), prepared(2).train.batch.hierarchy)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("hats", "hat"), ("transformerxl", "transformer-xl"), ("Han", "han"), ("multiscales", "multiscale")],
)
def test_nearest_name_is_suggested(name, meant):
    with pytest.raises(InvalidInput, match=f"(?i)did you mean '{meant}'") as error:
        check_models(["hierarchical", name])
    assert repr(name) in str(error.value)
    check_models(["hierarchical", meant])
    with pytest.raises(InvalidInput) as error:
        check_models(["quux"])
    assert "did you mean" not in str(error.value).lower()
