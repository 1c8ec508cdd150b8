"""Observation and removal of the heads of a model.

`Heads` is the protocol; `EncoderHeads` implements it for encoders of hsa, `TransformerHeads` (in huggingface.py) for those
of transformers.
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
"""Number of the layer, and number of the head in it."""


class See(Protocol):
    """Callback that receives the results of a layer in a forward pass. Rows are tokens or leaves, packed."""

    def __call__(
        self,
        layer: int,
        q: Tensor | None,  # [rows, heads, dim]; None if the layer compares nothing
        k: Tensor | None,
        out: Tensor,  # [rows, heads, dim]
        lengths: Sequence[int],  # rows of every example
        scale: float,  # factor of q·k
        weights: Tensor | None = None,  # [rows, heads] weights that the model gives its heads
    ) -> None: ...


class Heads(Protocol):
    """Heads of a model, which can be watched and removed."""

    @property
    def counts(self) -> tuple[int, ...]:
        """Number of heads of every layer."""
        ...

    def watching(self, see: See) -> AbstractContextManager[None]:
        """Call `see` for every layer of a forward pass inside the context."""
        ...

    def without(self, pruned: Iterable[Head]) -> AbstractContextManager[None]:
        """Set the outputs of these heads to 0 inside the context."""
        ...


Answer = Callable[[np.ndarray], Tensor]
"""Function that runs the model on examples, given by their indices, and returns `[examples, channels]`."""


class EncoderHeads:
    """Heads of an encoder of hsa.

    Args:
        encoder: A `HierarchicalEncoder`.

    Raises:
        Unsupported: If the encoder is a bottom-up encoder, which uses its layers several times, or a baseline.
    """

    def __init__(self, encoder: nn.Module):
        if not isinstance(encoder, HierarchicalEncoder):
            raise Unsupported(
                "baselines (han, hat, transformer-xl) read a document part by part, so their heads do not have one output "
                "per token; use a hierarchical, multiscale, clustered or flat encoder"
            )
        if encoder.config.kind == "bottom-up":
            raise Unsupported(
                "a bottom-up encoder uses the same heads on every level of the tree, so they do not have one output per "
                "token; use a hierarchical, multiscale, clustered or flat encoder"
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
        removed: dict[int, list[int]] = {}
        for layer, head in pruned:
            removed.setdefault(layer, []).append(head)

        def silence(heads: list[int]) -> Callable[..., Tensor]:
            def attended(module: nn.Module, inputs: tuple[Any, ...], out: Tensor) -> Tensor:
                return silenced(out, heads, 1)

            return attended

        hooks = [self._layers[n].attention.register_forward_hook(silence(heads)) for n, heads in removed.items()]
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
    """Return a copy in which these heads, the indices along `dim`, are 0."""
    return out.index_fill(dim, torch.tensor(heads, device=out.device), 0.0)


@dataclass(frozen=True, eq=False)
class HeadFeatures:
    """Results of all heads on all examples, layer by layer.

    Attributes:
        heads: Layer and number of each head.
        outputs: `[examples, dim]` Mean output of each head.
        weights: `[examples, heads]` Mean weights that the model gives its heads, with sum 1 over all layers; None if it has
            no such weights.
        queries, keys: `[tokens, dim]` Queries and keys of each head for sampled tokens; None without sampling.
        scales: Factor of q·k of each head.
        answers: `[examples, channels]` Outputs of the model.
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
                "features",
                problem="no queries and keys",
                expected="those of some tokens",
                fix="Pass `tokens` to `collect`",
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
        heads: Heads of the model.
        answer: Function that runs the model on examples, given by their indices.
        batches: Batches of indices; every example is in one of them.
        tokens: Approximate number of tokens to sample queries and keys of, spread evenly over the examples.
        seed: Seed of the sample.
        watch: Called with the number of examples just finished.

    Raises:
        InvalidInput: If tokens are sampled from a model that compares none, or whose layers have different tokens.
    """
    count = sum(map(len, batches))
    per_example = -(-tokens // count)
    order: list[int] = []
    means: dict[int, list[Tensor]] = {}
    head_weights: dict[int, list[Tensor]] = {}
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
            head_weights.setdefault(layer, []).append(segment_mean(weights.double(), sizes).cpu())
        scales[layer] = scale
        if not tokens:
            return
        if q is None or k is None:
            raise InvalidInput(
                "compare",
                got="'similarity'",
                expected="'outputs', because layers of this model do not compare a query with a key",
            )
        rows_before.append(list(lengths))
        if rows_before[0] != rows_before[-1]:
            expected = "'outputs', because layers of this model pool tokens"
            raise InvalidInput("compare", got="'similarity'", expected=expected)
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
    own = [torch.cat(head_weights[n])[back] for n in sorted(head_weights)]
    everywhere = [(n, m) for n, count in enumerate(heads.counts) for m in range(count)]
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
