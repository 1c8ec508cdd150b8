"""Costs and precision of head fusions, and errors for layers and options that do not fit."""

import math

import pytest
import torch

from hsa import Hierarchy
from hsa.attention.flops import entry_operations
from hsa.errors import InvalidInput
from hsa.nn.attention import Hierarchical, counting_operations
from hsa.nn.causal_attention import CausalFlat
from hsa.nn.cross_attention import CrossAttention, Source
from hsa.nn.decoder import DecoderLayer
from hsa.nn.head_fusion import Concatenation, head_fusion
from hsa.nn.layer import EncoderLayer
from hsa.research.head_fusion import AttentionOverHeads, CollaborativeHeads, TalkingHeads
from tests.research.head_fusion.fused_layers import (
    ATTENTIONS,
    CAUSAL,
    CAUSAL_TREES,
    DIM,
    FUSIONS,
    HEADS,
    LENGTHS,
    SELECTING,
    SOURCE,
    TREE,
    WIDE,
    WIDTH,
    angles_of,
    attend,
    cross_layer,
    decoder_layer,
    encoder_layer,
    finite,
    fits,
    randn,
    token_positions,
)

# Costs


def counted(run):
    with counting_operations() as counts:
        run()
    (count,) = counts
    return count


def layers_to_count(fusion):
    x = randn(TREE.num_leaves, WIDTH)
    for attention in ("hierarchical", "multiscale", "flat"):
        layer = encoder_layer(attention, fusion).double()
        yield attention, DIM, counted(lambda layer=layer: attend(layer, x, TREE))
    x = randn(sum(LENGTHS), WIDE)
    for attention in ("flat", "hierarchical"):
        layer, tree = decoder_layer(attention, fusion).double(), CAUSAL_TREES[attention]
        yield f"causal {attention}", 2 * DIM, counted(lambda layer=layer, tree=tree: layer(x, tree))
    layer, source = cross_layer(0, fusion).double(), Source.of(randn(len(x), SOURCE), tree, LENGTHS)
    yield "cross", 2 * DIM, counted(lambda: layer(x, source))


@pytest.mark.parametrize(("fusion", "added"), [("talking", 4 * HEADS**2), ("collaborative", 0), ("over-heads", 0)])
def test_operations(fusion, added):
    """Talking adds 4·heads² to every entry; one block of shared channels is as wide as a head; weighing is not counted."""
    counts = zip(layers_to_count("concatenation"), layers_to_count(fusion), strict=True)
    for (name, dim, plain), (_, _, fused) in counts:
        entry = 4 * HEADS * dim + HEADS
        entries, rest = divmod(plain.attention, entry)
        assert entries > 0, name
        assert rest == 0, name
        assert fused.attention == (entry + added) * entries, name
        assert (fused.pooling, fused.selection) == (plain.pooling, plain.selection), name


@pytest.mark.parametrize("blocks", [1, 2, 3])
def test_wider_comparisons_cost_more(blocks):
    fusion = head_fusion("collaborative", WIDTH, HEADS, DIM, shared_dim=blocks * DIM)
    layer = EncoderLayer(WIDTH, HEADS, Hierarchical(), fusion=fusion, head_dim=DIM).double()
    result = counted(lambda: attend(layer, randn(TREE.num_leaves, WIDTH), TREE))
    members = sum(n**2 for n in TREE.structure.num_children.tolist())
    wide, narrow = HEADS * blocks * DIM, HEADS * DIM
    assert result.attention == (2 * wide + 2 * narrow + HEADS) * members
    assert result.attention == entry_operations(wide, HEADS, value_width=narrow) * members
    assert result.pooling == 2 * (2 * wide + narrow) * (TREE.num_nodes - TREE.num_trees)  # queries, keys; values
    wide_fusion = head_fusion("collaborative", WIDE, HEADS, 2 * DIM, shared_dim=blocks * 2 * DIM)
    decoder = DecoderLayer(WIDE, HEADS, CausalFlat(), fusion=wide_fusion).double()
    result = counted(lambda: decoder(randn(sum(LENGTHS), WIDE), CAUSAL_TREES["flat"]))
    entries = sum(n * (n + 1) // 2 for n in LENGTHS)
    assert result.attention == (2 * 2 * wide + 2 * 2 * narrow + HEADS) * entries


# Precision


@pytest.mark.parametrize("fusion", ["concatenation", *FUSIONS])
def test_half_precision(fusion):
    """Half precision of products, or of all weights, is close to full precision and differentiable."""
    x = randn(TREE.num_leaves, WIDTH).float()
    for attention in (a for a in ATTENTIONS if fits(fusion, a)):
        layer = encoder_layer(attention, fusion)
        wanted = attend(layer, x, TREE)
        with torch.autocast("cpu", torch.bfloat16):
            result = attend(layer, x, TREE)
        finite(layer, result.float())
        if attention not in SELECTING:  # selections differ if scores are close
            assert (result - wanted).norm() < 0.05 * wanted.norm()
        assert finite(layer, attend(layer.bfloat16(), x.bfloat16(), TREE)).dtype == torch.bfloat16
    x = randn(sum(LENGTHS), WIDE).float()
    for attention in (a for a in CAUSAL if fits(fusion, a)):
        layer, tree, angles = (
            decoder_layer(attention, fusion),
            CAUSAL_TREES[attention],
            angles_of(token_positions(), 2 * DIM),
        )
        wanted = layer(x, tree, angles)
        with torch.autocast("cpu", torch.bfloat16):
            result = layer(x, tree, angles)
        finite(layer, result.float())
        if attention not in SELECTING:
            assert (result - wanted).norm() < 0.05 * wanted.norm()
    for top_k in (None, 0):
        layer, vectors = cross_layer(top_k, fusion), randn(sum(LENGTHS), SOURCE).float()
        wanted = layer(x, Source.of(vectors, CAUSAL_TREES["hierarchical"], LENGTHS))
        with torch.autocast("cpu", torch.bfloat16):
            result = finite(layer, layer(x, Source.of(vectors, CAUSAL_TREES["hierarchical"], LENGTHS)).float())
        assert (result - wanted).norm() < 0.05 * wanted.norm()


def test_weights_over_heads_are_in_full_precision():
    """The penalty needs an accurate mean over many tokens."""
    fusion, x = AttentionOverHeads(HEADS, DIM, WIDTH), randn(9, WIDTH)
    for dtype, wanted in ((torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2):
        assert fusion.to(dtype).weights(x.to(dtype)).dtype == wanted
        attended = torch.ones(9, HEADS, DIM, dtype=dtype)
        assert fusion.weigh(attended, x.to(dtype)).dtype == dtype


# Errors


@pytest.mark.parametrize("attention", ATTENTIONS)
def test_fusions_that_do_not_fit_an_attention(attention):
    for fusion in (f for f in FUSIONS if not fits(f, attention)):
        expected, fix = "one query and one key", "concatenation or over-heads"
        if attention in SELECTING:
            expected, fix = "the same nodes", "without top_k"
        kind = {"talking": "TalkingHeads", "collaborative": "CollaborativeHeads"}[fusion]
        with pytest.raises(InvalidInput, match=rf"^fusion: expected .*{expected}.*, got {kind} .*\. .*{fix}"):
            encoder_layer(attention, fusion)


def test_fusions_that_do_not_fit_a_decoder():
    own = r"^fusion: expected .*, got TalkingHeads .* selection"
    with pytest.raises(InvalidInput, match=own):
        decoder_layer("clustered", "talking")
    with pytest.raises(InvalidInput, match=own):
        cross_layer(1, "talking")
    with pytest.raises(InvalidInput, match=r"^kv_heads: expected 3.*, got 1"):
        decoder_layer("flat", "collaborative", kv_heads=1)
    for fusion in ("talking", "over-heads"):  # heads may share keys and values
        assert decoder_layer("flat", fusion, kv_heads=1)(torch.randn(4, WIDE), Hierarchy.flat([4])).isfinite().all()


@pytest.mark.parametrize("fusion", FUSIONS)
@pytest.mark.parametrize(("heads", "dim"), [(HEADS + 1, DIM), (HEADS, DIM + 2)])
def test_fusion_for_another_layer(fusion, heads, dim):
    made = head_fusion(fusion, WIDTH, heads, dim)
    message = rf"^fusion: expected .*{HEADS} heads of {DIM}.*, got .*{heads} heads of {dim}"
    with pytest.raises(InvalidInput, match=message):
        EncoderLayer(WIDTH, HEADS, Hierarchical(), fusion=made, head_dim=DIM)
    with pytest.raises(InvalidInput, match=message):
        DecoderLayer(HEADS * DIM, HEADS, CausalFlat(), fusion=made)
    with pytest.raises(InvalidInput, match=message):
        CrossAttention(HEADS * DIM, HEADS, SOURCE, fusion=made)


@pytest.mark.parametrize(
    ("shared_dim", "expected"),
    [(0, "a multiple of 5"), (-5, "a multiple of 5"), (7, "a multiple of 5"), (20, "at most 15")],
)
def test_invalid_shared_dim(shared_dim, expected):
    with pytest.raises(InvalidInput, match=rf"^shared_dim: expected {expected}, the channels of.*, got {shared_dim}$"):
        head_fusion("collaborative", WIDTH, HEADS, DIM, shared_dim=shared_dim)


@pytest.mark.parametrize("penalty", [-0.5, math.inf, math.nan])
def test_invalid_penalty(penalty):
    with pytest.raises(InvalidInput, match=rf"^penalty: expected a finite number, 0 or more, got {penalty}$"):
        head_fusion("over-heads", WIDTH, HEADS, DIM, penalty=penalty)


def test_fusions_by_name():
    names = {"concatenation": Concatenation, "talking": TalkingHeads, "collaborative": CollaborativeHeads}
    for name, kind in {**names, "over-heads": AttentionOverHeads}.items():
        assert type(head_fusion(name, WIDTH, HEADS, DIM)) is kind
    assert head_fusion("collaborative", WIDTH, 1, DIM).blocks == 1  # half of one head
    assert head_fusion("collaborative", WIDTH, 4, DIM).blocks == 2
    assert head_fusion("over-heads", WIDTH, HEADS, DIM, penalty=0.25).penalty == 0.25
    with pytest.raises(InvalidInput, match=r"^fusion: expected one of concatenation, talking, collab.*, got 'sum'"):
        head_fusion("sum", WIDTH, HEADS, DIM)
    with pytest.raises(InvalidInput, match=r"(?i)did you mean 'talking'"):
        head_fusion("talkin", WIDTH, HEADS, DIM)
