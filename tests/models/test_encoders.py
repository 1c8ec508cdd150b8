"""Properties of the classifiers of all encoders, ours and the published ones."""

import gc
import json
import weakref
from dataclasses import replace

import pytest
import torch

from hsa.baselines.han.model import HanConfig
from hsa.baselines.hat.model import HatConfig
from hsa.baselines.transformer_xl.encoder import TransformerXLConfig
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, closest_size, count_parameters, equal_parameters
from hsa.models.registry import config_from_dict
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.signals import Leaf, Sequence, Signal
from hsa.signals.batch import collate

SIZES = {"width": 26, "heads": 2}
ENCODERS = {
    "hierarchical": EncoderConfig(**SIZES, layers=2),
    "multiscale": EncoderConfig(**SIZES, layers=2, kind="multiscale"),
    "flat": EncoderConfig(**SIZES, layers=2, kind="flat"),
    "deepsets": EncoderConfig(**SIZES, layers=2, kind="none"),
    "han": HanConfig(**SIZES),
    "han, gru": HanConfig(**SIZES, encoder="gru"),
    "hat": HatConfig(**SIZES, segment=5),
    "hat, sentences": HatConfig(**SIZES, segment=5, segment_level=1),
    "hat, leaves": HatConfig(**SIZES, segment=5, returns="leaves"),
    "transformer-xl": TransformerXLConfig(**SIZES, segment=5, memory=3, test_memory=7),
    "transformer-xl, no memory": TransformerXLConfig(**SIZES, segment=5, memory=0),
}
TOKENS, OUTPUTS = 31, 3
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def model(encoder, **more):
    torch.manual_seed(0)
    result = Classifier(ModelConfig(encoder, {"text": Modality(tokens=TOKENS)}, OUTPUTS, **more)).double()
    for parameter in result.parameters():  # parameters that start at zero would hide their effect
        torch.nn.init.normal_(parameter, std=0.3)
    return result.eval()


def document(*lengths, seed=0):
    """Return a document with a sentence of each length."""
    draw = torch.Generator().manual_seed(seed)
    sentences = [Signal.of(torch.randint(TOKENS, (n,), generator=draw), "text") for n in lengths]
    return Signal(Sequence(len(sentences)), sentences)


DOCUMENTS = [
    document(4, 7, 1),
    document(1),  # one token
    Leaf(3, "text"),  # not even a sentence
    Signal(Sequence(2), [document(3, 2, seed=1), Leaf(5, "text")]),  # of unequal depth
    document(13, seed=2),
    Signal(Sequence(1), [document(2, 2, seed=3)]),  # an only child
]


@pytest.mark.parametrize("documents", [DOCUMENTS, DOCUMENTS[:1]], ids=["all kinds", "one"])
@pytest.mark.parametrize("name", ENCODERS)
def test_batches_are_freed_when_they_are_deleted(name, documents):
    """Plans are kept with the forest: one that held on to it would keep both until the next search for circles."""
    result = model(ENCODERS[name])
    gc.collect()
    gc.disable()
    try:
        batch = collate(documents)
        result.encoder.prepare(batch)
        result(batch).sum().backward()
        forest = weakref.ref(batch.hierarchy)
        del batch
        assert forest() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ENCODERS)
def test_the_output_for_a_document_does_not_depend_on_its_batch(name):
    with torch.no_grad():
        result = model(ENCODERS[name])
        together = result(collate(DOCUMENTS))
        alone = torch.cat([result(collate([one])) for one in DOCUMENTS])
        turned = result(collate(DOCUMENTS[::-1])).flip(0)
    assert together.isfinite().all()
    assert together.unique(dim=0).shape == together.shape
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(together, turned, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("name", ENCODERS)
def test_every_parameter_is_trained(name):
    result = model(ENCODERS[name]).train()
    result(collate(DOCUMENTS)).square().sum().backward()
    # Position projections of levels, kinds and domains that these documents lack stay out of it.
    idle = [n for n, p in result.named_parameters() if p.grad is None and "position" not in n]
    assert not idle
    assert all(p.grad is None or p.grad.isfinite().all() for p in result.parameters())


def trained_once(result, batch):
    """Return the outputs and the gradients of all parameters that have one, in float64 and on the CPU."""
    out = result(batch)
    out.float().square().sum().backward()
    gradients = {name: p.grad.cpu().double() for name, p in result.named_parameters() if p.grad is not None}
    return out.detach().cpu().double(), gradients


def assert_near(result, wanted, share):
    """Check that differences are less than a share of the largest value."""
    for actual, expected in zip(result, wanted, strict=True):
        actual, expected = ([x] if isinstance(x, torch.Tensor) else list(x.values()) for x in (actual, expected))
        largest = max(float(x.abs().max()) for x in expected)
        assert len(actual) == len(expected)
        assert max(float((a - b).abs().max()) for a, b in zip(actual, expected, strict=True)) < share * largest


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENCODERS)
def test_single_precision_on_a_device(name, device, monkeypatch):
    """Outputs and gradients equal those in double precision on the CPU, up to rounding."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # GRUs round inputs to ten bits otherwise
    result, batch = model(replace(ENCODERS[name], dropout=0.0)).train(), collate(DOCUMENTS)
    wanted = trained_once(result, batch)
    result.zero_grad()
    there = trained_once(result.float().to(device), batch.to(device))
    assert next(result.parameters()).device.type == device
    assert_near(there, wanted, 1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", ENCODERS)
def test_half_precision_on_a_device(name, device):
    result, batch = (
        model(replace(ENCODERS[name], dropout=0.0)).float().to(device).train(),
        collate(DOCUMENTS).to(device),
    )
    wanted = trained_once(result, batch)
    result.zero_grad()
    with torch.autocast(device, torch.bfloat16):
        halves = trained_once(result, batch)
    assert_near(halves[:1], wanted[:1], 0.1)
    assert_near(halves[1:], wanted[1:], 0.3)


@pytest.mark.parametrize("name", ENCODERS)
def test_no_documents(name):
    none = collate(DOCUMENTS).select([])
    assert model(ENCODERS[name])(none).shape == (0, OUTPUTS)


@pytest.mark.parametrize("name", ENCODERS)
def test_configurations_survive_json(name):
    config = model(ENCODERS[name]).config
    assert ModelConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", ENCODERS)
def test_matched_encoders_have_as_many_parameters(name):
    reference = ModelConfig(EncoderConfig(width=128, layers=2), {"text": Modality(tokens=8192)}, OUTPUTS)
    own = {
        "width": 128,
        "heads": 4,
        "layers": 1 if name.startswith("hat") else 2,
    }  # of hat inside segments, and one across
    if name.startswith("han") and "gru" not in name:
        own["head_dim"] = 16  # two levels share the channels
    sized = equal_parameters(reference, replace(ENCODERS[name], **own))
    wanted, result = (count_parameters(Classifier(c)) for c in (reference, sized))
    assert abs(result / wanted - 1) < 0.002


def test_the_closest_size():
    assert [closest_size(lambda size: 7 * size, wanted) for wanted in (0, 55, 56, 67, 7000)] == [8, 8, 8, 10, 1000]


@pytest.mark.parametrize("name", ["han", "hat"])
def test_encoders_that_pool_leaves_have_no_class_per_leaf(name):
    with pytest.raises(InvalidInput, match="expected an encoder that keeps leaves"):
        model(ENCODERS[name], task="tokens")


@pytest.mark.parametrize("name", ["hat, leaves", "transformer-xl"])
def test_a_class_per_leaf(name):
    batch = collate(DOCUMENTS)
    assert model(ENCODERS[name], task="tokens")(batch).shape == (batch.hierarchy.num_leaves, OUTPUTS)


def test_an_encoder_of_a_newer_version():
    with pytest.raises(
        InvalidInput, match=r"architecture: expected one of tree, han, hat, transformer-xl, got 'mamba'"
    ):
        config_from_dict({"architecture": "mamba"})
    with pytest.raises(InvalidInput, match="unknown field 'depth'"):
        config_from_dict({"architecture": "han", "depth": 3})
