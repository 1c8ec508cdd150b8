"""`Sequences`: the layout, ids and visibility of the tokens of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hsa.attention.multiscale.queries import Queries
from hsa.errors import InvalidInput
from hsa.huggingface.vocabulary import Vocabulary
from hsa.tree.hierarchy import Hierarchy
from hsa.tree.padding import Padding

T = TypeVar("T")


class Sequences:
    """Tokens of a padded batch: their positions, their ids if known, and which tokens see which.

    Args:
        mask: `[batch, keys]`, true where there is a token.
        causal: Whether each token sees only the tokens up to itself.
        first_query: Position of the first query among the keys; above 0 if earlier keys come from a cache.
        ids: `[batch, keys]` token ids, if known.
        vocabulary: Vocabulary of the ids.
        full: Whether the batch is known to have no padding. Reading this from the mask would wait for the GPU.
    """

    def __init__(
        self,
        mask: Tensor,
        *,
        causal: bool,
        first_query: int = 0,
        ids: Tensor | None = None,
        vocabulary: Vocabulary | None = None,
        full: bool = False,
    ):
        self.mask = mask
        self.causal = causal
        self.first_query = first_query
        self.ids = ids
        self.vocabulary = vocabulary or Vocabulary()
        self._full = full
        self._cache: dict[Any, Any] = {}

    @cached_property
    def keys(self) -> Padding:
        return self._padding(self.mask)

    @cached_property
    def queries(self) -> Padding:
        return self.keys if self.first_query == 0 else self._padding(self.mask[:, self.first_query :])

    def _padding(self, mask: Tensor) -> Padding:
        batch, width = mask.shape
        return Padding(lengths=[width] * batch, width=width) if self._full else Padding(mask)

    def cached(self, key: Any, build: Callable[[], T]) -> T:
        """Return a value that depends on these tokens only. The first layer that needs it builds it."""
        if key not in self._cache:
            self._cache[key] = build()
        return self._cache[key]

    def part(self, rows: Sequence[int]) -> Sequences:
        """Return some of the sequences, with their padding."""

        def build() -> Sequences:
            index = torch.tensor(rows, device=self.mask.device)
            return Sequences(
                self.mask[index],
                causal=self.causal,
                first_query=self.first_query,
                ids=None if self.ids is None or len(self.ids) != len(self.mask) else self.ids[index],
                vocabulary=self.vocabulary,
                full=self._full,
            )

        return self.cached(("part", tuple(rows)), build)

    def known_ids(self, purpose: str) -> Tensor:
        """Return the ids without padding, `[tokens]`; `purpose` is the setting that needs them."""
        if self.ids is None:
            raise InvalidInput(
                "input_ids",
                problem="not known in this forward pass",
                expected=f"token ids, which {purpose} needs",
                fix="Call hsa.huggingface.convert(model) after loading and pass input_ids, or convert with "
                "kind='clustered' or tree='windows' and a number for sinks",
            )
        if self.ids.shape != self.mask.shape:
            raise InvalidInput(
                "input_ids",
                expected=f"the ids of all keys, {tuple(self.mask.shape)}, which {purpose} needs",
                got=f"shape {tuple(self.ids.shape)}",
                fix="To use a cache of earlier keys, convert with a number for sinks and kind='clustered' or tree='windows'",
            )
        return self.ids[self.mask]

    def sink_mask(self, sinks: str | int | None) -> np.ndarray | int | None:
        """Return the sinks as an argument for `Hierarchy`."""
        if sinks != "special":
            return sinks  # type: ignore[return-value]
        ids = self.known_ids("sinks='special'")
        special = torch.isin(ids, torch.tensor(self.vocabulary.special_ids, device=ids.device, dtype=ids.dtype))
        return special.cpu().numpy()

    def tiles(self, hierarchy: Hierarchy, tile: int | None) -> Queries | None:
        """Group the queries of a multiscale layer into tiles that share a selection. None means the leaf families."""
        if self.first_query == 0:
            return None if tile is None else Queries.windows(hierarchy, tile)
        return self.cached("queries", self._later_queries)

    def _later_queries(self) -> Queries:
        """Return the last tokens of each sequence, which follow the keys of a cache, with one query per tile."""
        device, keys, queries = self.mask.device, self.keys.lengths, self.queries.lengths
        first = np.cumsum(keys) - keys + np.subtract(keys, queries)  # leaf of each sequence's first query
        leaves = np.concatenate([np.arange(f, f + n) for f, n in zip(first, queries, strict=True)])
        return Queries(
            offsets=torch.arange(len(leaves) + 1, device=device),
            tree=torch.arange(len(keys), device=device).repeat_interleave(torch.tensor(queries, device=device)),
            leaves=torch.as_tensor(leaves).to(device),
        )

    def allowed(self) -> Tensor | None:
        """Return the mask for PyTorch's attention, `[batch, 1, queries or 1, keys]`; None if `causal` alone describes it."""
        return self.cached("allowed", self._allowed)

    def _allowed(self) -> Tensor | None:
        if self.keys.full and (not self.causal or self.first_query == 0):
            return None
        present = self.mask[:, None, None, :]
        if not self.causal:
            return present
        keys = torch.arange(self.mask.shape[1], device=self.mask.device)
        # A padded query sees itself, as a row without any key would be NaN.
        own = keys == keys[self.first_query :, None]
        return ((keys <= keys[self.first_query :, None]) & present) | own
