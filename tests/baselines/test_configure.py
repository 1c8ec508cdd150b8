"""Published document models from options: sizes, levels, and what is said where data or options do not fit."""

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
    """Documents of so many levels above their words."""

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
def test_as_many_parameters_as_the_first(name, reference):
    data = prepared(2)
    configs = (model_config(data, MODEL, one, reference) for one in (name, reference))
    ours, wanted = (count_parameters(Classifier(config)) for config in configs)
    assert abs(ours / wanted - 1) < 0.005


def test_han_has_the_levels_of_the_data():
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
def test_hat_has_as_many_layers_in_all(layers, layout, pattern):
    forest, options = prepared(2).train.batch.hierarchy, DocumentOptions(layout=layout)
    assert config_of("hat", ModelOptions(layers=layers), options, forest).pattern == pattern


def test_levels_that_data_lack():
    forest = prepared(2).train.batch.hierarchy
    with pytest.raises(InvalidInput, match=r"levels: given 3, expected at most 2: the trees of these data have"):
        config_of("han", MODEL, DocumentOptions(levels=3), forest)
    with pytest.raises(InvalidInput, match=r"segment_level: given 3, for trees of 2 levels above their leaves"):
        config_of("hat", MODEL, DocumentOptions(segment_level=3), forest)


@pytest.mark.parametrize(
    ("name", "value"), [("levels", 0), ("segment", 0), ("segment_level", -1), ("memory", -1), ("test_memory", -1)]
)
def test_options_that_mean_nothing(name, value):
    with pytest.raises(InvalidInput, match=f"{name}: given {value}, expected {value + 1} or more"):
        DocumentOptions(**{name: value})
    assert getattr(DocumentOptions(**{name: value + 1}), name) == value + 1


def test_what_hat_starts_from_is_loaded_once(monkeypatch):
    asked = []

    def warm_start(name, **options):
        asked.append(name)
        config = HatConfig(width=32, heads=2, layers=1, segment=5, warm_start=name)
        return config, HatEncoder(config, {"text": Modality(tokens=11)}).state_dict()

    monkeypatch.setattr("hsa.baselines.hat.warm_start.warm_start", warm_start)
    options = DocumentOptions(segment=5, warm_start="a model")
    config = config_of("hat", MODEL, options, prepared(2).train.batch.hierarchy)
    encoder = HatEncoder(config, {"text": Modality(tokens=11)})
    fresh = {name: tensor.clone() for name, tensor in encoder.state_dict().items()}
    start_warm(encoder)
    assert asked == ["a model"]
    assert not torch.equal(encoder.state_dict()["marks.weight"], fresh["marks.weight"])


def test_more_that_does_not_fit():
    with pytest.raises(InvalidInput, match="layout: given 'interlaced'"):
        DocumentOptions(layout="interlaced")
    with pytest.raises(InvalidInput, match=r"'hat\+talking', expected hat: how its heads are fused is part of it"):
        check_models(["hat+talking"])
    with pytest.raises(InvalidInput, match="heads that divide the width"):
        config_of("han", ModelOptions(width=16, heads=3), DocumentOptions(), prepared(2).train.batch.hierarchy)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("hats", "hat"), ("transformerxl", "transformer-xl"), ("Han", "han"), ("multiscales", "multiscale")],
)
def test_the_nearest_name(name, meant):
    with pytest.raises(InvalidInput, match=f"did you mean '{meant}'") as error:
        check_models(["hierarchical", name])
    assert repr(name) in str(error.value)
    check_models(["hierarchical", meant])
    with pytest.raises(InvalidInput) as error:
        check_models(["quux"])
    assert "did you mean" not in str(error.value)
