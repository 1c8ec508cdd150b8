"""Collaborative heads in trained language models of this library."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hsa.errors import InvalidInput, Unsupported
from hsa.models.language_model import LanguageModel
from hsa.nn.decoder import DecoderLayer
from hsa.nn.layer import EncoderLayer
from hsa.research.collaborative.heads import SharedProjections, check_shared_dim, share_projections
from hsa.research.collaborative.report import CollaborationReport, all_parameters
from hsa.research.head_fusion import CollaborativeHeads


def is_ours(model: Any) -> bool:
    """Return whether a model consists of layers of this library."""
    return isinstance(model, nn.Module) and any(
        isinstance(module, DecoderLayer | EncoderLayer) for module in model.modules()
    )


def collaborate(model: LanguageModel, shared_dim: int | float, *, inputs: Any, iterations: int) -> CollaborationReport:
    """Change a language model in place; see `hsa.research.collaborative.collaborate`."""
    _check(model)
    if inputs is not None:
        raise InvalidInput(
            "inputs", got="inputs for a language model of hsa", expected="None", fix="Pass inputs only with encoders"
        )
    channels = model.config.width
    shared = check_shared_dim(shared_dim, channels)
    config = replace(model.config, fusion="collaborative", shared_dim=shared)
    before = all_parameters(model)
    layers = [_share(layer, shared, iterations) for layer in model.layers]
    model.config = config
    return CollaborationReport.of(layers, channels, before, all_parameters(model))


@torch.no_grad()
def _share(layer: Any, shared_dim: int, iterations: int) -> SharedProjections:
    """Give a `DecoderLayer` shared projections in place; return them."""
    weight = layer.project.weight
    fusion = CollaborativeHeads(layer.heads, layer.head_dim, shared_dim).to(weight)
    q, k, v = weight.split([blocks * layer.head_dim for blocks in layer.blocks])
    shared = share_projections(q, None, k, None, layer.heads, shared_dim, iterations=iterations)
    fusion.mix_channels.copy_(shared.mixing)
    projections = torch.cat([shared.query_weight, shared.key_weight, v])
    outputs, width = projections.shape
    layer.project = nn.Linear(width, outputs, bias=False, device=weight.device, dtype=weight.dtype)
    layer.project.weight.copy_(projections)
    layer.project.requires_grad_(weight.requires_grad)
    layer.fusion, layer.blocks = (
        fusion.requires_grad_(weight.requires_grad),
        [fusion.blocks, fusion.blocks, layer.heads],
    )
    # The layer has no biases, so the last coordinate of both factors is 0 and not stored.
    return replace(shared, parameters_after=shared.parameters_after - 2 * shared_dim)


def _check(model: Any) -> None:
    if not isinstance(model, LanguageModel):
        raise Unsupported(
            f"{type(model).__name__} cannot share trained projections: its queries and keys are normalised after "
            "projection, which leaves no bilinear form to share"
        )
    config = model.config
    if config.positions != "tree":
        raise Unsupported(
            f"a language model with positions={config.positions!r} cannot share trained projections: queries and keys are "
            "rotated before they are compared, which leaves no bilinear form to share; train with positions='tree'"
        )
    if config.fusion != "concatenation" or (config.kv_heads or config.heads) != config.heads:
        raise InvalidInput(
            "model",
            got=f"fusion {config.fusion!r} with {config.kv_heads or config.heads} key heads for {config.heads} heads",
            expected="fusion 'concatenation' with a key projection per head",
        )
