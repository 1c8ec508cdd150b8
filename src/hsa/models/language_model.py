"""A decoder-only language model with flat, multiscale or clustered attention."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from hsa.attention.clustered.layout import BRANCHING, TILE, Shape
from hsa.attention.clustered.operator import check_rule
from hsa.errors import InvalidInput
from hsa.models.causal_language_model import CausalLanguageModel
from hsa.models.known_fields import known_fields
from hsa.models.language_cache import LanguageModelCache
from hsa.models.registry import LanguageArchitecture
from hsa.nn.causal_attention import CausalAttention, CausalClustered, CausalFlat, CausalMultiscale
from hsa.nn.decoder import Activation, DecoderLayer, initialise, inner_width
from hsa.nn.head_fusion import HeadFusion, head_fusion
from hsa.nn.rotary import rotary_angles
from hsa.nn.token_loss import mean_token_loss, token_losses
from hsa.nn.token_positions import TreePositionEmbedding, token_positions
from hsa.tree.causal_tree import causal_tree, check_branching
from hsa.tree.hierarchy import Hierarchy

AttentionKind = Literal["flat", "multiscale", "clustered"]
PositionKind = Literal["rope", "tree", "both"]
_BRANCHING = (32, 4)  # default of models without clustered layers
_KEPT = 16  # number of recent batches whose forests are kept: their plans serve later batches of the same lengths


@dataclass(frozen=True)
class LanguageModelConfig:
    """Configuration of a `LanguageModel`.

    Args:
        vocabulary: Number of tokens.
        width: Size of the token vectors.
        heads: Number of attention heads.
        kv_heads: Number of heads of keys and values; `heads` by default.
        layers: Number of layers.
        feed_forward: Inner width of the feed-forward networks; by default 8/3·width for "swiglu", 4·width for "gelu".
        activation: "swiglu" or "gelu".
        dropout: Dropout on embeddings and residual branches.
        attention: Kind of attention, for all layers or one per layer: "flat" (to all tokens so far), "multiscale" (to the
            token's leaf family and `near` families before it token by token, to the others pooled on the tree) or
            "clustered" (`hsa.clustered_attention`).
        fusion: Fusion of the heads: "concatenation", "talking", "collaborative" or "over-heads"; `shared_dim` and
            `fusion_penalty` are options of the last two.
        branching: Members per family of the tree, from the leaves up; the last factor repeats. For "clustered": keys per
            group, groups per node, nodes per chunk. By default (8, 8, 4) if a layer is clustered, (32, 4) otherwise.
        near: For "multiscale": number of leaf families before a token's own that it attends to token by token.
        sinks: For "multiscale" and positions in the tree: number of first tokens outside of all families, which every token
            attends to exactly. Clustered attention always reads the group of the first token exactly.
        positions: "rope" (rotary), "tree" (features of a token's index in its family, of that family's index in its parent,
            …, added to the embedding) or "both".
        position_levels: Number of these indices.
        rope_base: Base of the rotary frequencies.
        threshold, top_k, tile: For "clustered"; see `hsa.clustered_attention`.
        closes: Token id → height up to which the token closes families: 1 for leaf families, 2 for their parents, …
        max_length: Maximum number of tokens of a text; None for no limit.

    >>> config = LanguageModelConfig(11, width=8, heads=2, layers=1)
    >>> LanguageModelConfig.from_dict(config.to_dict()) == config
    True
    """

    vocabulary: int
    width: int = 256
    heads: int = 4
    kv_heads: int | None = None
    layers: int = 4
    feed_forward: int | None = None
    activation: Activation = "swiglu"
    dropout: float = 0.0
    attention: AttentionKind | tuple[AttentionKind, ...] = "multiscale"
    fusion: str = "concatenation"
    shared_dim: int | None = None
    fusion_penalty: float = 0.01
    branching: tuple[int, ...] | None = None
    near: int = 1
    sinks: int = 0
    positions: PositionKind = "rope"
    position_levels: int = 4
    rope_base: float = 10_000.0
    threshold: float | tuple[float, ...] | None = None
    top_k: int | None = None
    tile: int = TILE
    closes: Mapping[int, int] = field(default_factory=dict)
    max_length: int | None = None
    architecture: str = field(default="decoder", init=False)

    def __post_init__(self) -> None:
        for name in ("vocabulary", "width", "heads", "layers", "position_levels"):
            if getattr(self, name) < 1:
                raise InvalidInput(name, got=getattr(self, name), expected="1 or more")
        for name in ("near", "sinks"):
            if getattr(self, name) < 0:
                raise InvalidInput(name, got=getattr(self, name), expected="0 or more")
        for name in ("kv_heads", "feed_forward", "max_length"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise InvalidInput(name, got=getattr(self, name), expected="1 or more, or None")
        if self.width % self.heads or self.heads % (self.kv_heads or self.heads):
            raise InvalidInput(
                "heads",
                got=f"{self.heads} heads, {self.kv_heads or self.heads} of keys and values, a width of {self.width}",
                expected="heads that divide the width, heads of keys and values that divide the heads",
            )
        if self.positions != "tree" and self.width // self.heads % 2:
            raise InvalidInput("heads", got=f"{self.width // self.heads} channels each", expected="an even number")
        if not 0 <= self.dropout < 1:
            raise InvalidInput("dropout", got=self.dropout, expected="0 or more and less than 1")
        check_branching(self.tree_branching)
        if "clustered" in self.kinds:
            Shape.of(self.tree_branching, self.tile, causal=True)
            check_rule(self.threshold, self.top_k, 1.0, self.heads)
        for name, allowed in (("positions", PositionKind), ("activation", Activation)):
            if getattr(self, name) not in get_args(allowed):
                raise InvalidInput(name, got=getattr(self, name), expected=f"one of {', '.join(get_args(allowed))}")
        with torch.device("meta"):  # takes no random numbers from the models that follow
            self.new_fusion()  # raises for sizes that do not fit
        for kind in self.kinds:
            if kind not in get_args(AttentionKind):
                raise InvalidInput("attention", got=repr(kind), expected=f"one of {', '.join(get_args(AttentionKind))}")
        if len(self.kinds) != self.layers:
            raise InvalidInput(
                "attention",
                got=f"{len(self.kinds)} names",
                expected=f"one name, or one for each of {self.layers} layers",
            )
        for token, height in self.closes.items():
            if not 0 <= token < self.vocabulary or height < 0:
                raise InvalidInput(
                    f"closes[{token}]",
                    got=height,
                    expected=f"a height of 0 or more for a token in 0..{self.vocabulary - 1}",
                )

    @property
    def kinds(self) -> tuple[AttentionKind, ...]:
        """Kind of attention of each layer."""
        return (self.attention,) * self.layers if isinstance(self.attention, str) else tuple(self.attention)

    @property
    def tree_branching(self) -> tuple[int, ...]:
        """Members per family of the tree."""
        default = BRANCHING if "clustered" in self.kinds else _BRANCHING
        return default if self.branching is None else self.branching

    @property
    def inner(self) -> int:
        """Inner width of the feed-forward networks."""
        return self.feed_forward or inner_width(self.width, self.activation)

    def new_fusion(self) -> HeadFusion:
        """Build the head fusion of a layer."""
        sizes = self.width, self.heads, self.width // self.heads
        return head_fusion(self.fusion, *sizes, shared_dim=self.shared_dim, penalty=self.fusion_penalty)

    @property
    def key_dim(self) -> int:
        """Number of channels per head of the keys that a cache keeps."""
        with torch.device("meta"):
            return self.new_fusion().key_dim

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON values; `from_dict` rebuilds it."""
        return {**asdict(self), "closes": {str(token): height for token, height in self.closes.items()}}

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> LanguageModelConfig:
        """Rebuild a configuration from the result of `to_dict`."""
        values = known_fields(LanguageModelConfig, {k: v for k, v in data.items() if k != "architecture"})
        for name in ("branching", "threshold"):
            if isinstance(values.get(name), Sequence):
                values[name] = tuple(values[name])
        values["closes"] = {int(token): int(height) for token, height in values.get("closes", {}).items()}
        if not isinstance(values.get("attention", ""), str):
            values["attention"] = tuple(values["attention"])
        return LanguageModelConfig(**values)


@dataclass(frozen=True, eq=False)
class Trees:
    """Forests and positions of a batch of texts, computed from their lengths and the tokens that close families.

    Attributes:
        forests: Forest for each kind of attention.
        positions: `[tokens]` index of each token in its text.
        tree_positions: `[tokens, levels]` from `token_positions`; None for rotary positions alone.
    """

    forests: Mapping[AttentionKind, Hierarchy]
    positions: Tensor
    tree_positions: Tensor | None


class LanguageModel(CausalLanguageModel):
    """A decoder-only language model: embedding, decoder layers, a norm, and an output that shares the embedding's weights.

    Args:
        config: Configuration.
        cross: Function that builds the cross-attention of a layer, for encoder–decoders; None for none.

    >>> model = LanguageModel(LanguageModelConfig(97, width=16, heads=2, layers=2, branching=(4, 2)))
    >>> tokens = torch.randint(97, (30,))
    >>> model(tokens, [18, 12]).shape  # two texts, packed
    torch.Size([30, 97])
    >>> cache = model.new_cache(2)
    >>> logits = model.read(tokens, [18, 12], cache)  # of the next token of each text
    >>> model.step(logits.argmax(-1), cache).shape
    torch.Size([2, 97])
    """

    def __init__(self, config: LanguageModelConfig, cross: Callable[[], nn.Module] | None = None):
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(
            DecoderLayer(
                config.width,
                config.heads,
                _attention(kind, config),
                kv_heads=config.kv_heads,
                fusion=config.new_fusion(),
                feed_forward=config.inner,
                activation=config.activation,
                dropout=config.dropout,
                cross=None if cross is None else cross(),
            )
            for kind in config.kinds
        )
        self.norm = nn.RMSNorm(config.width)
        initialise(self, config.layers)
        self.position_embedding: TreePositionEmbedding | None = None
        if config.positions != "rope":
            self.position_embedding = TreePositionEmbedding(config.width, config.tree_branching, config.position_levels)
        heights = np.zeros(config.vocabulary, np.int64)
        heights[list(config.closes)] = list(config.closes.values())
        self._heights = heights
        self._trees: OrderedDict[Any, Trees] = OrderedDict()

    def forward(
        self,
        tokens: Tensor,
        lengths: Sequence[int] | Tensor,
        cache: LanguageModelCache | None = None,
        *,
        trees: Trees | None = None,
        memory: Any = None,
    ) -> Tensor:
        """Return logits `[tokens, vocabulary]` of the token after each token.

        Args:
            tokens: `[tokens]` token ids of all texts, one text after another.
            lengths: Number of tokens of each text.
            cache: Empty cache from `new_cache`, to which the texts are added.
            trees: Result of `trees`, if it was computed before.
            memory: Input of the layers' cross-attention.
        """
        return self._logits(self.hidden(tokens, lengths, cache, trees=trees, memory=memory))

    def hidden(
        self,
        tokens: Tensor,
        lengths: Sequence[int] | Tensor,
        cache: LanguageModelCache | None = None,
        *,
        trees: Trees | None = None,
        memory: Any = None,
    ) -> Tensor:
        """Return the vectors `[tokens, width]` from which the logits are computed; arguments as for `forward`."""
        sizes = check_texts(tokens, lengths)
        check_length(max(sizes), self.config.max_length)
        if cache is not None:
            cache.check(self.config, len(sizes))
            trees = cache.begin(self, tokens, sizes)
        elif trees is None:
            trees = self.trees(tokens, sizes)
        x, angles = self._embed(tokens, trees.positions, trees.tree_positions)
        for i, (layer, kind) in enumerate(zip(self.layers, self.config.kinds, strict=True)):
            part, index = (None, 0) if cache is None else cache.of_layer(i)
            x = layer(x, trees.forests[kind], angles, cache=part, index=index, memory=memory)
        return self.norm(x)

    def read(
        self, tokens: Tensor, lengths: Sequence[int] | Tensor, cache: LanguageModelCache, *, memory: Any = None
    ) -> Tensor:
        """Read texts into an empty cache; return logits `[batch, vocabulary]` of the token after each text."""
        hidden = self.hidden(tokens, lengths, cache, memory=memory)
        last = torch.as_tensor(np.cumsum(cache.lengths) - 1, device=hidden.device)
        return self._logits(hidden[last])

    def step(self, tokens: Tensor, cache: LanguageModelCache, *, memory: Any = None) -> Tensor:
        """Append a token `[batch]` to every text; return logits `[batch, vocabulary]` of the next token."""
        cache.check(self.config, len(tokens))
        positions, tree_positions = cache.append(self, tokens)
        x, angles = self._embed(tokens, positions, tree_positions)
        for i, layer in enumerate(self.layers):
            part, index = cache.of_layer(i)
            x = layer.step(x, part, index, angles, memory=memory)  # type: ignore[operator]
        return self._logits(self.norm(x))

    def loss(
        self, tokens: Tensor, targets: Tensor, lengths: Sequence[int], *, trees: Trees | None = None, mean: bool = True
    ) -> Tensor:
        """Return the mean of −log p(target), or the loss of every token `[tokens]`, without storing all logits."""
        hidden = self.hidden(tokens, lengths, trees=trees)
        return (mean_token_loss if mean else token_losses)(hidden, self.embedding.weight, targets)

    def new_cache(self, batch: int = 1, *, dtype: torch.dtype | None = None, rewind: int = 0) -> LanguageModelCache:
        """Return an empty cache for `batch` texts.

        Args:
            batch: Number of texts.
            dtype: Type of the cached keys and values; that of the weights by default.
            rewind: Maximum number of tokens that `crop` can remove.
        """
        return LanguageModelCache(self.config, batch, self.device, dtype or self.embedding.weight.dtype, rewind)

    def heights(self, tokens: Tensor | np.ndarray) -> np.ndarray | None:
        """Return the height up to which each token closes families; None if no token of the vocabulary closes any."""
        if not self.config.closes:
            return None
        return self._heights[tokens.cpu().numpy() if isinstance(tokens, Tensor) else tokens]

    def trees(self, tokens: Tensor | np.ndarray, lengths: Sequence[int], device: torch.device | None = None) -> Trees:
        """Return forests and positions of texts. They are kept if no token closes families: lengths alone determine them."""
        device, config = device or self.device, self.config
        closes = self.heights(tokens)
        key = (tuple(lengths), device)
        if closes is None and key in self._trees:
            self._trees.move_to_end(key)
            return self._trees[key]
        with torch.inference_mode(False):  # kept results must serve later calls with gradients too
            forests = {kind: _forest(kind, lengths, closes, config).to(device) for kind in dict.fromkeys(config.kinds)}
            for kind, layer in dict(zip(config.kinds, self.layers, strict=True)).items():
                layer.attention.prepare(forests[kind])
            trees = self.trees_of(forests, lengths, closes, device)
        if closes is None:
            self._trees[key] = trees
            if len(self._trees) > _KEPT:
                self._trees.popitem(last=False)
        return trees

    def trees_of(
        self,
        forests: Mapping[AttentionKind, Hierarchy],
        lengths: Sequence[int],
        closes: np.ndarray | None,
        device: torch.device,
    ) -> Trees:
        """Return the forests together with the positions of the tokens."""
        config, sizes = self.config, np.asarray(lengths)
        number = np.arange(int(sizes.sum())) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        tree_positions = None
        if self.position_embedding is not None:
            positions = token_positions(lengths, config.tree_branching, closes, config.sinks, config.position_levels)
            tree_positions = torch.from_numpy(positions).to(device)
        return Trees(forests, torch.from_numpy(number).to(device), tree_positions)

    def _embed(self, tokens: Tensor, positions: Tensor, tree_positions: Tensor | None) -> tuple[Tensor, Tensor | None]:
        x = self.embedding(tokens)
        if self.position_embedding is not None and tree_positions is not None:
            x = x + self.position_embedding(tree_positions)
        config = self.config
        if config.positions == "tree":
            return self.dropout(x), None
        return self.dropout(x), rotary_angles(positions, config.width // config.heads, config.rope_base)


def check_texts(tokens: Tensor, lengths: Sequence[int] | Tensor) -> list[int]:
    """Return the lengths as a list; raise unless they are those of the texts in `tokens`."""
    sizes = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
    if tokens.ndim != 1 or sum(sizes) != len(tokens) or not sizes or min(sizes) < 1:
        raise InvalidInput(
            "tokens",
            got=f"shape {tuple(tokens.shape)} for lengths {sizes[:5]}{'…' if len(sizes) > 5 else ''}",
            expected="one axis with the tokens of all texts, at least one each",
        )
    return sizes


def check_logits(logits: Tensor, where: str) -> None:
    """Raise unless the logits are finite; `where` tells the step, for the error."""
    if not bool(logits.amax(-1).isfinite().all()):  # amax is NaN if any logit is
        raise InvalidInput(
            "logits",
            got=f"numbers that are not finite {where}",
            expected="finite numbers",
            fix="The weights are damaged, or training diverged: use another checkpoint",
        )


def check_length(length: int, max_length: int | None) -> None:
    """Raise for a text longer than the model allows."""
    if max_length is not None and length > max_length:
        raise InvalidInput(
            "tokens",
            got=f"a text of {length:,} tokens",
            expected=f"at most {max_length:,}, the max_length of the model",
            fix="Cut the text, or train a model for longer ones",
        )


def _attention(kind: AttentionKind, config: LanguageModelConfig) -> CausalAttention:
    if kind == "flat":
        return CausalFlat()
    if kind == "multiscale":
        return CausalMultiscale(config.heads, near=config.near)
    rule: dict[str, Any] = {"threshold": config.threshold, "top_k": config.top_k}
    return CausalClustered(config.heads, **rule, tile=config.tile, branching=config.tree_branching)


def _forest(kind: str, lengths: Sequence[int], closes: np.ndarray | None, config: LanguageModelConfig) -> Hierarchy:
    if kind == "multiscale":
        return causal_tree(lengths, config.tree_branching, closes, config.sinks)
    return Hierarchy.flat(lengths)


DECODER = LanguageArchitecture(
    LanguageModelConfig,
    LanguageModel,
    configure="hsa.training.language_model.decoder:configure",
    reader="hsa.training.language_model.blocks:BlockReader",
)
