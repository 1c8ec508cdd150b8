"""Configuration of the encoder, with the defaults of all its options. Importing this does not import torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hsa.errors import InvalidInput
from hsa.nn.alpha_option import AlphaOption, check_alpha
from hsa.nn.sizes import check_sizes
from hsa.registry import KINDS

if TYPE_CHECKING:
    from hsa.nn.head_fusion import HeadFusion


@dataclass(frozen=True)
class EncoderConfig:
    """Sizes and options of a `HierarchicalEncoder`.

    Args:
        width: Size of the leaf vectors.
        heads: Number of attention heads.
        head_dim: Channels per head; width / heads by default.
        layers: Number of layers.
        feed_forward: Inner width of the feed-forward networks; 2 · width by default.
        dropout: Dropout on embeddings and residual branches.
        kind: Kind of attention: "hierarchical" (the paper's), "multiscale" (each query attends exactly nearby and to pooled
            nodes far away), "clustered" (multiscale over clustered keys), "bottom-up" (attention within each family, which
            is then pooled into one vector, level by level), "flat" (softmax attention over all leaves), or the name of a
            plug-in in `hsa.registry.KINDS`, such as "none" and "trilinear".
        fusion: Fusion of the heads into one output: "concatenation", "talking", "collaborative" or "over-heads".
        shared_dim: Channels of the shared queries and keys, for fusion="collaborative"; half of all heads' by default.
        fusion_penalty: Weight of the penalty that keeps leaves from all preferring one head, for fusion="over-heads".
        entmax: α of entmax, which replaces softmax and gives small logits no weight, for "hierarchical" and "multiscale": a
            number from 1 (softmax) to 2 (sparsemax), or "learned" (one per layer, level and head); softmax by default.
        entmax_levels: Number of family heights with their own learned α, from the leaves up; taller families share the last.
        include_self: Whether leaves attend to themselves, for "hierarchical"; the paper's experiments pass False.
        near: Number of neighbouring leaf families on each side to attend to exactly, for "multiscale".
        top_k: Number of further leaf families to attend to exactly, the best ones, for "multiscale" and "clustered".
        group: Keys per group, for "clustered".
        tile: Number of neighbouring queries that share a selection, for "clustered".
        windows: Sizes of fixed windows, from the leaves up, that replace the data's own tree; none by default.
        position_width: Number of position features; 0 for no positions.
        position_dim: Channels of the position vectors ε per head; 0 keeps positions out of the logits.
        position_input: Whether to also add a projection of each leaf's position to its vector.
        pool: Pooling between layers: "families" pools each leaf family into its parent after every layer but the last;
            "none" keeps the tree.

    Raises:
        InvalidInput: An option is out of range or does not fit the others.

    >>> from hsa.nn import EncoderConfig
    >>> config = EncoderConfig(width=64, heads=2, kind="multiscale", near=1, top_k=4)
    >>> config.layers, config.keeps_leaves
    (1, True)
    >>> EncoderConfig(width=64, heads=3)
    Traceback (most recent call last):
    hsa.errors.InvalidInput: heads: expected heads that divide the width, got 3 heads for a width of 64. ...
    """

    width: int = 128
    heads: int = 4
    head_dim: int | None = None
    layers: int = 1
    feed_forward: int | None = None
    dropout: float = 0.1
    kind: str = "hierarchical"
    fusion: str = "concatenation"
    shared_dim: int | None = None
    fusion_penalty: float = 0.01
    entmax: AlphaOption = None
    entmax_levels: int = 3
    include_self: bool = True
    near: int = 1
    top_k: int = 0
    group: int = 8
    tile: int = 16
    windows: tuple[int, ...] = ()
    position_width: int = 64
    position_dim: int = 16
    position_input: bool = False
    pool: Literal["none", "families"] = "none"
    architecture: str = field(default="tree", init=False)

    def __post_init__(self) -> None:
        kind = KINDS.get(self.kind)
        check_sizes(self)
        check_alpha(self.entmax)
        if self.entmax_levels < 1:
            raise InvalidInput("entmax_levels", got=self.entmax_levels, expected="1 or more")
        if self.entmax is not None and not kind.takes_entmax:
            able = [name for name in KINDS.names() if KINDS.get(name).takes_entmax]
            raise InvalidInput(
                "entmax",
                got=f"{self.entmax} for attention of the kind {self.kind!r}",
                expected=f"one of the kinds {', '.join(able)}, whose weights entmax can compute",
            )
        self._check_fusion()

    def new_fusion(self) -> HeadFusion:
        """Build the head fusion of one layer."""
        from hsa.nn.head_fusion import head_fusion  # not at the top: it imports torch

        sizes = self.width, self.heads, self.head_dim or self.width // self.heads
        return head_fusion(self.fusion, *sizes, shared_dim=self.shared_dim, penalty=self.fusion_penalty)

    def _check_fusion(self) -> None:
        """Raise an error if the fusion does not fit the sizes or entmax."""
        import torch

        with torch.device("meta"):  # draws no random numbers, so that models built later are unaffected
            fusion = self.new_fusion()
        if self.entmax is not None and fusion.mixing is not None:
            raise InvalidInput(
                "entmax",
                got=f"{self.entmax} with talking heads",
                expected="a fusion that does not mix weights: mixing heads would undo the sparsity of entmax",
            )

    @property
    def keeps_leaves(self) -> bool:
        """Whether the encoder returns a vector for every leaf of its input."""
        return self.pool == "none" and self.kind != "bottom-up"

    @property
    def has_fixed_size(self) -> bool:
        """Whether the number of parameters is fixed; False, as the feed-forward networks can have any width."""
        return False
