"""Observation and removal of the heads of transformers encoders.

Works for every layer that uses transformers' attention interface: BERT, RoBERTa, DistilBERT, ELECTRA, ModernBERT, ViT and
similar models. Inside a `with` block the model uses an attention function that calls its previous one, reports queries,
keys and outputs, and sets the outputs of removed heads to 0.
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
class _Observation:
    """State of the attention function for one model."""

    before: str  # attention implementation of the model
    numbers: dict[int, int]  # layer of every attention module, by its id
    see: Callable[..., None] | None = None
    removed: dict[int, list[int]] = field(default_factory=dict)  # heads by layer
    mask: Tensor | None = None  # [batch, tokens] of the current forward pass


_CURRENT: ContextVar[_Observation | None] = ContextVar("hsa_heads", default=None)


class TransformerHeads:
    """Heads of a transformers encoder; implements the protocol `hsa.research.head_kernels.heads.Heads`.

    Args:
        model: A `PreTrainedModel` without causal attention that uses transformers' attention interface.

    Raises:
        Unsupported: If the model has a decoder, or does not use the attention interface.

    >>> from transformers import BertConfig, BertModel
    >>> model = BertModel(BertConfig(hidden_size=32, num_attention_heads=4, num_hidden_layers=3, intermediate_size=8))
    >>> TransformerHeads(model).counts
    (4, 4, 4)
    """

    def __init__(self, model: Any):
        kind = type(model).__name__
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            raise Unsupported(f"{kind} has a decoder, which attends to an encoder; pass only its encoder")
        self._modules: list[Any] = list(attention_layers(model))
        if any(is_causal(module) for module in self._modules):
            raise Unsupported(f"{kind} is a causal decoder; pass an encoder, such as BERT or ViT")
        self._model = model

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(int(module.config.num_attention_heads) for module in self._modules)

    @contextmanager
    def watching(self, see: Callable[..., None]) -> Iterator[None]:
        with self._observed() as observation:
            observation.see = see
            yield

    @contextmanager
    def without(self, pruned: Iterable[tuple[int, int]]) -> Iterator[None]:
        with self._observed() as observation:
            for layer, head in pruned:
                observation.removed.setdefault(layer, []).append(head)
            yield

    @contextmanager
    def _observed(self) -> Iterator[_Observation]:
        library = transformers_library(_PURPOSE)
        library.AttentionInterface.register(NAME, _attention)
        library.AttentionMaskInterface.register(NAME, _mask)
        if _CURRENT.get() is not None:
            raise InvalidInput(
                "heads", problem="heads of a model are already being watched or removed", expected="one block at a time"
            )
        configs = {id(module.config): module.config for module in (self._model, *self._modules)}
        had = {key: config._attn_implementation for key, config in configs.items()}
        now = self._modules[0].config._attn_implementation
        numbers = {id(module): number for number, module in enumerate(self._modules)}
        observation = _Observation("sdpa" if now in (None, "eager") else now, numbers)
        signature = inspect.signature(self._model.forward)

        def begin(module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
            mask = signature.bind_partial(*arguments, **options).arguments.get("attention_mask")
            observation.mask = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None

        hook = self._model.register_forward_pre_hook(begin, with_kwargs=True)
        token = _CURRENT.set(observation)
        try:
            for config in configs.values():
                config._attn_implementation = NAME
            yield observation
        finally:
            for key, config in configs.items():
                config._attn_implementation = had[key]
            _CURRENT.reset(token)
            hook.remove()


def _state() -> _Observation:
    observation = _CURRENT.get()
    if observation is None:
        expected = "an implementation of transformers; this one works only inside TransformerHeads"
        raise InvalidInput("attn_implementation", got=repr(NAME), expected=expected)
    return observation


def _mask(*arguments: Any, **options: Any) -> Any:
    return transformers_library(_PURPOSE).AttentionMaskInterface()[_state().before](*arguments, **options)


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor | None]:
    observation = _state()
    run = transformers_library(_PURPOSE).AttentionInterface()[observation.before]
    out, weights = run(module, query, key, value, mask, **options)
    number = observation.numbers[id(module)]
    if observation.see is not None:
        real = observation.mask  # not padding
        if real is None:
            real = torch.ones(out.shape[:2], dtype=torch.bool, device=out.device)
        groups = query.shape[1] // key.shape[1]
        q, k = query.transpose(1, 2)[real], key.repeat_interleave(groups, 1).transpose(1, 2)[real]
        scale = options.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        observation.see(number, q, k, out[real], real.sum(1).tolist(), scale)
    if number in observation.removed:
        out = out.index_fill(2, torch.tensor(observation.removed[number], device=out.device), 0.0)
    return out, weights


def load_encoder(
    name: str, *, labelled: bool, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> tuple[Any, Any, str]:
    """Load an encoder; return it, its tokenizer and its task.

    The task is "classification" if the model has a classification head and there are labels, else "embedding".

    Args:
        name: Folder or hub name.
        labelled: Whether the examples have classes as labels.
        dtype, device: Dtype and device of the model.

    Raises:
        InvalidInput: If the model does not load.
        Unsupported: If it is not an encoder.
    """
    library = transformers_library(_PURPOSE)
    with loading(name):
        config = library.AutoConfig.from_pretrained(name)
    if config.is_encoder_decoder:
        raise Unsupported(f"{name} is a {config.model_type}, which has a decoder; pass an encoder, such as BERT")
    classifies = any(kind.endswith("ForSequenceClassification") for kind in config.architectures or ())
    task = "classification" if labelled and classifies else "embedding"
    model, tokenizer = load_for_task(name, task, dtype=dtype, device=device)
    return model, tokenizer, task
