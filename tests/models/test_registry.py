"""Models that are registered: a plug-in is trained, saved, loaded and explained as ours are."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hsa.cli.main import run
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.models.options import ModelOptions
from hsa.models.registry import (
    ARCHITECTURES,
    LANGUAGE_ARCHITECTURES,
    LANGUAGE_MODELS,
    MODELS,
    Architecture,
    Explanation,
    Model,
    config_from_dict,
    configure,
    create,
    explanation_of,
    find_model,
    required_tokenizer,
    start_warm,
)
from hsa.models.saved import CONFIG, FORMAT, load_language_model, load_model, load_seq2seq, save_model
from hsa.nn.embedding import Embedding, Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Signal
from hsa.signals.batch import collate
from hsa.training import checkpoint
from hsa.tree.hierarchy import Hierarchy

TEXT = {"text": Modality(tokens=13)}


@dataclass(frozen=True)
class BagConfig:
    """A plug-in's configuration."""

    width: int = 6
    dropout: float = 0.0
    feed_forward: int | None = None
    shape: tuple[int, ...] = (2, 3)
    architecture: str = field(default="bag", init=False)
    keeps_leaves = True
    has_fixed_size = False


class BagEncoder(nn.Module):
    """A plug-in's encoder: every leaf by itself."""

    def __init__(self, config, modalities, kinds, keys):
        super().__init__()
        self.config = config
        self.embedding = Embedding(modalities, config.width)
        inner = config.feed_forward or config.width
        self.mlp = nn.Sequential(nn.Linear(config.width, inner), nn.GELU(), nn.Linear(inner, config.width))

    def prepare(self, inputs):
        """Nothing depends on the forest alone."""

    def forward(self, inputs):
        x = self.embedding(inputs.values, inputs.leaves, inputs.hierarchy.num_leaves)
        return self.mlp(x), inputs.hierarchy


@pytest.fixture
def plugin(monkeypatch):
    """A package `bags` as a user would write it, its model "bag" and what its hooks were asked."""
    asked = []

    def draw(path, model, example, labels, title):
        asked.append("explanation")
        path.write_text(title)

    def warm_start(encoder, load):
        asked.append(f"warm start, load={load}")
        return [encoder.mlp[0].weight]

    bags = types.ModuleType("bags")
    bags.PICTURE = Explanation("bag.txt", leaves=1000, draw=draw)
    bags.BAG = Architecture(
        BagConfig,
        BagEncoder,
        lambda options, extra, hierarchy, changes: BagConfig(**{"width": options.width, **changes}),
        warm_start=warm_start,
        tokenizer=lambda extra, say: extra.get("bag tokenizer"),
        explanation="bags:PICTURE",
    )
    monkeypatch.setitem(sys.modules, "bags", bags)
    ARCHITECTURES.register("bag", "bags:BAG")
    MODELS.register("bag", Model("bag"))
    MODELS.register("wide-bag", Model("bag", {"width": 12}, fuses=False))
    yield asked
    for registry, name in ((ARCHITECTURES, "bag"), (MODELS, "bag"), (MODELS, "wide-bag")):
        registry.remove(name)


def bag(name="bag", **options):
    return configure(name, ModelOptions(**options), {}, Hierarchy.flat([5]))


def hsa(*arguments):
    with pytest.raises(SystemExit) as caught:
        run([str(argument) for argument in arguments])
    assert caught.value.code == 0


def test_created_by_name(plugin):
    assert bag(width=10) == BagConfig(width=10)
    assert bag("wide-bag", width=10) == BagConfig(width=12)
    encoder = create(bag(width=10), TEXT, kinds=(), keys=())
    assert isinstance(encoder, BagEncoder)
    assert start_warm(encoder, load=False) == [encoder.mlp[0].weight]
    assert plugin == ["warm start, load=False"]
    assert required_tokenizer(["flat", "bag"], {"bag tokenizer": "words"}, print) == "words"
    assert required_tokenizer(["flat", "bag"], {}, print) is None


def test_models_are_matched_in_size(plugin):
    flat = ModelConfig(EncoderConfig(kind="flat", width=16), TEXT, outputs=3)
    matched = equal_parameters(flat, bag(width=16))
    sizes = [count_parameters(Classifier(config)) for config in (flat, matched)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)


def test_saved_and_loaded(plugin, tmp_path):
    model = Classifier(ModelConfig(bag(width=10), TEXT, outputs=3)).eval()
    save_model(tmp_path, model, ("a", "b", "c"))
    loaded, classes = load_model(tmp_path)
    assert (loaded.config, classes) == (model.config, ("a", "b", "c"))
    batch = collate([Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    assert torch.equal(loaded(batch), model(batch))
    assert explanation_of(loaded).file == "bag.txt"
    assert config_from_dict(json.loads(json.dumps(model.config.to_dict()))["encoder"]) == model.config.encoder


def test_trained_compared_and_explained_by_the_command(plugin, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = [{"text": f"{'good' if i % 2 else 'bad'} film {i}", "label": "ab"[i % 2]} for i in range(40)]
    Path("films.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ("--text", "text", "--label", "label", "--width", "16", "--vocabulary", "300", "--epochs", "2", "--cpu")
    command = ("train", "films.jsonl", *options, "--models", "bag", "flat", "--out", "run")
    hsa(*command)
    assert plugin == ["warm start, load=True", "explanation"]
    assert Path("run/bag.txt").read_text().startswith("bag: ")
    assert "| bag | " in Path("run/report.md").read_text()
    assert isinstance(load_model(Path("run/bag"))[0].encoder, BagEncoder)
    hsa("evaluate", "run/bag", "films.jsonl")
    hsa("predict", "run/bag", "films.jsonl")


def test_options_that_do_not_apply(plugin):
    model = Classifier(ModelConfig(EncoderConfig(width=8, kind="none"), TEXT, outputs=2))
    assert explanation_of(model) is None  # no attention, no matrix
    assert start_warm(model.encoder) == []
    with pytest.raises(
        InvalidInput,
        match=r"^models: expected wide-bag, whose heads .*, got 'wide-bag\+talking'",
    ):
        find_model("wide-bag+talking")
    with pytest.raises(
        InvalidInput, match=r"^models: expected flat\+ and one of concatenation, talking, .*, got 'flat\+tlking'"
    ):
        find_model("flat+tlking")


@pytest.mark.parametrize(
    ("registry", "name", "nearest"),
    [
        (MODELS, "hierarchcal", "hierarchical"),
        (MODELS, "hatt", "hat"),
        (LANGUAGE_MODELS, "multiscal", "multiscale"),
        (ARCHITECTURES, "trees", "tree"),
        (LANGUAGE_ARCHITECTURES, "transformer", "transformer-xl"),
    ],
)
def test_unknown_names(registry, name, nearest):
    with pytest.raises(InvalidInput, match=f"expected one of .*, got '{name}'. Did you mean '{nearest}'"):
        registry.get(name)


@pytest.mark.parametrize("registry", [MODELS, LANGUAGE_MODELS])
def test_every_model_has_an_architecture(registry):
    architectures = ARCHITECTURES if registry is MODELS else LANGUAGE_ARCHITECTURES
    for name in registry.names():
        architecture = registry.get(name).architecture
        assert architectures.get(architecture).config.__dataclass_fields__["architecture"].default == architecture


def test_names_need_no_torch():
    code = """if True:
        import sys
        import hsa.baselines, hsa.models.registry, hsa.research, hsa.training.tasks
        names = hsa.models.registry.MODELS.names(), hsa.models.registry.LANGUAGE_MODELS.names()
        presets = [hsa.training.tasks.TASKS.get(name).preset(None, False) for name in hsa.training.tasks.TASKS.names()]
        print("torch" in sys.modules, "numpy" in sys.modules, len(presets))
    """
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout == "False False 5\n"


@pytest.mark.parametrize("load", [load_model, load_language_model, load_seq2seq])
@pytest.mark.parametrize(
    ("format_", "message"),
    [
        (
            None,
            "expected format 2, which .*, got a model that hsa 0.1 saved. Train it again, or load it with hsa 0.1$",
        ),
        (
            FORMAT + 1,
            "expected format 2, which .*, got format 3. Load it with the version of hsa that saved it$",
        ),
    ],
)
def test_models_of_other_versions_are_refused(load, format_, message, tmp_path):
    save_model(tmp_path, Classifier(ModelConfig(EncoderConfig(width=8), TEXT, outputs=2)))
    about = json.loads((tmp_path / CONFIG).read_text())
    about = {name: value for name, value in about.items() if name != "format"}
    (tmp_path / CONFIG).write_text(json.dumps(about if format_ is None else {**about, "format": format_}))
    with pytest.raises(InvalidInput, match=message):
        load(tmp_path)


@pytest.mark.parametrize(("format_", "got"), [(1, "a checkpoint of hsa 0.1"), (checkpoint.FORMAT + 1, "format 3")])
def test_checkpoints_of_other_versions_are_refused(format_, got, tmp_path):
    model = nn.Linear(2, 2)
    content = checkpoint.gather(model, torch.optim.SGD(model.parameters()), {})
    checkpoint.save(tmp_path / "checkpoint.pt", {**content, "format": format_})
    with pytest.raises(InvalidInput, match=f"expected a checkpoint of hsa, format 2, got {got}. Delete it"):
        checkpoint.load(tmp_path / "checkpoint.pt")


def test_changes_of_a_model_win_over_the_options():
    multiscale = configure("multiscale", ModelOptions(width=20, position_input=False), {}, Hierarchy.flat([5]))
    assert multiscale == replace(
        EncoderConfig(width=20), kind="multiscale", position_input=True, position_dim=0, entmax_levels=1
    )
