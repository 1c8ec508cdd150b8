"""Head fusions in every layer, compared with concatenation and with their formulas."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy
from hsa.nn.attention import Hierarchical
from hsa.nn.causal_attention import CausalFlat, CausalMultiscale
from hsa.nn.cross_attention import CrossAttention, Source
from hsa.nn.decoder import DecoderLayer, initialise
from hsa.nn.grouped_linear import Groups
from hsa.nn.head_fusion import Concatenation, head_fusion
from hsa.nn.layer import EncoderLayer
from hsa.nn.rotary import rotate
from hsa.research.head_fusion import AttentionOverHeads, CollaborativeHeads, TalkingHeads
from hsa.tree.causal_tree import causal_tree
from tests.forests import forests, random_positions
from tests.model_inputs import exact
from tests.research.head_fusion.fused_layers import (
    CAUSAL,
    CAUSAL_TREES,
    CROSSES,
    DECODERS,
    DIM,
    ENCODERS,
    FUSIONS,
    HEADS,
    LENGTHS,
    NESTED,
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
    randn,
    token_positions,
)


def close(a, b, atol=1e-11):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# Equality with concatenation


def as_concatenation(fused, plain):
    """Give both layers the same weights, and set the fusion so that it equals concatenation."""
    own = fused.double().load_state_dict(exact(plain).state_dict(), strict=False)
    assert own.missing_keys
    assert all(name.startswith("fusion.") for name in own.missing_keys)
    assert not own.unexpected_keys
    fusion, blocks = fused.eval().fusion, torch.eye(HEADS, dtype=torch.float64)
    with torch.no_grad():
        if isinstance(fusion, CollaborativeHeads):
            fusion.mix_channels.copy_(blocks.repeat_interleave(fusion.head_dim, 1))
        if isinstance(fusion, AttentionOverHeads):
            plain.output.weight /= HEADS


def selecting_all(fusion, attention):
    """Select everything if keys are shared: they are wider, and are clustered differently."""
    return {"top_k": 99} if attention == "clustered" and fusion == "collaborative" else {}


@pytest.mark.parametrize(("fusion", "attention"), ENCODERS)
@settings(max_examples=3)
@given(forests(), st.integers(0, 99))
def test_encoder_layer_can_equal_concatenation(fusion, attention, forest, seed):
    options = selecting_all(fusion, attention)
    plain, fused = encoder_layer(attention, **options), encoder_layer(attention, fusion, full=True, **options)
    as_concatenation(fused, plain)
    forest = Hierarchy.flat(forest.lengths) if attention == "flat" else forest
    positions = random_positions(forest, seed, HEADS) if plain.attention.uses_positions else None
    x = randn(forest.num_leaves, WIDTH, seed=seed)
    close(attend(fused, x, forest, positions), attend(plain, x, forest, positions))


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize(("fusion", "attention"), DECODERS)
def test_decoder_layer_can_equal_concatenation(fusion, attention, rotated):
    options = selecting_all(fusion, attention)
    plain, fused = decoder_layer(attention, **options), decoder_layer(attention, fusion, full=True, **options)
    as_concatenation(fused, plain)
    angles = angles_of(token_positions(), 2 * DIM) if rotated else None
    x, tree = randn(sum(LENGTHS), WIDE), CAUSAL_TREES[attention]
    close(fused(x, tree, angles), plain(x, tree, angles))


@pytest.mark.parametrize(("fusion", "top_k"), CROSSES)
@settings(max_examples=3)
@given(forests(), st.integers(0, 99))
def test_cross_attention_can_equal_concatenation(fusion, top_k, forest, seed):
    plain, fused = cross_layer(top_k), cross_layer(top_k, fusion, full=True)
    as_concatenation(fused, plain)
    lengths = [1 + (seed + i) % 3 for i in range(forest.num_trees)]
    x, vectors = randn(sum(lengths), WIDE, seed=seed), randn(forest.num_leaves, SOURCE, seed=seed + 1)
    close(fused(x, Source.of(vectors, forest, lengths)), plain(x, Source.of(vectors, forest, lengths)))


def started(layer, *fusion):
    torch.manual_seed(3)
    return layer(*fusion).double().eval()


@pytest.mark.parametrize("fusion", [TalkingHeads(HEADS, DIM), AttentionOverHeads(HEADS, DIM, WIDTH)])
def test_encoder_layer_starts_as_concatenation(fusion):
    def layer(fusion):
        return EncoderLayer(WIDTH, HEADS, Hierarchical(), fusion=fusion, head_dim=DIM)

    x = randn(TREE.num_leaves, WIDTH)
    close(attend(started(layer, None), x, TREE), attend(started(layer, fusion), x, TREE), 1e-7)  # weights in float32


@pytest.mark.parametrize("fusion", [TalkingHeads(HEADS, 2 * DIM), AttentionOverHeads(HEADS, 2 * DIM, WIDE)])
def test_decoder_layer_and_cross_attention_start_as_concatenation(fusion):
    def decoder(fusion):
        layer = DecoderLayer(WIDE, HEADS, CausalFlat(), fusion=fusion)
        initialise(layer, 2)
        return layer

    def cross(fusion):
        return CrossAttention(WIDE, HEADS, SOURCE, fusion=fusion)

    x, tree, vectors = randn(sum(LENGTHS), WIDE), CAUSAL_TREES["flat"], randn(sum(LENGTHS), SOURCE)
    plain = started(decoder, None)(x, tree)
    assert (plain - x).abs().max() > 1e-4  # attention does something
    close(started(decoder, fusion)(x, tree), plain, 1e-8)
    plain, fused = (started(cross, f)(x, Source.of(vectors, tree, LENGTHS)) for f in (None, fusion))
    close(fused, plain, 1e-6)


@pytest.mark.parametrize("fusion", FUSIONS)
def test_initialise_does_not_change_the_fusion(fusion):
    layer = decoder_layer("flat", fusion)
    before = {n: p.clone() for n, p in layer.fusion.named_parameters()}
    projected = layer.project.weight.clone()
    initialise(layer, 2)
    assert all(torch.equal(p, before[n]) for n, p in layer.fusion.named_parameters())
    assert not torch.equal(layer.project.weight, projected)


# Talking heads


def concatenated(weights, v, layer, x):
    """Compute the rest of an encoder layer from the attention weights and values of every tree."""
    parts = [torch.einsum("hij,jhd->ihd", w, c) for w, c in zip(weights, v, strict=True)]
    x = x + F.gelu(torch.cat(parts).flatten(1) @ layer.output.weight[0] + layer.output.bias[0])
    return x + layer.feed_forward(x)


@given(st.lists(st.integers(1, 7), min_size=1, max_size=3), st.integers(0, 99))
@settings(max_examples=10)
def test_talking_heads_in_a_flat_layer_written_out(lengths, seed):
    """Compute softmax(P·logits), mixed by U, times the values (Shazeer et al. 2020)."""
    layer = exact(encoder_layer("flat", "talking"), seed)
    x, forest = randn(sum(lengths), WIDTH, seed=seed), Hierarchy.flat(lengths)
    projected = x @ layer.project.weight[0] + layer.project.bias[0]
    q, k, v = projected.unflatten(-1, (3, HEADS, DIM)).unbind(1)
    q, k, v = layer.norm_q(q).split(lengths), layer.norm_k(k).split(lengths), v.split(lengths)
    same = torch.eye(HEADS, dtype=torch.float64)
    talk, listen = same + layer.fusion.mix_logits, same + layer.fusion.mix_weights
    logits = [torch.einsum("gh,ihd,jhd->gij", talk, a, b) / math.sqrt(DIM) for a, b in zip(q, k, strict=True)]
    weights = [torch.einsum("gh,hij->gij", listen, part.softmax(-1)) for part in logits]
    close(attend(layer, x, forest), concatenated(weights, v, layer, x), 1e-9)


@pytest.mark.parametrize("top_k", [None, 0])
def test_talking_heads_of_cross_attention_written_out(top_k):
    """Attend to all leaves, or to the two members of the root, with their means and log leaf counts."""
    cross, forest = exact(cross_layer(top_k, "talking")), Hierarchy.from_nested([[3, 2]])
    x, vectors = randn(4, WIDE), randn(5, SOURCE)
    k, v = cross.keys_and_values(vectors)
    leaves = torch.ones(5, dtype=torch.float64)
    if top_k == 0:
        k, v = (torch.stack([t[:3].mean(0), t[3:].mean(0)]) for t in (k, v))
        leaves = torch.tensor([3.0, 2.0], dtype=torch.float64)
    q = cross.query(cross.norm(x)).unflatten(-1, (HEADS, -1))
    mixing = cross.fusion.mixing
    logits = torch.einsum("gh,ihd,jhd->gij", mixing.logits, q, k) / math.sqrt(2 * DIM) + leaves.log()
    weights = torch.einsum("gh,hij->gij", mixing.weights, logits.softmax(-1))
    wanted = cross.output(torch.einsum("hij,jhd->ihd", weights, v).flatten(1))
    close(cross(x, Source.of(vectors, forest, [4])), wanted, 1e-9)


def test_rows_of_the_mixing_matrices():
    """One row of the weight mixing matters if only head 1 has values, and the logits of every head do."""
    layer = exact(encoder_layer("hierarchical", "talking"))
    with torch.no_grad():
        values = slice(2 * HEADS * DIM, None)
        layer.project.weight[0, :, values].view(WIDTH, HEADS, DIM)[:, [0, 2]] = 0
        layer.project.bias[0, values].view(HEADS, DIM)[[0, 2]] = 0
    attend(layer, randn(TREE.num_leaves, WIDTH), TREE).square().sum().backward()
    weights = layer.fusion.mix_weights.grad
    assert (weights[1] != 0).all()
    assert (weights[[0, 2]] == 0).all()
    assert (layer.fusion.mix_logits.grad != 0).all()


# Collaborative heads


def test_collaborative_logits():
    fusion = exact(CollaborativeHeads(HEADS, DIM, 2 * DIM))
    q, k = randn(2, 11, 2, DIM).unbind(0)
    wide_q, wide_k = fusion.compare(q, k)
    assert wide_q.shape == wide_k.shape == (11, HEADS, fusion.key_dim)
    wanted = torch.einsum("hr,ir,jr->hij", fusion.mix_channels, q.flatten(1), k.flatten(1)) / math.sqrt(DIM)
    close(torch.einsum("ihr,jhr->hij", wide_q, wide_k) / math.sqrt(fusion.key_dim), wanted)


def test_layer_of_collaborative_heads_written_out():
    layer = exact(encoder_layer("flat", "collaborative"))
    x = randn(sum(LENGTHS), WIDTH)
    assert layer.fusion.key_dim == DIM  # half of three heads: one
    q, k, v = (x @ layer.project.weight[0] + layer.project.bias[0]).split([DIM, DIM, HEADS * DIM], -1)
    q, k, v = layer.norm_q(q).split(LENGTHS), layer.norm_k(k).split(LENGTHS), v.unflatten(-1, (HEADS, DIM))
    mixing = layer.fusion.mix_channels / math.sqrt(DIM)
    weights = [torch.einsum("hr,ir,jr->hij", mixing, a, b).softmax(-1) for a, b in zip(q, k, strict=True)]
    close(attend(layer, x, CAUSAL_TREES["flat"]), concatenated(weights, v.split(LENGTHS), layer, x), 1e-9)


@pytest.mark.parametrize("attention", CAUSAL)
def test_rotated_collaborative_logits_depend_only_on_distances(attention):
    layer = exact(decoder_layer(attention, "collaborative"))
    x, tree = randn(sum(LENGTHS), WIDE), CAUSAL_TREES[attention]
    if attention == "clustered":  # clusters depend on the rotated keys
        layer.attention.top_k = 99
    with torch.no_grad():
        here, there, apart = (
            layer(x, tree, angles_of(p, 2 * DIM))
            for p in (token_positions(), token_positions() + 29, 2 * token_positions())
        )
    assert (here - apart).abs().max() > 1e-3
    close(here, there, 1e-9)


def test_rotated_collaborative_logits_written_out():
    """Every block of shared channels is rotated like a separate head, and weighted by every head."""
    layer = exact(decoder_layer("flat", "collaborative", full=True))
    x, angles = randn(13, WIDE), angles_of(torch.arange(13), 2 * DIM)
    q, k, v = layer._project(x, angles)
    bare = layer.project(layer.norm_attention(x)).unflatten(-1, (3, HEADS, 2 * DIM))
    mixing = layer.fusion.mix_channels.unflatten(1, (HEADS, 2 * DIM))  # [heads, blocks, dim]
    wanted = torch.zeros(HEADS, 13, 13, dtype=torch.float64)
    for block in range(HEADS):
        query, key = bare[:, 0, block, None], bare[:, 1, block, None]
        rotated = rotate(query, angles)[:, 0], rotate(key * mixing[:, block], angles)
        wanted += torch.einsum("id,jhd->hij", *rotated)
    close(torch.einsum("ihr,jhr->hij", q, k) / math.sqrt(HEADS), wanted)  # attention divides by √(heads · dim)
    close(v, bare[:, 2])


def test_collaborative_logits_start_with_the_variance_of_separate_heads():
    """Logits of normalised queries and keys have the same variance for any number of shared channels."""
    q, k = randn(2, 400, 16, 16, seed=3).unbind(0)
    for blocks in (2, 8, 16):
        fusion = CollaborativeHeads(16, 16, blocks * 16).double()
        logits = torch.mul(*fusion.compare(q[:, :blocks], k[:, :blocks])).sum(-1) / math.sqrt(fusion.key_dim)
        assert logits.std().item() == pytest.approx(1, rel=0.05)


# Attention over heads


def test_weights_over_heads_written_out():
    fusion = exact(AttentionOverHeads(HEADS, DIM, WIDTH, query_dim=11))
    x = 3 + 2 * randn(17, WIDTH)
    β = fusion.weights(x)
    normal = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    q = normal @ fusion.query.weight.T + fusion.query.bias
    close(β, (q @ fusion.keys.T / math.sqrt(11)).softmax(-1))
    close(β.sum(-1), torch.ones(17, dtype=torch.float64))
    assert (β.std(0) > 0.01).all()  # weights differ between tokens
    attended = randn(17, HEADS, DIM)
    close(fusion.weigh(attended, x), torch.einsum("im,imd->imd", β, attended))


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
def test_tokens_weigh_heads_by_the_input_of_the_layer(kind):
    """Compare out_i = Σ_m β_im W_m head_m(i) with a layer that concatenates heads."""
    make = {
        "encoder": lambda *fusion: encoder_layer("hierarchical", *fusion),
        "decoder": lambda *fusion: decoder_layer("flat", *fusion),
        "cross": lambda *fusion: cross_layer(None, *fusion),
    }[kind]
    fused, plain = exact(make("over-heads")), make().double().eval()
    plain.load_state_dict({name: p for name, p in fused.state_dict().items() if not name.startswith("fusion.")})
    x = randn(TREE.num_leaves, WIDTH if kind == "encoder" else WIDE)
    β = fused.fusion.weights(x)

    class Weighed(Concatenation):
        def weigh(self, attended, _):
            return attended * β[..., None]

    plain.fusion = Weighed(HEADS, fused.head_dim)
    vectors = randn(len(x), SOURCE)
    for_each = {
        "encoder": lambda layer: attend(layer, x, TREE),
        "decoder": lambda layer: layer(x, TREE),
        "cross": lambda layer: layer(x, Source.of(vectors, TREE, TREE.lengths)),
    }[kind]
    close(for_each(fused), for_each(plain))


# Causality, independence and gradients


@pytest.mark.parametrize(("fusion", "attention"), DECODERS)
def test_no_output_depends_on_a_later_input(fusion, attention):
    layer, x = exact(decoder_layer(attention, fusion)), randn(sum(LENGTHS), WIDE)
    angles, look, tree = angles_of(token_positions(), 2 * DIM), randn(WIDE, seed=1), CAUSAL_TREES[attention]
    slopes = torch.autograd.functional.jacobian(lambda x: layer(x, tree, angles) @ look, x).abs().amax(-1)
    text, position = torch.repeat_interleave(torch.tensor(LENGTHS)), torch.arange(len(x))
    may_see = (text[:, None] == text) & (position <= position[:, None])
    assert (slopes[~may_see] == 0).all()
    assert (slopes[may_see] > 0).all()


@pytest.mark.parametrize(("fusion", "attention"), ENCODERS)
def test_trees_are_independent(fusion, attention):
    layer, x = exact(encoder_layer(attention, fusion)), randn(TREE.num_leaves, WIDTH)
    together = attend(layer, x, TREE).split(TREE.lengths)
    for rows, nested, wanted in zip(x.split(TREE.lengths), NESTED, together, strict=True):
        close(attend(layer, rows, Hierarchy.from_nested([nested])), wanted)


@pytest.mark.parametrize(("fusion", "attention"), ENCODERS)
def test_no_leaves_and_single_leaves(fusion, attention):
    layer = exact(encoder_layer(attention, fusion)).train()
    for forest in (Hierarchy.flat([]), Hierarchy.from_nested([1]), Hierarchy.from_parents([-1, -1])):
        x = randn(forest.num_leaves, WIDTH)
        assert finite(layer, attend(layer, x, forest)).shape == x.shape


@pytest.mark.parametrize(("fusion", "attention"), DECODERS)
def test_text_of_one_token(fusion, attention):
    """The token attends only to itself, so logits do not matter; talking heads mix weights of 1."""
    layer, x = exact(decoder_layer(attention, fusion)).train(), randn(1, WIDE)
    v = layer.project(layer.norm_attention(x)).unflatten(-1, (-1, 2 * DIM))[:, -HEADS:]
    mixing = layer.fusion.mixing
    v = v if mixing is None else v * mixing.weights.sum(1)[:, None]
    x1 = x + layer.output(layer.fusion.weigh(v, x).flatten(1))
    wanted = x1 + layer.feed_forward(layer.norm_feed_forward(x1))
    close(finite(layer, layer(x, Hierarchy.flat([1]))), wanted, 1e-9)


def small(kind, fusion):
    """Return a layer small enough for finite differences."""
    width = 3 if kind == "encoder" else 4
    made = AttentionOverHeads(2, 2, width, query_dim=2) if fusion == "over-heads" else head_fusion(fusion, width, 2, 2)
    if kind == "encoder":
        return EncoderLayer(width, 2, Hierarchical(), fusion=made, head_dim=2, feed_forward=2)
    if kind == "decoder":
        return DecoderLayer(width, 2, CausalMultiscale(2, near=0), fusion=made, feed_forward=2)
    return CrossAttention(width, 2, 3, top_k=0, fusion=made)


@pytest.mark.parametrize("kind", ["encoder", "decoder", "cross"])
@pytest.mark.parametrize("fusion", FUSIONS)
def test_gradcheck(fusion, kind):
    layer = exact(small(kind, fusion))
    names = [name for name, _ in layer.fusion.named_parameters(prefix="fusion")]
    forest = Hierarchy.from_nested([[2, [1, 1]], 1])

    def run(x, vectors, *values):
        others = {
            "encoder": (forest, Groups((5,), None, None)),
            "decoder": (causal_tree([4, 1], (2, 2)),),
            "cross": (Source.of(vectors, forest, forest.lengths),),
        }[kind]
        return torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x, *others))

    inputs = [layer.get_parameter(name).detach().clone().requires_grad_() for name in names]
    x = randn(5, 3 if kind == "encoder" else 4).requires_grad_()
    vectors = randn(5, 3, seed=9).requires_grad_(kind == "cross")
    assert torch.autograd.gradcheck(run, (x, vectors, *inputs))
    run(x, vectors, *inputs).square().sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in inputs)
