"""The heads of a transformers encoder: what they do in a forward pass, and the model without some of them.

Works for every layer that takes its attention from transformers' attention interface: BERT, RoBERTa, DistilBERT, ELECTRA,
ModernBERT, ViT and their kin. Inside a `with` block the model uses an attention function of ours, which runs the one it had,
passes queries, keys and outputs on, and sets the outputs of pruned heads to 0.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hsa.errors import InvalidInput, Unsupported
from hsa.huggingface.layers import attention_layers, is_causal
from hsa.huggingface.loading import load_for_task, loading, transformers_library

NAME = "hsa-heads"
_PURPOSE = "the heads of pre-trained models"


@dataclass
class _Shown:
    """State of our attention function for one model."""

    before: str  # attention implementation of the model
    numbers: dict[int, int]  # layer of every attention module, by its id
    see: Callable[..., None] | None = None
    gone: dict[int, list[int]] = field(default_factory=dict)  # heads of every layer
    mask: Tensor | None = None  # [batch, tokens] of the forward pass we are in


_SHOWN: ContextVar[_Shown | None] = ContextVar("hsa_heads", default=None)


class TransformerHeads:
    """The heads of a transformers encoder; implements `hsa.research.head_kernels.heads.Heads`.

    Args:
        model: a `PreTrainedModel` that takes its attention from transformers' interface, and whose tokens see later ones.

    Raises:
        Unsupported: a model whose attention is its own, or one with a decoder.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> TransformerHeads(model).counts
    (4, 4, 4)
    """

    def __init__(self, model: Any):
        kind = type(model).__name__
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise Unsupported(f"{kind} has a decoder, which attends to an encoder; give its encoder alone")
        self._modules: list[Any] = list(attention_layers(model))
        if any(is_causal(module) for module in self._modules):
            raise Unsupported(
                f"{kind} is a decoder, whose tokens see no later ones; give an encoder, such as a BERT or a ViT"
            )
        self._model = model

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(int(module.config.num_attention_heads) for module in self._modules)

    @contextmanager
    def watching(self, see: Callable[..., None]) -> Iterator[None]:
        with self._shown() as shown:
            shown.see = see
            yield

    @contextmanager
    def without(self, pruned: Iterable[tuple[int, int]]) -> Iterator[None]:
        with self._shown() as shown:
            for layer, head in pruned:
                shown.gone.setdefault(layer, []).append(head)
            yield

    @contextmanager
    def _shown(self) -> Iterator[_Shown]:
        library = transformers_library(_PURPOSE)
        library.AttentionInterface.register(NAME, _attention)
        library.AttentionMaskInterface.register(NAME, _mask)
        if _SHOWN.get() is not None:
            raise InvalidInput("heads", given="a model that is being shown", expected="one at a time")
        configs = {id(module.config): module.config for module in (self._model, *self._modules)}
        had = {key: config._attn_implementation for key, config in configs.items()}
        now = self._modules[0].config._attn_implementation
        numbers = {id(module): number for number, module in enumerate(self._modules)}
        shown = _Shown("sdpa" if now in (None, "eager") else now, numbers)
        signature = inspect.signature(self._model.forward)

        def begin(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            mask = signature.bind_partial(*arguments, **options).arguments.get("attention_mask")
            shown.mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

        hook = self._model.register_forward_pre_hook(begin, with_kwargs=True)
        token = _SHOWN.set(shown)
        try:
            for config in configs.values():
                config._attn_implementation = NAME
            yield shown
        finally:
            for key, config in configs.items():
                config._attn_implementation = had[key]
            _SHOWN.reset(token)
            hook.remove()


def _state() -> _Shown:
    shown = _SHOWN.get()
    if shown is None:
        raise InvalidInput(
            "attn_implementation", given=f"{NAME!r}", expected="another: this one is for TransformerHeads"
        )
    return shown


def _mask(*arguments: Any, **options: Any) -> Any:
    return transformers_library(_PURPOSE).AttentionMaskInterface()[_state().before](*arguments, **options)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    shown = _state()
    run = transformers_library(_PURPOSE).AttentionInterface()[shown.before]
    out, weights = run(module, query, key, value, mask, **options)
    number = shown.numbers[id(module)]
    if shown.see is not None:
        here = shown.mask
        if here is None:
            here = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
        groups = query.shape[1] // key.shape[1]
        q, k = query.transpose(1, 2)[here], key.repeat_interleave(groups, 1).transpose(1, 2)[here]
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        shown.see(number, q, k, out[here], here.sum(1).tolist(), scale)
    if number in shown.gone:
        out = out.index_fill(2, torch.tensor(shown.gone[number], device=out.device), 0.0)
    return out, weights


def load_encoder(
    name: str, *, labelled: bool, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any, str]:
    """Load an encoder, its tokenizer and its task: "classification" with its head if labels ask for it, else "embedding".

    Args:
        labelled: whether there are labels that a classifier can be tested on.

    Raises:
        InvalidInput: the model does not load.
        Unsupported: it is not an encoder.
    """
    library = transformers_library(_PURPOSE)
    with loading(name):
        config = library.AutoConfig.from_pretrained(name)
    if config.is_encoder_decoder:
        raise Unsupported(f"{name} is a {config.model_type}, which has a decoder; give an encoder, such as a BERT")
    classifies = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    task = "classification" if labelled and classifies else "embedding"
    model, tokenizer = load_for_task(name, task, dtype=dtype, device=device)
    return model, tokenizer, task
