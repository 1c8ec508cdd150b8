"""Hierarchical Attention Transformers: layers inside segments, and layers across them.

Chalkidis et al., *An Exploration of Hierarchical Attention Transformers for Efficient Long Document Classification*, 2022
(arXiv 2210.05529). Every segment begins with a summary row. In a layer across segments, the summary rows of a document
attend to each other; the next layer inside segments passes the result on to the tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from hsa.baselines.hat.layer import ActivationName, Norm, TransformerLayer
from hsa.baselines.hat.layouts import layout_pattern
from hsa.baselines.hat.segments import TextSegments, text_segments
from hsa.baselines.options import DocumentOptions
from hsa.errors import InvalidInput
from hsa.nn.embedding import Embedding, Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.inputs import Inputs
from hsa.nn.positions import FourierFeatures
from hsa.nn.sizes import check_sizes
from hsa.tree.hierarchy import Hierarchy

Returns = Literal["segments", "leaves"]


@dataclass(frozen=True)
class HatConfig:
    """Configuration of `HatEncoder`.

    Args:
        width: Width of the vectors.
        heads: Number of attention heads; must divide the width.
        layers: Number of layers inside segments; ignored if `layout` is a pattern.
        feed_forward: Inner width of the feed-forward networks; 2·width by default.
        dropout: Dropout rate on embeddings and residual branches.
        layout: Order of layers inside and across segments; see `layout_pattern`.
        segment: Maximum number of leaves per segment. Documents may have any number of segments.
        segment_level: Unit of a segment: 0 for windows of `segment` leaves, 1 for leaf families (sentences), 2 for the level
            above (paragraphs), …; units with more leaves are cut into windows. See `hsa.baselines.hat.segments`.
        returns: Output: "segments" for a vector per segment, "leaves" for a vector per leaf.
        norm, activation, epsilon: Options of the layers inside segments, see `TransformerLayer`; "post" is as published.
        separator: Whether segments also end with a learned vector, like BERT's [SEP].
        warm_start: Pre-trained encoder that training starts from; it determines the sizes.
    """

    width: int = EncoderConfig.width
    heads: int = EncoderConfig.heads
    layers: int = 2
    feed_forward: int | None = None
    dropout: float = EncoderConfig.dropout
    layout: str = DocumentOptions.layout
    segment: int = DocumentOptions.segment
    segment_level: int = DocumentOptions.segment_level
    returns: Returns = "segments"
    norm: Norm = "post"
    activation: ActivationName = "gelu"
    epsilon: float = 1e-5
    separator: bool = False
    warm_start: str | None = None
    architecture: str = field(default="hat", init=False)

    def __post_init__(self) -> None:
        check_sizes(self)
        for name, least in (("segment", 1), ("segment_level", 0)):
            if getattr(self, name) < least:
                raise InvalidInput(name, got=getattr(self, name), expected=f"{least} or more")
        styles = {"returns": Returns, "norm": Norm, "activation": ActivationName}
        for name, allowed in styles.items():
            if getattr(self, name) not in get_args(allowed):
                names = ", ".join(get_args(allowed))
                raise InvalidInput(name, got=repr(getattr(self, name)), expected=f"one of {names}")
        object.__setattr__(self, "layers", self.pattern.count("S"))

    @property
    def has_fixed_size(self) -> bool:
        """Whether a pre-trained encoder determines the sizes."""
        return self.warm_start is not None

    @property
    def pattern(self) -> str:
        """Order of the layers, a string of S and C."""
        return layout_pattern(self.layout, self.layers)

    @property
    def keeps_leaves(self) -> bool:
        return self.returns == "leaves"


def check_levels(config: HatConfig, hierarchy: Hierarchy) -> None:
    """Check that the documents have the level that segments are made from.

    >>> check_levels(HatConfig(segment_level=2), Hierarchy.from_nested([[3, 2]]))

    Raises:
        InvalidInput: If no tree has this level.
    """
    highest = int(hierarchy.structure.height.max(initial=0))
    if hierarchy.num_trees and config.segment_level > highest:
        raise InvalidInput(
            "segment_level",
            got=config.segment_level,
            expected=f"at most {highest}, the depth of these trees",
            fix="Choose a lower level, or 0 for windows of fixed length",
        )


class HatEncoder(nn.Module):
    """Transformer with layers inside segments and across them, in the order of a layout.

        S: rows of a segment attend to each other:                        x ← layer(x)
        C: first rows of a document's segments attend to each other:      x_first ← layer(x_first, position of the segment)

    A row starts as LayerNorm(embedding + position in the segment). Layers across segments are residual and start as the
    identity; the model then treats a document of one segment as a plain transformer does.

    Args:
        config: Sizes of the encoder.
        modalities: Modalities of the leaf values.
        kinds, keys: Kinds and keys of the domains; ignored, because leaves are read in sequence order.

    >>> from hsa import Signal, collate
    >>> batch = collate([Signal.of([3, 1, 4], "text"), Signal.of([1, 5], "text")])
    >>> encoder = HatEncoder(HatConfig(width=16, segment=2), {"text": Modality(tokens=10)})
    >>> x, documents = encoder(batch)
    >>> x.shape, documents.lengths  # two segments and one
    (torch.Size([3, 16]), [2, 1])
    """

    def __init__(
        self,
        config: HatConfig,
        modalities: Mapping[str, Modality],
        kinds: Sequence[str] = ("sequence",),
        keys: Sequence[str] = (),
    ):
        super().__init__()
        self.config = config
        width, marks = config.width, 1 + config.separator
        self.embedding = Embedding(modalities, width)
        self.marks = nn.Embedding(marks, width)  # the first vector of a segment, and the last
        self.positions = nn.Embedding(config.segment + marks, width)
        nn.init.normal_(self.marks.weight, std=width**-0.5)
        nn.init.normal_(self.positions.weight, std=0.02)
        self.norm = nn.LayerNorm(width, eps=config.epsilon)
        self.dropout = nn.Dropout(config.dropout)
        sizes: dict[str, Any] = {"feed_forward": config.feed_forward, "dropout": config.dropout}
        style: dict[str, Any] = {"norm": config.norm, "activation": config.activation, "epsilon": config.epsilon}
        self.layers = nn.ModuleList(
            TransformerLayer(width, config.heads, **sizes, **(style if letter == "S" else {"identity": True}))
            for letter in config.pattern
        )
        # Sines and cosines rather than a table, because documents may have any number of segments.
        self.numbers = FourierFeatures(1, width + width % 2) if "C" in config.pattern else None

    def forward(self, inputs: Inputs) -> tuple[Tensor, Hierarchy]:
        """Return vectors and their forest: one per segment in a flat tree per document, or one per leaf of the inputs."""
        plan = self._plan(inputs)
        x = self.embedding(inputs.values, inputs.leaves, inputs.hierarchy.num_leaves)
        x = torch.cat([x, self.marks.weight.to(x.dtype)]).index_select(0, plan.source)
        x = self.dropout(self.norm(x + self.positions(plan.position)))
        numbers = None
        if self.numbers is not None:
            numbers = self.numbers(plan.number[:, None])[:, : self.config.width]
        for letter, layer in zip(self.config.pattern, self.layers, strict=True):
            if letter == "S":
                x = layer(x, plan.rows)
            else:
                firsts = layer(x.index_select(0, plan.first), plan.documents, numbers)
                x = x.index_copy(0, plan.first, firsts.to(x.dtype))
        if self.config.returns == "leaves":
            return x.index_select(0, plan.leaf), inputs.hierarchy
        return x.index_select(0, plan.first), plan.documents

    def prepare(self, inputs: Inputs) -> None:
        """Build index structures that depend on the forest alone; call it when batches are made, ahead of their step."""
        plan = self._plan(inputs)
        for forest in (plan.rows, plan.documents):
            self.layers[0].attention.prepare(forest)  # type: ignore[union-attr, operator]

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Load the weights of a pre-trained encoder, by their names in `state_dict`. Layers across segments keep theirs.

        Raises:
            InvalidInput: If a weight has the wrong shape or an unknown name, or one inside segments is missing.
        """
        own = self.state_dict()
        for name, tensor in own.items():
            if name in tensors and tensors[name].shape != tensor.shape:
                raise InvalidInput(
                    f"warm start: {name}", got=tuple(tensors[name].shape), expected=f"shape {tuple(tensor.shape)}"
                )
            if name not in tensors and not name.startswith(self._always_new()):
                expected = "all weights of layers inside segments"
                raise InvalidInput(f"warm start: {name}", problem="missing", expected=expected)
        unknown = sorted(set(tensors) - set(own))
        if unknown:
            expected = "only weights of this encoder"
            raise InvalidInput(f"warm start: {unknown[0]}", problem="unknown weight", expected=expected)
        self.load_state_dict(dict(tensors), strict=False)

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that a warm start sets: layers inside segments and text embeddings; none without one."""
        if self.config.warm_start is None:
            return []
        return [p for name, p in self.named_parameters() if not name.startswith(self._always_new())]

    def _always_new(self) -> tuple[str, ...]:
        """Return name prefixes of weights that a warm start never sets: layers across segments, and non-text leaves."""
        across = (f"layers.{i}." for i, letter in enumerate(self.config.pattern) if letter == "C")
        others = (name for name in self.embedding.modalities if name != "text")
        return (*across, "numbers.", *(f"embedding.{kind}.{name}." for name in others for kind in ("tables", "maps")))

    def _plan(self, inputs: Inputs) -> TextSegments:
        config = self.config
        return text_segments(inputs.hierarchy, config.segment, config.segment_level, last_row=config.separator)
