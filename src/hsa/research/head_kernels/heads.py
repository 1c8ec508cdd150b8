"""The heads of a model: their outputs, queries and keys over examples, and the model without some of them.

`Heads` is the interface; `EncoderHeads` implements it for encoders of hsa, `TransformerHeads` (huggingface.py) for others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from hsa.attention.mixing import HeadMixing
from hsa.errors import InvalidInput, Unsupported
from hsa.nn.encoder import HierarchicalEncoder
from hsa.nn.pooling import segment_mean
from hsa.research.head_kernels.gram import linear_grams, similarity_gram
from hsa.tree.hierarchy import Hierarchy

Head = tuple[int, int]
"""Number of the layer, and of the head in it."""


class See(Protocol):
    """Called with what a layer did in a forward pass. Rows are tokens or leaves, example after example, without padding."""

    def __call__(
        self,
        layer: int,
        q: Tensor | None,  # [rows, heads, dim]; None: the layer compares nothing
        k: Tensor | None,
        out: Tensor,  # [rows, heads, dim]
        lengths: Sequence[int],  # rows of every example
        scale: float,  # of q·k
        weights: Tensor | None = None,  # [rows, heads] that the model gives its heads
    ) -> None: ...


class Heads(Protocol):
    """The heads of a model, which can be watched and removed."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of heads of every layer."""
        ...

    def watching(self, see: See) -> AbstractContextManager[None]:
        """Inside the context, call `see` for every layer of a forward pass."""
        ...

    def without(self, pruned: Iterable[Head]) -> AbstractContextManager[None]:
        """Inside the context, set the outputs of these heads to 0."""
        ...


Answer = Callable[[np.ndarray], Tensor]
"""Runs the model on examples, given by their indices: `[examples, channels]`."""


class EncoderHeads:
    """The heads of an encoder of hsa.

    Raises:
        Unsupported: a bottom-up encoder, which uses its layers many times over, or a published document model.
    """

    def __init__(self, encoder: nn.Module):
        if not isinstance(encoder, HierarchicalEncoder):
            raise Unsupported(
                "published document models (han, hat, transformer-xl) read a document part by part, so their heads have no "
                "one output per example; hierarchical, multiscale, clustered and flat encoders do"
            )
        if encoder.config.kind == "bottom-up":
            raise Unsupported(
                "a bottom-up encoder uses the same heads on every level of the tree, so they have no one output per "
                "example; hierarchical, multiscale, clustered and flat encoders do"
            )
        self._layers: list[Any] = list(encoder.layers)

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(layer.heads for layer in self._layers)

    @contextmanager
    def watching(self, see: See) -> Iterator[None]:
        def watch(number: int) -> Callable[..., None]:
            layer = self._layers[number]
            fusion, names = layer.fusion, layer.attention.parts
            entered: list[Tensor] = []

            def enter(module: nn.Module, inputs: tuple[Any, ...]) -> None:
                entered[:] = [inputs[0]]

            def attended(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> None:
                parts = dict(zip(names, inputs, strict=False))
                hierarchy: Hierarchy = inputs[len(names)]
                q, k = parts.get("q"), parts.get("k")
                scale = 1.0
                if q is not None and k is not None:
                    scale = q.shape[-1] ** -0.5
                    q, k = _mixed(q, k, fusion.mixing)
                weights = fusion.weights(entered[0]) if hasattr(fusion, "weights") else None
                see(number, q, k, out, hierarchy.lengths, scale, weights)

            hooks.append(layer.register_forward_pre_hook(enter))
            return attended

        hooks: list[Any] = []
        try:
            for number, layer in enumerate(self._layers):
                hooks.append(layer.attention.register_forward_hook(watch(number)))
            yield
        finally:
            for hook in hooks:
                hook.remove()

    @contextmanager
    def without(self, pruned: Iterable[Head]) -> Iterator[None]:
        gone: dict[int, list[int]] = {}
        for layer, head in pruned:
            gone.setdefault(layer, []).append(head)

        def silence(heads: list[int]) -> Callable[..., Tensor]:
            def attended(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
                return silenced(out, heads, 1)

            return attended

        hooks = [self._layers[n].attention.register_forward_hook(silence(heads)) for n, heads in gone.items()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _mixed(q: Tensor, k: Tensor, mixing: HeadMixing | None) -> tuple[Tensor, Tensor]:
    """Return queries and keys whose products are the mixed logits of talking heads."""
    if mixing is None:
        return q, k
    heads = q.shape[1]
    mixed = torch.einsum("hg,lgd->lhgd", mixing.logits.to(q.dtype), q)
    return mixed.flatten(2), k.flatten(1)[:, None].expand(-1, heads, -1)


def silenced(out: Tensor, heads: Sequence[int], dim: int) -> Tensor:
    """Return a copy in which these heads, numbered along `dim`, are 0."""
    return out.index_fill(dim, torch.tensor(heads, device=out.device), 0.0)


@dataclass(frozen=True, eq=False)
class HeadFeatures:
    """Results of the heads on all examples, head after head, layer after layer.

    Attributes:
        heads: layer and number of each.
        outputs: mean output of each head, `[examples, dim]`.
        weights: mean weights that the model gives its heads, `[examples, heads]`, of sum 1 over all layers; None if it gives
            none.
        queries, keys: those of each head for the tokens that were drawn, `[tokens, dim]`; None if none were.
        scales: factor of q·k, per head.
        answers: outputs of the model, `[examples, channels]`.
    """

    heads: list[Head]
    outputs: list[Tensor]
    weights: Tensor | None
    queries: list[Tensor] | None
    keys: list[Tensor] | None
    scales: list[float]
    answers: Tensor

    def output_grams(self) -> Tensor:
        """Return the linear kernels of mean outputs, `[heads, examples, examples]`."""
        return linear_grams(self.outputs)

    def similarity_grams(self) -> tuple[Tensor, list[float]]:
        """Return the symmetrised similarities, `[heads, tokens, tokens]`, and the asymmetric share of each."""
        if self.queries is None or self.keys is None:
            raise InvalidInput(
                "features", given="no queries and keys", expected="those of some tokens", fix="collect them"
            )
        pairs = [similarity_gram(*head) for head in zip(self.queries, self.keys, self.scales, strict=True)]
        return torch.stack([gram for gram, _ in pairs]), [share for _, share in pairs]


@torch.no_grad()
def collect(
    heads: Heads,
    answer: Answer,
    batches: Sequence[np.ndarray],
    *,
    tokens: int = 0,
    seed: int = 0,
    watch: Callable[[int], None] | None = None,
) -> HeadFeatures:
    """Run a model over examples and collect the results of its heads.

    Args:
        answer: runs the model on examples, given by their indices.
        batches: indices of examples, each once.
        tokens: approximate number of tokens to keep queries and keys of, spread evenly over the examples.
        watch: called with the number of further examples that are done.

    Raises:
        InvalidInput: tokens of a model that compares none, or whose layers see different ones.
    """
    count = sum(map(len, batches))
    per_example = -(-tokens // count)
    order: list[int] = []
    means: dict[int, list[Tensor]] = {}
    given: dict[int, list[Tensor]] = {}
    drawn: dict[int, list[tuple[Tensor, Tensor]]] = {}
    rows_before: list[list[int]] = []
    scales: dict[int, float] = {}
    current = np.empty(0, np.int64)

    def see(
        layer: int,
        q: Tensor | None,
        k: Tensor | None,
        out: Tensor,
        lengths: Sequence[int],
        scale: float,
        weights: Tensor | None = None,
    ) -> None:
        sizes = torch.tensor(lengths, device=out.device)
        means.setdefault(layer, []).append(
            segment_mean(out.double().flatten(1), sizes).unflatten(1, out.shape[1:]).cpu()
        )
        if weights is not None:
            given.setdefault(layer, []).append(segment_mean(weights.double(), sizes).cpu())
        scales[layer] = scale
        if not tokens:
            return
        if q is None or k is None:
            raise InvalidInput(
                "compare",
                given="similarity, for a model whose layers do not compare a query with a key",
                expected="outputs",
            )
        rows_before.append(list(lengths))
        if rows_before[0] != rows_before[-1]:
            raise InvalidInput("compare", given="similarity, for a model whose layers pool tokens", expected="outputs")
        first, drawn_rows = 0, []
        for example, length in zip(current.tolist(), lengths, strict=True):
            generator = np.random.default_rng((seed, example))
            drawn_rows.append(first + generator.permutation(length)[:per_example])
            first += length
        rows = torch.from_numpy(np.concatenate(drawn_rows)).to(q.device)
        drawn.setdefault(layer, []).append((q[rows].double().cpu(), k[rows].double().cpu()))

    answers = []
    with heads.watching(see):
        for current in batches:
            rows_before.clear()
            answers.append(answer(current).float().cpu())
            order.extend(current.tolist())
            if watch is not None:
                watch(len(current))
    back = torch.tensor(order).argsort()
    outputs = [torch.cat(means[n])[back] for n in range(len(heads.counts))]
    own = [torch.cat(given[n])[back] for n in sorted(given)]
    everywhere = [(n, m) for n, some in enumerate(heads.counts) for m in range(some)]
    pairs = {n: [torch.cat(side) for side in zip(*drawn[n], strict=True)] for n in drawn}
    return HeadFeatures(
        heads=everywhere,
        outputs=[outputs[n][:, m] for n, m in everywhere],
        weights=torch.cat(own, 1) / len(own) if len(own) == len(heads.counts) else None,
        queries=[pairs[n][0][:, m] for n, m in everywhere] if tokens else None,
        keys=[pairs[n][1][:, m] for n, m in everywhere] if tokens else None,
        scales=[scales[n] for n, _ in everywhere],
        answers=torch.cat(answers)[back],
    )
