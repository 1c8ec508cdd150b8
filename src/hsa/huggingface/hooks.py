"""`Conversion`: the state that the layers of a converted model share, and the hooks that prepare its forward passes."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hsa.errors import HsaWarning
from hsa.huggingface.loading import trained_context
from hsa.huggingface.passes import CURRENT, Pass
from hsa.huggingface.settings import LayerSettings
from hsa.huggingface.vocabulary import Vocabulary


class Conversion:
    """State of a converted model: its vocabulary, its hooks, and its former attention implementation.

    Hooks record the token ids of each forward pass, if a layer needs them, put caches of trees into empty caches, and warn
    about texts that are too long for the model. They are methods, so that copied and unpickled models have their own.
    """

    def __init__(self, before: str | None):
        self.before = before  # name of the former attention implementation
        self.vocabulary = Vocabulary()
        self.tree_caches: Mapping[int, LayerSettings] = {}  # by index in the model's cache
        self.warned = False  # of a text that is too long
        self._context: int | None = None
        self._hooks: list[Any] = []
        self._wrapper_hooks: list[Any] = []

    def hook(
        self,
        models: Iterable[Any] = (),
        wrappers: Sequence[Any] = (),
        *,
        record_ids: bool = False,
        tree_caches: Mapping[int, LayerSettings] | None = None,
    ) -> None:
        """Replace the hooks by those that are needed.

        Args:
            models: The converted model and the transformers models inside it.
            wrappers: Modules around it, if known, such as those of a `SentenceTransformer`, which calls `model.forward` and
                so bypasses the hooks of the model. Without them, earlier hooks of wrappers stay.
            record_ids: Whether a layer needs the token ids.
            tree_caches: Settings of layers with a cache of trees, by index in the model's cache.
        """
        _remove(self._hooks)
        if wrappers or not record_ids:
            _remove(self._wrapper_hooks)
        self.tree_caches = tree_caches or {}
        for model in models:
            if record_ids:
                self._hooks += self._record(model, self._begin)
            if self.tree_caches:
                self._context = trained_context(model.config)
                self._hooks.append(model.register_forward_pre_hook(self._prepare_cache, with_kwargs=True))
        if record_ids:
            for wrapper in wrappers:
                self._wrapper_hooks += self._record(wrapper, self._begin_wrapper)

    def _record(self, module: Any, begin: Any) -> list[Any]:
        return [
            module.register_forward_pre_hook(begin, with_kwargs=True),
            module.register_forward_hook(self._end, always_call=True),
        ]

    @torch.compiler.disable
    def _prepare_cache(
        self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Put caches of trees into an empty cache, or into a new one if the caller asks for a cache and passes none."""
        from transformers.cache_utils import DynamicCache

        from hsa.huggingface.cache import MAX_LENGTH, cache_trees

        cache = options.get("past_key_values")
        if not self.warned and self._context is not None:
            self._check_length(module, options.get("input_ids", arguments[0] if arguments else None), options, cache)
        asks = options.get("use_cache") and options.get("encoder_hidden_states") is None and not arguments[1:]
        if cache is None and asks:
            cache = DynamicCache(config=module.config.get_text_config(decoder=True))
        if cache is None or torch.is_grad_enabled():  # outputs of a cache of trees have no gradient
            return None
        cache_trees(cache, self.tree_caches, MAX_LENGTH.get())
        return arguments, {**options, "past_key_values": cache}

    def _check_length(self, module: Any, tokens: Any, options: dict[str, Any], cache: Any) -> None:
        """Warn about the first text that is longer than those that the model was trained on."""
        tokens = options.get("inputs_embeds") if tokens is None else tokens
        seen = 0 if cache is None else cache.get_seq_length()
        if not isinstance(tokens, Tensor) or tokens.ndim < 2 or not isinstance(seen, int):
            return  # some caches count on the GPU, and reading that would wait for it
        length = seen + tokens.shape[1]
        if self._context is not None and length > self._context:
            self.warned = True
            warnings.warn(
                f"{type(module).__name__} reads {length:,} tokens, but was trained on at most {self._context:,}: results "
                "may be poor. Scale its positions, for example with YaRN: rope_parameters in config.json",
                HsaWarning,
                stacklevel=2,
            )

    @torch.compiler.disable
    def _begin(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._start(options.get("input_ids", arguments[0] if arguments else None))

    @torch.compiler.disable
    def _begin_wrapper(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        features = arguments[0] if arguments and isinstance(arguments[0], Mapping) else options
        self._start(features.get("input_ids"))

    def _start(self, ids: Any) -> None:
        outer = CURRENT.get()
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            ids = None if outer is None else outer.ids  # an inner model may get embeddings instead
        CURRENT.set(Pass(ids, self.vocabulary, outer))

    @torch.compiler.disable
    def _end(self, module: Any, arguments: Any, output: Any) -> None:
        current = CURRENT.get()
        CURRENT.set(None if current is None else current.outer)


def _remove(hooks: list[Any]) -> None:
    for hook in hooks:
        hook.remove()
    hooks.clear()
