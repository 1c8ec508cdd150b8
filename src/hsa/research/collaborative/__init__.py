"""Trained heads that come to share one query and one key projection (Cordonnier, Loukas & Jaggi 2020, arXiv:2006.16362).

`collaborate` changes a trained model, `prepare_collaborative` prepares one to load weights saved after that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from hsa.research.collaborative.report import CollaborationReport

__all__ = ["collaborate", "prepare_collaborative"]


def collaborate(
    model: Any,
    shared_dim: int | float,
    *,
    inputs: Iterable[Mapping[str, Tensor]] | None = None,
    iterations: int = 100,
) -> CollaborationReport:
    """Give the self-attention layers of a trained model shared query and key projections, in place.

    Each head then compares scale · Σ_r mixing[h, r] · query_r · key_r over all shared channels; values and output projection
    stay. This saves parameters, not time: a head compares shared_dim channels instead of head_dim. With shared_dim of all
    channels the model computes what it did before. It runs forward and backward as before and can be fine-tuned to make up
    for what sharing cost.

    Args:
        model: Either an encoder of BERT's kind from transformers (BERT, RoBERTa, XLM-RoBERTa, ELECTRA, CamemBERT, …) or a
            model around one: layers with `query`, `key` and `value` and nothing between projection and comparison. Or an
            `hsa.models.language_model.LanguageModel` that concatenates heads and has no rotary positions.
        shared_dim: Channels that the heads of a layer share, or, as a float, their share of heads · head_dim. For a
            language model, a multiple of the channels of a head.
        inputs: For encoders: arguments of forward passes, such as `{"input_ids": …, "attention_mask": …}`, a few thousand
            tokens in all. Projections are then fitted to the logits on them instead of the weights.
        iterations: Most iterations of alternating least squares per layer.

    Raises:
        Unsupported: A model whose queries and keys are rotated or normalised before they are compared, or that has other
            projections; the message says which.
        InvalidInput: A shared_dim outside its bound, a model that has been converted.

    >>> from hsa.models.language_model import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(17, width=16, heads=4, layers=1, positions="tree"))
    >>> report = collaborate(model, 0.5)
    >>> report.shared_dim, report.layers[0].parameters_before, report.layers[0].parameters_after
    (8, 512, 288)
    """
    from hsa.research.collaborative import huggingface, language_model

    if language_model.is_ours(model):
        return language_model.collaborate(model, shared_dim, inputs=inputs, iterations=iterations)
    return huggingface.collaborate(model, shared_dim, inputs=inputs, iterations=iterations)


def prepare_collaborative(model: Any, shared_dim: int | float | None = None) -> None:
    """Give an encoder of transformers the form that `collaborate` does, with projections yet to be loaded or trained.

    `save_pretrained` writes the new parameters (`query`, `key`, `mixing`) and notes shared_dim in the config. To load them:

        model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
        prepare_collaborative(model)
        model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))

    Args:
        model: An encoder, as for `collaborate`.
        shared_dim: As for `collaborate`; that of the model's config by default.
    """
    from hsa.research.collaborative import huggingface

    huggingface.prepare(model, shared_dim)
