"""Trained language models whose heads come to share projections."""

import pytest
import torch

from hsa.errors import HsaError
from hsa.models.classifier import Classifier, ModelConfig
from hsa.models.language_model import LanguageModel, LanguageModelConfig
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.research.collaborative.language_model import collaborative

SIZES = {"width": 24, "heads": 3, "layers": 2, "branching": (3, 2), "positions": "tree"}


def trained(**changes):
    torch.manual_seed(3)
    model = LanguageModel(LanguageModelConfig(19, **{**SIZES, **changes})).double()
    for layer in model.layers:  # weights as training leaves them: logits that matter
        torch.nn.init.normal_(layer.project.weight, std=0.5)
    return model


@pytest.mark.parametrize("attention", ["flat", "multiscale", "clustered"])
def test_as_many_channels_as_heads_have_change_nothing(attention):
    model = trained(attention=attention)
    shared, layers = collaborative(model, 24)
    tokens = torch.randint(19, (31,))
    torch.testing.assert_close(shared(tokens, [20, 11]), model(tokens, [20, 11]), rtol=1e-9, atol=1e-9)
    assert max(layer.error for layer in layers) < 1e-7
    assert shared.config.fusion == "collaborative"


def test_fewer_channels_save_parameters_and_cost_accuracy():
    model = trained()
    tokens = torch.randint(19, (40,))
    exact = model(tokens, [40]).detach()
    errors, sizes = [], []
    for channels in (8, 16, 24):
        shared, layers = collaborative(model, channels)
        errors.append(float((shared(tokens, [40]).detach() - exact).norm() / exact.norm()))
        sizes.append(sum(p.numel() for p in shared.parameters()))
        before = sum(p.numel() for p in model.parameters())
        assert before - sizes[-1] == sum(x.parameters_before - x.parameters_after for x in layers)
    assert errors[0] > errors[1] > errors[2]
    assert sizes[0] < sizes[1] < sizes[2]


def test_heads_that_are_alike_share_for_nothing():
    model = trained()
    with torch.no_grad():
        for layer in model.layers:
            q, k, v = layer.project.weight.split(24)
            layer.project.weight.copy_(torch.cat([q[:8].repeat(3, 1), k[:8].repeat(3, 1), v]))
    shared, _ = collaborative(model, 8)
    tokens = torch.randint(19, (25,))
    torch.testing.assert_close(shared(tokens, [25]), model(tokens, [25]), rtol=1e-6, atol=1e-6)


def test_models_that_cannot():
    with pytest.raises(HsaError, match="rotated before they are compared"):
        collaborative(LanguageModel(LanguageModelConfig(19, width=24, heads=3, layers=1)), 8)
    with pytest.raises(HsaError, match="concatenation"):
        collaborative(trained(fusion="talking"), 8)
    with pytest.raises(HsaError, match="key projection per head"):
        collaborative(trained(kv_heads=1), 8)
    with pytest.raises(HsaError, match="multiple of 8"):
        collaborative(trained(), 9)
    classifier = Classifier(ModelConfig(EncoderConfig(width=16), {"text": Modality(tokens=10)}, outputs=3))
    with pytest.raises(HsaError, match="normalised after projection"):
        collaborative(classifier, 8)
    with pytest.raises(HsaError, match="no LanguageModel"):
        collaborative(torch.nn.Linear(2, 3), 8)
