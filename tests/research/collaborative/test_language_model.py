"""Shared projections in trained language models."""

import copy

import pytest
import torch

from hsa.errors import HsaError
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.research.collaborative import collaborate

SIZES = {"width": 24, "heads": 3, "layers": 2, "branching": (3, 2), "positions": "tree"}


def trained(**changes):
    torch.manual_seed(3)
    model = LanguageModel(LanguageModelConfig(19, **{**SIZES, **changes})).double()
    for layer in model.layers:  # as large as after training, so that logits matter
        torch.nn.init.normal_(layer.project.weight, std=0.5)
    return model


@pytest.mark.parametrize("attention", ["flat", "multiscale", "clustered"])
def test_all_channels_change_nothing(attention):
    model = trained(attention=attention, branching=(8, 8, 4))
    shared = copy.deepcopy(model)
    report = collaborate(shared, 24)
    tokens = torch.randint(19, (31,))
    torch.testing.assert_close(shared(tokens, [20, 11]), model(tokens, [20, 11]), rtol=1e-9, atol=1e-9)
    assert max(layer.error for layer in report.layers) < 1e-7
    assert shared.config.fusion == "collaborative"


def test_fewer_channels_save_parameters_and_cost_accuracy():
    model = trained()
    tokens = torch.randint(19, (40,))
    exact = model(tokens, [40]).detach()
    errors, sizes = [], []
    for channels in (8, 16, 24):
        shared = copy.deepcopy(model)
        report = collaborate(shared, channels)
        errors.append(float((shared(tokens, [40]).detach() - exact).norm() / exact.norm()))
        sizes.append(sum(p.numel() for p in shared.parameters()))
        before = sum(p.numel() for p in model.parameters())
        assert (report.shared_dim, report.channels) == (channels, 24)
        assert (
            report.saved == before - sizes[-1] == sum(x.parameters_before - x.parameters_after for x in report.layers)
        )
    assert errors[0] > errors[1] > errors[2]
    assert sizes[0] < sizes[1] < sizes[2]


def test_equal_heads_share_without_loss():
    model = trained()
    with torch.no_grad():
        for layer in model.layers:
            q, k, v = layer.project.weight.split(24)
            layer.project.weight.copy_(torch.cat([q[:8].repeat(3, 1), k[:8].repeat(3, 1), v]))
    shared = copy.deepcopy(model)
    collaborate(shared, 8)
    tokens = torch.randint(19, (25,))
    torch.testing.assert_close(shared(tokens, [25]), model(tokens, [25]), rtol=1e-6, atol=1e-6)


def test_changed_model_equals_one_built_with_collaborative_heads():
    """The model can be saved, loaded, trained and used with a cache."""
    model = trained()
    model.layers[0].project.requires_grad_(False)
    collaborate(model, 1 / 3)
    other = LanguageModel(model.config).double()
    other.load_state_dict(model.state_dict())
    tokens = torch.randint(19, (25,))
    torch.testing.assert_close(other(tokens, [25]), model(tokens, [25]))
    cache = model.new_cache(1)
    model.read(tokens[:-1], [24], cache)
    torch.testing.assert_close(model.step(tokens[-1:], cache), model(tokens, [25])[-1:])
    assert [p.requires_grad for p in model.layers[0].fusion.parameters()] == [False]
    assert model.layers[1].fusion.mix_channels.requires_grad


def test_unsupported_models():
    with pytest.raises(HsaError, match="rotated before they are compared"):
        collaborate(LanguageModel(LanguageModelConfig(19, width=24, heads=3, layers=1)), 8)
    with pytest.raises(HsaError, match="concatenation"):
        collaborate(trained(fusion="talking"), 8)
    with pytest.raises(HsaError, match="key projection per head"):
        collaborate(trained(kv_heads=1), 8)
    with pytest.raises(HsaError, match="multiple of 8"):
        collaborate(trained(), 9)
    classifier = Classifier(ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3))
    with pytest.raises(HsaError, match="normalised after projection"):
        collaborate(classifier, 8)
    with pytest.raises(HsaError, match="inputs: expected None, got inputs for a language model of hsa"):
        collaborate(trained(), 8, inputs=[])
