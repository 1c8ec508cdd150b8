"""Hierarchical Attention Transformers: layers inside segments, and layers across them.

Chalkidis et al., *An Exploration of Hierarchical Attention Transformers for Efficient Long Document Classification*, 2022
(arXiv 2210.05529). Segments begin with a vector of their own; a cross-segment layer lets these vectors of a document
attend to each other and puts them back, so that the next layer inside segments tells their tokens.
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
    """The sizes of a Hierarchical Attention Transformer.

    Args:
        width: of the vectors.
        heads: of attention; they divide the width.
        layers: inside segments; a `layout` that is a pattern has its own number.
        feed_forward: inner width of the feed-forward networks; 2·width by default.
        dropout: on embeddings and residual branches.
        layout: the order of layers inside and across segments, see `layout_pattern`.
        segment: leaves of a segment, at most. Documents may have any number of segments.
        segment_level: 0: segments are windows of `segment` leaves; 1: leaf families (sentences), 2: what is above them
            (paragraphs), …, those of more leaves cut into windows. See `hsa.baselines.hat.segments`.
        returns: "segments": the vector of every segment; "leaves": of every leaf.
        norm, activation, epsilon: of the layers inside segments, see `TransformerLayer`; "post" is as published.
        separator: segments end with a learned vector too, as texts of BERT do.
        warm_start: the pre-trained encoder that training starts from; these sizes are then its own.
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
                raise InvalidInput(name, given=getattr(self, name), expected=f"{least} or more")
        styles = {"returns": Returns, "norm": Norm, "activation": ActivationName}
        for name, allowed in styles.items():
            if getattr(self, name) not in get_args(allowed):
                names = ", ".join(get_args(allowed))
                raise InvalidInput(name, given=repr(getattr(self, name)), expected=f"one of {names}")
        object.__setattr__(self, "layers", self.pattern.count("S"))

    @property
    def has_fixed_size(self) -> bool:
        """With a warm start, the sizes are those of the pre-trained encoder."""
        return self.warm_start is not None

    @property
    def pattern(self) -> str:
        """The order of layers, S and C."""
        return layout_pattern(self.layout, self.layers)

    @property
    def keeps_leaves(self) -> bool:
        return self.returns == "leaves"


def check_levels(config: HatConfig, hierarchy: Hierarchy) -> None:
    """That documents have the level that segments are to be.

    >>> check_levels(HatConfig(segment_level=2), Hierarchy.from_nested([[3, 2]]))

    Raises:
        InvalidInput: all trees are lower.
    """
    highest = int(hierarchy.structure.height.max(initial=0))
    if hierarchy.num_trees and config.segment_level > highest:
        raise InvalidInput(
            "segment_level",
            given=f"{config.segment_level}, for trees of {highest} level{'' if highest == 1 else 's'} above their leaves",
            expected=f"at most {highest}",
            fix="choose a level that the data have, or 0 for windows of fixed length",
        )


class HatEncoder(nn.Module):
    """Layers inside segments and across them, in the order of a layout.

        S: rows of a segment attend to each other:                        x ← layer(x)
        C: first rows of a document's segments attend to each other:      x_first ← layer(x_first, position of the segment)

    A row is LayerNorm(embedding + position inside the segment). Layers across segments are residual and start as identity:
    then a document of one segment is read as a plain transformer reads it.

    Args:
        config: the sizes.
        modalities: what the leaves hold.
        kinds, keys: of the domains; not used, documents are read in their order.

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
        # Sines and cosines of the number of a segment: it has no maximum.
        self.numbers = FourierFeatures(1, width + width % 2) if "C" in config.pattern else None

    def forward(self, inputs: Inputs) -> tuple[Tensor, Hierarchy]:
        """A vector per segment and the forest of documents over segments; or per leaf, and the forest of the inputs."""
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
        """Build what depends on the forest alone: call it where batches are made, ahead of the step that uses them."""
        plan = self._plan(inputs)
        for forest in (plan.rows, plan.documents):
            self.layers[0].attention.prepare(forest)  # type: ignore[union-attr, operator]

    def start_from(self, tensors: Mapping[str, Tensor]) -> None:
        """Weights of a pre-trained encoder, by the names of `state_dict`. Layers across segments stay as they are.

        Raises:
            InvalidInput: naming a weight that does not fit, or one inside segments that is missing.
        """
        own = self.state_dict()
        for name, tensor in own.items():
            if name in tensors and tensors[name].shape != tensor.shape:
                raise InvalidInput(
                    f"warm start: {name}", given=tuple(tensors[name].shape), expected=f"shape {tuple(tensor.shape)}"
                )
            if name not in tensors and not name.startswith(self._always_new()):
                raise InvalidInput(f"warm start: {name}", given="no such weight", expected="all inside segments")
        unknown = sorted(set(tensors) - set(own))
        if unknown:
            raise InvalidInput(f"warm start: {unknown[0]}", given="a weight too many", expected="those of this encoder")
        self.load_state_dict(dict(tensors), strict=False)

    def pretrained_parameters(self) -> list[nn.Parameter]:
        """Those that a warm start sets: of layers inside segments, and of text; none without a warm start."""
        if self.config.warm_start is None:
            return []
        return [p for name, p in self.named_parameters() if not name.startswith(self._always_new())]

    def _always_new(self) -> tuple[str, ...]:
        """How names of weights begin that no pre-trained encoder has: across segments, and of leaves that are no text."""
        across = (f"layers.{i}." for i, letter in enumerate(self.config.pattern) if letter == "C")
        others = (name for name in self.embedding.modalities if name != "text")
        return (*across, "numbers.", *(f"embedding.{kind}.{name}." for name in others for kind in ("tables", "maps")))

    def _plan(self, inputs: Inputs) -> TextSegments:
        config = self.config
        return text_segments(inputs.hierarchy, config.segment, config.segment_level, last_row=config.separator)
