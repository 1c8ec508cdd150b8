"""`LanguageModelCache`: one cache per kind of attention, shared by the layers of that kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.flat import FlatCache
from hsa.attention.cache.interface import Cache, Memory
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.errors import InvalidInput
from hsa.nn.token_positions import TreePositionCounters

if TYPE_CHECKING:
    from hsa.models.language_model import LanguageModel, LanguageModelConfig, Trees


class LanguageModelCache:
    """Caches of all layers for a batch of texts. Made by `LanguageModel.new_cache`.

    Args:
        config: Configuration of the model.
        batch: Number of texts.
        device, dtype: Device and type of the cached keys and values.
        rewind: Maximum number of tokens that `crop` can remove.

    >>> from hsa.models import LanguageModel, LanguageModelConfig
    >>> model = LanguageModel(LanguageModelConfig(11, width=8, heads=2, layers=1))
    >>> cache = model.new_cache(batch=2)
    >>> _ = model.read(torch.arange(5), [3, 2], cache)
    >>> cache.lengths
    [3, 2]
    """

    def __init__(
        self, config: LanguageModelConfig, batch: int, device: torch.device, dtype: torch.dtype, rewind: int = 0
    ):
        self.config = config
        kinds = config.kinds
        sizes = {
            "batch": batch,
            "kv_heads": config.kv_heads or config.heads,
            "head_dim": config.key_dim,
            "value_dim": config.width // config.heads,
            "device": device,
            "dtype": dtype,
        }
        self.parts = {
            kind: _make(kind, config, {**sizes, "layers": kinds.count(kind)}, rewind) for kind in dict.fromkeys(kinds)
        }
        self._lengths = [0] * batch  # kept here because reading them from a cache may wait for the device
        self._layer_of_part = [kinds[:i].count(kind) for i, kind in enumerate(kinds)]
        self._counters = None
        if config.positions != "rope":
            self._counters = TreePositionCounters(batch, config.tree_branching, config.sinks, config.position_levels)

    @property
    def batch(self) -> int:
        """Number of texts."""
        return len(self._lengths)

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of every text."""
        return list(self._lengths)

    def of_layer(self, layer: int) -> tuple[Cache, int]:
        """Return the cache of a layer of the model, and the index of the layer in that cache."""
        return self.parts[self.config.kinds[layer]], self._layer_of_part[layer]

    def check(self, config: LanguageModelConfig, batch: int) -> None:
        """Check that this is a cache of the model with this configuration, for `batch` texts."""
        if config != self.config:
            raise InvalidInput(
                "cache", got="a cache of another model", expected="a cache of this model: model.new_cache(batch)"
            )
        if batch != self.batch:
            raise InvalidInput("cache", got=f"a cache for {self.batch} texts", expected=f"a cache for {batch}")

    def begin(self, model: LanguageModel, tokens: Tensor, lengths: Sequence[int]) -> Trees:
        """Add prompts to an empty cache, and return their trees."""
        closes = model.heights(tokens)
        forests = {
            kind: part.begin(lengths, closes if kind == "multiscale" else None) for kind, part in self.parts.items()
        }
        if self._counters is not None:
            by_text = None if closes is None else [part.tolist() for part in np.split(closes, np.cumsum(lengths)[:-1])]
            self._counters.set(lengths, by_text)
        self._lengths = list(lengths)
        return model.trees_of(forests, lengths, closes, model.device)

    def append(self, model: LanguageModel, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Append a token to every text; return the positions of these tokens in their sequence and in the tree."""
        longest = max(self._lengths) + 1
        if self.config.max_length is not None and longest > self.config.max_length:
            raise InvalidInput(
                "cache",
                got=f"token {longest:,} of a text",
                expected=f"at most {self.config.max_length:,}, the max_length of the model",
            )
        positions, tree_positions = torch.tensor(self._lengths, device=model.device), None
        closes = model.heights(tokens)
        for kind, part in self.parts.items():
            part.append(closes if kind == "multiscale" else None)
        if self._counters is not None:
            tree_positions = torch.from_numpy(self._counters.positions.copy()).to(model.device)
            self._counters.append(None if closes is None else closes.tolist())
        self._lengths = [length + 1 for length in self._lengths]
        return positions, tree_positions

    def reorder(self, index: Tensor) -> None:
        """Replace text i by text `index[i]` (beam search)."""
        for part in self.parts.values():
            part.reorder(index)
        self._lengths = [self._lengths[i] for i in index.tolist()]
        if self._counters is not None:
            self._counters.reorder(index.tolist())

    def crop(self, lengths: Sequence[int]) -> None:
        """Remove the tokens after these lengths (speculative decoding)."""
        for part in self.parts.values():
            part.crop(lengths)
        self._lengths = list(lengths)
        if self._counters is not None:
            self._counters.crop(lengths)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as tensors and plain values, for `torch.save`."""
        parts = {kind: part.state_dict() for kind, part in self.parts.items()}
        closes = None if self._counters is None else self._counters.closes
        return {"parts": parts, "closes": closes}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        parts = state.get("parts") if isinstance(state, dict) else None
        if not isinstance(parts, dict) or set(parts) != set(self.parts):
            raise InvalidInput(
                "state", got="the state of another model's cache", expected=f"parts {', '.join(self.parts)}"
            )
        for kind, part in self.parts.items():
            part.load_state_dict(parts[kind])
        self._lengths, *others = (part.lengths for part in self.parts.values())
        if any(lengths != self._lengths for lengths in others):
            raise InvalidInput(
                "state['parts']", got="parts of several lengths", expected="the same lengths in all parts"
            )
        if self._counters is not None:
            self._counters.set(self.lengths, self._checked_closes(state.get("closes")))

    def _checked_closes(self, closes: Any) -> list[list[int]] | None:
        if closes is None:
            return None
        whole = isinstance(closes, list) and all(isinstance(heights, list) for heights in closes)
        if not whole or [len(heights) for heights in closes] != self._lengths:
            expected = f"a list of heights for each text, of lengths {self._lengths}"
            raise InvalidInput("state['closes']", got=repr(closes)[:80], expected=expected)
        return closes

    def memory(self) -> Memory:
        """Return the memory of all layers, compared with that of flat caches."""
        parts = [part.memory() for part in self.parts.values()]
        return Memory(sum(m.bytes for m in parts), sum(m.flat_bytes for m in parts), any(m.leaves_kept for m in parts))


def _make(kind: str, config: LanguageModelConfig, sizes: dict[str, Any], rewind: int) -> Cache:
    if kind == "flat":
        return FlatCache(**sizes)
    if kind == "clustered":
        rule: dict[str, Any] = {"threshold": config.threshold, "top_k": config.top_k}
        return ClusteredCache(**sizes, branching=config.tree_branching, tile=config.tile, **rule)
    longest: dict[str, Any] = {} if config.max_length is None else {"max_length": config.max_length}
    return MultiscaleCache(
        **sizes,
        **longest,
        branching=config.tree_branching,
        near=config.near,
        sinks=config.sinks,
        closing=max(config.closes.values(), default=0),
        rewind=rewind,
    )
