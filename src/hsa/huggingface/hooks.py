"""`Conversion`: what the layers of a converted model share, and the hooks that prepare its forward passes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hsa.huggingface.passes import CURRENT, Pass
from hsa.huggingface.settings import LayerSettings
from hsa.huggingface.vocabulary import Vocabulary


class Conversion:
    """State of a converted model: its vocabulary, its hooks, and the attention that it had before.

    Hooks note the token ids of every forward pass, if a layer needs them, and put caches of trees into empty caches.
    They are methods, so that copies of a model, and pickled ones, have hooks of their own.
    """

    def __init__(self, before: str | None):
        self.before = before  # the model's attention implementation
        self.vocabulary = Vocabulary()
        self.tree_caches: Mapping[int, LayerSettings] = {}  # by index in the model's cache
        self._hooks: list[Any] = []

    def hook(
        self,
        models: Iterable[Any] = (),
        *,
        note_ids: bool = False,
        tree_caches: Mapping[int, LayerSettings] | None = None,
    ) -> None:
        """Replace all hooks by those that the layers of these models need."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self.tree_caches = [], tree_caches or {}
        for model in models:
            if note_ids:
                self._hooks.append(model.register_forward_pre_hook(self._begin, with_kwargs=True))
                self._hooks.append(model.register_forward_hook(self._end, always_call=True))
            if self.tree_caches:
                self._hooks.append(model.register_forward_pre_hook(self._prepare_cache, with_kwargs=True))

    @torch.compiler.disable
    def _prepare_cache(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        from hsa.huggingface.cache import cache_trees

        cache = options.get("past_key_values")
        if cache is not None and not torch.is_grad_enabled():  # the output of a cache of trees has no gradient
            cache_trees(cache, self.tree_caches)

    @torch.compiler.disable
    def _begin(self, module: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        outer = CURRENT.get()
        ids = options.get("input_ids", arguments[0] if arguments else None)
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            ids = None if outer is None else outer.ids  # a model inside another may get their embeddings
        CURRENT.set(Pass(ids, self.vocabulary, outer))

    @torch.compiler.disable
    def _end(self, module: Any, arguments: Any, output: Any) -> None:
        current = CURRENT.get()
        CURRENT.set(None if current is None else current.outer)
