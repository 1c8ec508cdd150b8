"""Shared query and key projections for the heads of trained models (Cordonnier, Loukas & Jaggi 2020, arXiv:2006.16362).

`collaborate` changes a trained model; `prepare_collaborative` builds a model that can load the weights of a changed one.
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
    """Replace the query and key projections of a trained model by ones that all heads of a layer share, in place.

    The logits of head h become scale · Σ_r mixing[h, r] · query_r · key_r over all shared channels; values and output
    projections do not change. This saves parameters, not time, because a head compares shared_dim channels instead of
    head_dim. With shared_dim = heads · head_dim the model computes the same as before. The model can be fine-tuned
    afterwards to make up for the approximation.

    Args:
        model: Encoder of transformers similar to BERT (BERT, RoBERTa, XLM-RoBERTa, ELECTRA, CamemBERT, …), or a model that
            contains one; its layers have `query`, `key` and `value` and nothing between projection and comparison. Or an
            `hsa.models.LanguageModel` that concatenates heads and has no rotary positions.
        shared_dim: Number of channels that the heads of a layer share, or, as a float, their share of heads · head_dim. For
            a language model, a multiple of head_dim.
        inputs: Keyword arguments of forward passes of an encoder, such as `{"input_ids": …, "attention_mask": …}`, with a
            few thousand tokens in total. If given, projections are fitted to the logits on these inputs instead of to
            the weights, which is more accurate.
        iterations: Maximum number of iterations of alternating least squares per layer.

    Raises:
        Unsupported: If queries and keys are rotated or normalised before they are compared, or the model has other
            projections; the message names the reason.
        InvalidInput: If shared_dim is out of range, or the model has been converted.

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
    """Give an encoder of transformers untrained shared projections, so that it can load the weights of a changed model.

    `save_pretrained` writes the new parameters (`query`, `key`, `mixing`), and shared_dim in the config. To load them:

        model = AutoModel.from_config(AutoConfig.from_pretrained(folder))
        prepare_collaborative(model)
        model.load_state_dict(safetensors.torch.load_file(folder / "model.safetensors"))

    Args:
        model: Encoder, as for `collaborate`.
        shared_dim: Number of shared channels, as for `collaborate`; by default that in the model's config.
    """
    from hsa.research.collaborative import huggingface

    huggingface.prepare(model, shared_dim)
