"""Sizes of our encoder: the one place of their defaults. Importing this does not import torch."""

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
    """The sizes of an encoder.

    Args:
        width: Size of the leaf vectors.
        heads: Number of attention heads.
        head_dim: Channels per head; width / heads by default.
        layers: Number of layers.
        feed_forward: Inner width of the feed-forward networks; 2·width by default.
        dropout: Dropout on embeddings and residual branches.
        kind: Kind of attention: "hierarchical" (the paper's), "multiscale" (a row per query), "clustered" (the same over
            clustered keys), "bottom-up" (families attend and become one vector, level by level), "flat" (softmax attention
            over all leaves), or one that a plug-in registers in `hsa.registry.KINDS`, such as "none" and "trilinear".
        fusion: How heads become one: "concatenation" or one of `hsa.registry.FUSIONS`; see `hsa.nn.head_fusion`, also for
            `shared_dim` and `fusion_penalty`.
        entmax: For "hierarchical" and "multiscale": α-entmax in place of softmax, which gives small logits no weight: a
            number from 1 to 2, or "learned" (per layer, level and head). None: softmax.
        entmax_levels: Heights of families with a learned α of their own, from the leaves up; taller ones share the last.
        include_self: For "hierarchical": leaves attend to themselves. The paper's experiments pass False.
        near: For "multiscale": neighbouring leaf families that are attended to leaf by leaf, on each side.
        top_k: For "multiscale" and "clustered": further leaf families attended to leaf by leaf, the best ones.
        group, tile: For "clustered": keys per group, neighbouring queries that share a selection.
        windows: Fixed windows of this many leaves, from the leaves up, in place of the data's own tree.
        position_width: Number of position features; 0 for no positions.
        position_dim: Channels of ε per head; 0 keeps positions out of the logits.
        position_input: Also add a projection of every leaf's position to its vector.
        pool: "families": after every layer but the last, leaf families are pooled into their parents, so that the signal
            coarsens by a level; "none": the tree stays.
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
            raise InvalidInput("entmax_levels", given=self.entmax_levels, expected="1 or more")
        if self.entmax is not None and not kind.takes_entmax:
            able = [name for name in KINDS.names() if KINDS.get(name).takes_entmax]
            raise InvalidInput(
                "entmax",
                given=f"{self.entmax} for attention of the kind {self.kind!r}",
                expected=f"one of the kinds {', '.join(able)}: the others have softmax kernels, or no weights",
            )
        self._check_fusion()

    def new_fusion(self) -> HeadFusion:
        """Build the fusion of heads of one layer."""
        from hsa.nn.head_fusion import head_fusion  # here, because it imports torch

        sizes = self.width, self.heads, self.head_dim or self.width // self.heads
        return head_fusion(self.fusion, *sizes, shared_dim=self.shared_dim, penalty=self.fusion_penalty)

    def _check_fusion(self) -> None:
        """Raise where the fusion does not fit the sizes, or entmax."""
        import torch

        with torch.device("meta"):  # takes no random numbers from the models that follow
            fusion = self.new_fusion()
        if self.entmax is not None and fusion.mixing is not None:
            raise InvalidInput(
                "entmax",
                given=f"{self.entmax} with heads that talk",
                expected="another fusion: mixed rows would have zeros only where all heads have them",
            )

    @property
    def keeps_leaves(self) -> bool:
        """Whether the encoder returns a vector for every leaf of its input."""
        return self.pool == "none" and self.kind != "bottom-up"

    @property
    def has_fixed_size(self) -> bool:
        """Never: its feed-forward networks can have any width."""
        return False
