"""A trained language model whose heads share their query and key projections."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hsa.errors import InvalidInput, Unsupported
from hsa.models.language_model import LanguageModel
from hsa.nn.decoder import DecoderLayer
from hsa.nn.layer import HierarchicalEncoderLayer
from hsa.research.collaborative.heads import SharedProjections, share_projections


def collaborative(model: LanguageModel, shared_dim: int) -> tuple[LanguageModel, list[SharedProjections]]:
    """The model with collaborative heads, and what that cost in every layer: parameters and error.

    What heads compare is decomposed (`hsa.research.collaborative.heads.share_projections`); everything else stays. At `shared_dim` = width
    the new model gives the same logits.

    Args:
        model: one that concatenates heads and has no rotary positions: a rotation between projection and comparison leaves
            no bilinear form to share.
        shared_dim: channels of the shared queries and keys, a multiple of the channels of a head.

    Raises:
        Unsupported: other models.
        InvalidInput: a `shared_dim` that does not fit.

    >>> from hsa.models.language_model import LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(17, width=16, heads=4, layers=1, positions="tree"))
    >>> shared, layers = collaborative(model, shared_dim=8)
    >>> layers[0].parameters_before, layers[0].parameters_after
    (512, 288)
    """
    _check(model)
    config = replace(model.config, fusion="collaborative", shared_dim=shared_dim)
    new = LanguageModel(config).to(model.device, model.embedding.weight.dtype)
    kept = {name: x for name, x in model.state_dict().items() if not name.endswith("project.weight")}
    new.load_state_dict(kept, strict=False)
    found = []
    for old, layer in zip(model.layers, new.layers, strict=True):
        assert isinstance(old, DecoderLayer)
        assert isinstance(layer, DecoderLayer)
        found.append(_share(old, layer))
    return new.train(model.training), found


@torch.no_grad()
def _share(old: DecoderLayer, new: DecoderLayer) -> SharedProjections:
    q, k, v = old.project.weight.split([blocks * old.head_dim for blocks in old.blocks])
    shared = share_projections(q, None, k, None, old.heads, new.fusion.key_dim)
    new.project.weight.copy_(torch.cat([shared.query_weight, shared.key_weight, v]))
    new.fusion.mix_channels.copy_(shared.mixing)  # type: ignore[operator]
    # Without biases the last coordinate of the decomposition is 0, and not a parameter.
    return replace(shared, parameters_after=shared.parameters_after - 2 * shared.shared_dim)


def _check(model: Any) -> None:
    if not isinstance(model, LanguageModel):
        reason = (
            "its queries and keys are normalised after projection, which leaves no bilinear form to share"
            if isinstance(model, nn.Module) and any(isinstance(m, HierarchicalEncoderLayer) for m in model.modules())
            else "it is no LanguageModel; for Hugging Face encoders there is hsa.research.collaborative.huggingface.collaborate"
        )
        raise Unsupported(f"{type(model).__name__} cannot share trained projections: {reason}")
    config = model.config
    if config.positions != "tree":
        raise Unsupported(
            f"a language model with positions={config.positions!r} cannot share trained projections: queries and keys are "
            "rotated before they are compared, which leaves no bilinear form to share; train one with positions='tree'"
        )
    if config.fusion != "concatenation" or (config.kv_heads or config.heads) != config.heads:
        raise InvalidInput(
            "model",
            given=f"fusion {config.fusion!r}, {config.kv_heads or config.heads} heads of keys for {config.heads}",
            expected="concatenation, with a key projection per head",
        )
