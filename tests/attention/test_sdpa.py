"""`scaled_dot_product_attention` stands where PyTorch's stands."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

import hsa
from hsa import Hierarchy
from hsa.errors import InvalidInput

EVERYTHING = {"clustered": {"top_k": 99}, "multiscale": {"top_k": 99}, "hierarchical": {"branching": (99,)}}
"""Options with which each kind selects all keys: softmax attention."""
SMALL = {"branching": (4, 2, 4), "tile": 16}
"""Chunks and tiles of causal attention for short sequences."""


def inputs(batch=2, heads=6, queries=53, keys=None, dim=5, kv_heads=None, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    kv = (batch, kv_heads or heads, queries if keys is None else keys, dim)
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in ((batch, heads, queries, dim), kv, kv)]


def lengths_mask(lengths, width, left=False):
    mask = torch.arange(width) < torch.tensor(lengths)[:, None]
    return mask.flip(1) if left else mask


@pytest.mark.parametrize("kind", EVERYTHING)
@pytest.mark.parametrize("left", [False, True])
@settings(deadline=None, max_examples=10)
@given(st.lists(st.integers(1, 53), min_size=2, max_size=2), st.sampled_from([None, 0.3]))
def test_softmax_attention_where_everything_is_selected(kind, left, lengths, scale):
    q, k, v = inputs()
    mask = lengths_mask(lengths, 53, left)
    out = hsa.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=scale, kind=kind, **EVERYTHING[kind])
    expected = F.scaled_dot_product_attention(q, k, v, mask[:, None, None], scale=scale)
    torch.testing.assert_close(out.transpose(1, 2)[mask], expected.transpose(1, 2)[mask])
    if kind == "clustered":  # hidden queries attend as well, as in PyTorch
        torch.testing.assert_close(out, expected)
    else:
        assert not out.transpose(1, 2)[~mask].any()


@pytest.mark.parametrize("kind", ["clustered", "multiscale"])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("everything", [{"threshold": 1e-30}, {"top_k": 99}])
def test_causal_gradients_and_grouped_heads(kind, kv_heads, everything):
    q, k, v = inputs(kv_heads=kv_heads)
    options = {"is_causal": True, "enable_gqa": kv_heads < 6}
    weights = torch.randn(2, 6, 53, 5, dtype=torch.float64)
    outs = [
        hsa.scaled_dot_product_attention(q, k, v, **options, kind=kind, **everything, **SMALL),
        F.scaled_dot_product_attention(q, k, v, **options),
    ]
    torch.testing.assert_close(*outs)
    gradients = [torch.autograd.grad(out, (q, k, v), weights) for out in outs]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("selection", [{}, {"top_k": 2}, {"threshold": 1 / 16}])
@pytest.mark.parametrize("kind", ["clustered", "multiscale"])
def test_a_causal_mask_is_is_causal_and_nothing_leaks(kind, selection):
    q, k, v = inputs(queries=301)
    options = {"kind": kind, **selection}
    out = hsa.scaled_dot_product_attention(q, k, v, is_causal=True, **options)
    by_mask = hsa.scaled_dot_product_attention(q, k, v, torch.ones(301, 301, dtype=torch.bool).tril(), **options)
    assert torch.equal(out, by_mask)
    for gradient in torch.autograd.grad(out[:, :, :200].sum(), (q, k, v)):
        assert not gradient[:, :, 200:].any()
    exact = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    assert (out - exact).abs().max() > 1e-4  # something is pooled


def test_causal_attention_is_clustered_attention():
    """Packed rows get the same, with the defaults of the operator; windows for kind "multiscale"."""
    q, k, v = (x.detach() for x in inputs(queries=601))
    packed = [x.transpose(1, 2).flatten(0, 1) for x in (q, k, v)]

    def rows(**options):
        return hsa.scaled_dot_product_attention(q, k, v, is_causal=True, **options).transpose(1, 2).flatten(0, 1)

    def expected(**options):
        return hsa.clustered_attention(*packed, [601, 601], causal=True, **options)

    torch.testing.assert_close(rows(), expected())
    torch.testing.assert_close(
        rows(threshold=0.01, branching=(8, 4, 2), tile=32), expected(threshold=0.01, branching=(8, 4, 2), tile=32)
    )
    per_head = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01)
    torch.testing.assert_close(rows(threshold=per_head), expected(threshold=per_head))
    torch.testing.assert_close(rows(top_k=3), expected(top_k=3))
    torch.testing.assert_close(rows(kind="multiscale", threshold=0.01), expected(threshold=0.01, windows=True))
    torch.testing.assert_close(rows(kind="multiscale", top_k=3), expected(top_k=3, windows=True))


@pytest.mark.parametrize("kind", ["clustered", "multiscale"])
@pytest.mark.parametrize("queries", [1, 7, 40])
def test_cross_attention(kind, queries):
    q, k, v = inputs(queries=queries, keys=53)
    mask = lengths_mask([53, 20], 53)[:, None, None]
    out = hsa.scaled_dot_product_attention(q, k, v, mask, kind=kind, **EVERYTHING[kind])
    torch.testing.assert_close(out, F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize("kind", EVERYTHING)
def test_the_same_as_on_packed_rows(kind):
    """A sequence gets the same whoever shares its batch, padded, packed or nested."""
    q, k, v = inputs()
    mask = lengths_mask([53, 20], 53)
    out = hsa.scaled_dot_product_attention(q, k, v, mask[:, None, None], kind=kind)
    alone = hsa.scaled_dot_product_attention(*(x[1:, :, :20] for x in (q, k, v)), kind=kind)
    torch.testing.assert_close(out[1:, :, :20], alone)
    nested = [
        torch.nested.nested_tensor_from_jagged(x.transpose(1, 2)[mask], torch.tensor([0, 53, 73])).transpose(1, 2)
        for x in (q, k, v)
    ]
    jagged = hsa.scaled_dot_product_attention(*nested, kind=kind)
    assert jagged.shape == nested[0].shape
    torch.testing.assert_close(jagged.transpose(1, 2).values(), out.transpose(1, 2)[mask])
    if kind == "hierarchical":
        tree = Hierarchy.regular([53, 20], (16,), repeat_last=True)
        packed = hsa.hierarchical_attention(*(x.transpose(1, 2)[mask] for x in (q, k, v)), tree)
        torch.testing.assert_close(packed, out.transpose(1, 2)[mask])


def test_nested_sequences_of_other_lengths_are_cross_attention():
    q, k, v = inputs(batch=1, queries=7, keys=20)
    nested = [
        torch.nested.nested_tensor([x[0].transpose(0, 1).detach()], layout=torch.jagged).transpose(1, 2)
        for x in (q, k, v)
    ]
    out = hsa.scaled_dot_product_attention(*nested, top_k=99)
    torch.testing.assert_close(out.transpose(1, 2).values(), F.scaled_dot_product_attention(q, k, v)[0].transpose(0, 1))


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda q, k, v: (q[0], k, v), {}, r"query: expected shape \[batch, heads, length, dim\], got \(6, 53, 5\)"),
        (lambda q, k, v: (q, None, v), {}, r"key: expected a tensor .*, got NoneType"),
        (
            lambda q, k, v: (q, k[:, :2], v[:, :2]),
            {},
            r"key: expected 6 heads, as query, got 2. Pass enable_gqa=True if 3",
        ),
        (lambda q, k, v: (q, k[:1], v), {}, r"expected equal numbers of sequences, got 2, 1 and 2"),
        (lambda q, k, v: (q, k, v[:, :, 1:]), {}, r"value: expected 53 rows, one per key, got 52"),
        (
            lambda q, k, v: (q[:, :, 1:], k, v),
            {"is_causal": True},
            r"expected as many queries as keys, 53, got 52",
        ),
        (lambda q, k, v: (q[:, :, 1:], k, v), {"kind": "hierarchical"}, r"key: expected the tokens of query"),
        (
            lambda q, k, v: (q, k, v),
            {"kind": "hierarchical", "is_causal": True},
            r"is_causal: expected False",
        ),
        (
            lambda q, k, v: (q, k, v),
            {"kind": "hierarchical", "dropout_p": 0.1},
            r"dropout_p: expected 0 for hierarchical",
        ),
        (
            lambda q, k, v: (q, k, v),
            {"kind": "hierarchical", "top_k": 2},
            r"top_k: expected no value, .* 'clustered' and",
        ),
        (lambda q, k, v: (q, k, v), {"kind": "flat"}, r"kind: expected one of 'clustered', .* got 'flat'"),
        (lambda q, k, v: (q, k, v), {"near": 1}, r"near: expected no value, as near is an option of kind 'multiscale'"),
        (lambda q, k, v: (q, k, v), {"top_k": 0}, r"top_k: expected an integer of at least 1, got 0"),
        (lambda q, k, v: (q, k, v), {"tile": 2.5}, r"tile: expected an integer of at least 1, got 2.5"),
        (lambda q, k, v: (q, k, v), {"branching": 8}, r"branching: expected family sizes from the leaves up"),
        (lambda q, k, v: (q, k, v), {"branching": (8, 1)}, r"branching\[1\]: expected an integer of at least 2, got 1"),
        (lambda q, k, v: (q, k, v), {"threshold": 0.1}, r"threshold: expected no value without causality, got 0.1"),
        (lambda q, k, v: (q, k, v), {"threshold": 2}, r"threshold: expected a number above 0 and at most 1, got 2"),
        (
            lambda q, k, v: (q, k, v),
            {"kind": "hierarchical", "threshold": 0.1},
            r"threshold: expected no value, as threshold is an option of kind 'clustered' and 'multiscale'",
        ),
        *(
            (lambda q, k, v: (q, k, v), {"is_causal": True, **options}, message)
            for options, message in (
                ({"threshold": 0.1, "top_k": 2}, r"top_k: expected None with a threshold, got 2"),
                ({"branching": (8, 2)}, r"branching: expected keys per group, .*, got \(8, 2\)"),
                ({"branching": (8, 3, 2)}, r"branching\[1\]: expected a power of two"),
                ({"tile": 24}, r"tile: expected a power of two"),
                ({"branching": (4, 2, 2)}, r"tile: expected at most 16, the keys of a chunk"),
                ({"sinks": 2}, r"sinks: expected no value in causal attention .*, got 2"),
                (
                    {"kind": "multiscale", "top_k": 2, "near": 1},
                    r"near: expected no value in causal attention .*, got 1",
                ),
            )
        ),
        (lambda q, k, v: (q, k, v), {"dropout_p": 1.0}, r"dropout_p: expected a number from 0 to below 1, got 1.0"),
        (lambda q, k, v: [x[:, :, :0] for x in (q, k, v)], {}, r"sequences of length 0; expected at least one token"),
        (lambda q, k, v: [x[None] for x in (q, k, v)], {}, r"query: expected shape .*Flatten the leading dimensions"),
    ],
)
def test_bad_input(change, options, message):
    with pytest.raises(InvalidInput, match=message):
        hsa.scaled_dot_product_attention(*change(*inputs()), **options)


def test_bad_nested_tensors():
    rows = [torch.randn(3, 2, 4), torch.randn(5, 2, 4)]
    jagged = torch.nested.nested_tensor(rows, layout=torch.jagged).transpose(1, 2)
    other = torch.nested.nested_tensor([rows[1], rows[0]], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(InvalidInput, match="attn_mask: expected None with nested tensors"):
        hsa.scaled_dot_product_attention(jagged, jagged, jagged, torch.ones(5, 5).bool())
    with pytest.raises(InvalidInput, match="value: expected sequences of 3, 5 tokens, as key, got 5, 3"):
        hsa.scaled_dot_product_attention(jagged, jagged, other)
    with pytest.raises(InvalidInput, match="key: expected sequences of 3, 5 tokens, as query, got 5, 3"):
        hsa.scaled_dot_product_attention(jagged, other, other, is_causal=True)
    with pytest.raises(InvalidInput, match="key: expected a nested tensor with the jagged layout, got a padded tensor"):
        hsa.scaled_dot_product_attention(jagged, torch.randn(2, 2, 5, 4), torch.randn(2, 2, 5, 4))
    empty = torch.nested.nested_tensor([rows[0], rows[0][:0]], layout=torch.jagged).transpose(1, 2)
    with pytest.raises(InvalidInput, match=r"query\[1\]: an empty sequence; expected at least one token"):
        hsa.scaled_dot_product_attention(empty, empty, empty)


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize(
    ("kind", "causal"), [*((kind, False) for kind in EVERYTHING), ("clustered", True), ("multiscale", True)]
)
def test_neither_padding_nor_the_batch_matters(kind, causal, left):
    """Selections by score are made by tokens alone."""
    q, k, v = (x.detach() * 3 for x in inputs(queries=301))
    mask = lengths_mask([301, 190], 301, left)
    options = {"kind": kind, "is_causal": causal}
    out = hsa.scaled_dot_product_attention(q, k, v, mask[:, None, None], **options)
    for x in (q, k, v):
        x.transpose(1, 2)[~mask] = torch.nan
    tokens = out.transpose(1, 2)[mask]
    assert torch.equal(
        hsa.scaled_dot_product_attention(q, k, v, mask[:, None, None], **options).transpose(1, 2)[mask], tokens
    )
    alone = [x[1:, :, mask[1]] for x in (q, k, v)]
    torch.testing.assert_close(hsa.scaled_dot_product_attention(*alone, **options), out[1:, :, mask[1]])


@pytest.mark.parametrize("kind", ["clustered", "multiscale"])
def test_queries_of_another_sequence_do_not_matter_to_each_other(kind):
    """The queries of a decoder: a shared selection would leak later ones."""
    q, k, v = (x.detach() * 3 for x in inputs(queries=30, keys=301))
    out = hsa.scaled_dot_product_attention(q, k, v, kind=kind, top_k=2)
    q[:, :, 20:] = 0
    assert torch.equal(hsa.scaled_dot_product_attention(q, k, v, kind=kind, top_k=2)[:, :, :20], out[:, :, :20])


@pytest.mark.parametrize("kind", EVERYTHING)
def test_queries_that_see_nothing_get_zeros(kind):
    """Sequences of padding alone, and masks that hide padding as queries and as keys."""
    q, k, v = inputs()
    tokens = lengths_mask([53, 20], 53)
    mask = (tokens[:, None] & tokens[:, :, None])[:, None]
    out = hsa.scaled_dot_product_attention(q, k, v, mask, kind=kind, **EVERYTHING[kind])
    expected = F.scaled_dot_product_attention(q, k, v, tokens[:, None, None])
    torch.testing.assert_close(out.transpose(1, 2)[tokens], expected.transpose(1, 2)[tokens])
    assert not out.transpose(1, 2)[~tokens].any()
    tokens[1] = False
    out = hsa.scaled_dot_product_attention(q, k, v, tokens[:, None, None], kind=kind, **EVERYTHING[kind])
    torch.testing.assert_close(out[0], F.scaled_dot_product_attention(q, k, v)[0])
    assert not out[1].any()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (q, k, v)))


def test_a_mask_of_padding_that_attends_is_checked():
    """Queries at padding attend to clustered keys, so their rows of the mask count."""
    q, k, v = inputs(batch=1, heads=1, queries=5)
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[:, 4] = mask[4, 0] = False
    with pytest.raises(InvalidInput, match="hides key 0 from query 4 of sequence 0"):
        hsa.scaled_dot_product_attention(q, k, v, mask)
    out = hsa.scaled_dot_product_attention(q, k, v, mask, kind="multiscale")
    assert not out[..., 4, :].any()


def test_values_that_are_not_finite_stay_where_pytorch_leaves_them():
    q, k, v = (x.detach() for x in inputs(queries=300))
    expected = F.scaled_dot_product_attention(q, k, v)
    k[0, 0, 3], q[1, 1, 7] = torch.nan, torch.inf
    for kind in ("clustered", "multiscale"):
        out = hsa.scaled_dot_product_attention(q, k, v, kind=kind, top_k=99)
        bad = F.scaled_dot_product_attention(q, k, v).isnan().any(-1)
        torch.testing.assert_close(out[~bad], expected[~bad])
        assert out[bad].isnan().all()


def test_autocast():
    """Mixed dtypes, as after rotary embeddings in float32, and the dtype of the result."""
    q, k, v = (x.detach().float() for x in inputs())
    with torch.autocast("cpu", torch.bfloat16):
        out = hsa.scaled_dot_product_attention(q, k, v.bfloat16(), top_k=99)
        expected = F.scaled_dot_product_attention(q, k, v.bfloat16())
    assert out.dtype == expected.dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


def test_kept_trees_are_bounded_by_their_leaves(monkeypatch):
    from hsa.attention import options

    monkeypatch.setattr(options, "_TREES", type(options._TREES)())
    monkeypatch.setattr(options, "_KEPT_LEAVES", 100)
    made = options.AttentionOptions.of("multiscale")
    trees = [made.tree([length], "cpu") for length in (40, 50, 30, 300)]
    assert [tree.num_leaves for tree in options._TREES.values()] == [300]
    assert made.tree([300], "cpu") is trees[-1]
    assert made.tree([40], "cpu") is not trees[0]


def test_a_failed_export_leaves_nothing_behind():
    x = inputs(queries=61)[0].detach()
    module = torch.nn.Module()
    module.forward = lambda x: hsa.scaled_dot_product_attention(x, x, x)
    with pytest.raises(Exception):  # noqa: B017, PT011  its type depends on the version of PyTorch
        torch.export.export(module, (x,))
    assert hsa.scaled_dot_product_attention(x, x, x).isfinite().all()


def test_dropout_keeps_the_mean():
    q, k, v = inputs(queries=40)
    torch.manual_seed(0)
    outs = [hsa.scaled_dot_product_attention(q, k, v, dropout_p=0.5, top_k=99) for _ in range(200)]
    exact = F.scaled_dot_product_attention(q, k, v)
    assert (torch.stack(outs).mean(0) - exact).abs().mean() < 0.1 * exact.abs().mean()
