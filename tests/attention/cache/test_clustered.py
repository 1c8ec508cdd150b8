"""`ClusteredCache`: decoding equals a pass over the whole text, also after prompts, crops and reordering."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, cluster_keys, multiscale_attention, select
from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Counted
from hsa.attention.flops import flops
from hsa.errors import InvalidInput

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 3, 11, 7
BIAS = torch.tensor([0.0, -0.5, 0.3, -1.0, 0.1, -0.2])
CASES = {
    "binary": {"branching": (4, 2), "chunk": 32, "top_k": 2, "beam": 5},
    "sink": {"branching": (4, 2), "chunk": 32, "top_k": 2, "beam": 5, "sinks": 1},
    "narrow": {"branching": (4, 2), "chunk": 16, "top_k": 3, "beam": 3, "sinks": 2},
    "default beam": {"branching": (2, 2), "chunk": 8, "top_k": 3},
    "exact": {"branching": (4, 2), "chunk": 16, "top_k": 2, "beam": "exact", "sinks": 1},
    "three members": {"branching": (4, 3), "chunk": 12, "top_k": 2, "beam": 4, "sinks": 1},
    "one factor": {"branching": (3,), "chunk": 9, "top_k": 2, "beam": 2},
    "chunks of a group": {"branching": (4, 2), "chunk": 4, "top_k": 2, "beam": 5},
    "nothing selected": {"branching": (4, 2), "chunk": 16, "top_k": 0, "sinks": 1},
    "everything selected": {"branching": (4, 2), "chunk": 16, "top_k": 80},
}


def tokens(lengths, seed=0, dtype=torch.float32):
    """Return random queries, keys and values, packed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(sum(lengths), *size, generator=generator).to(dtype) for size in sizes]


def full(q, k, v, lengths, *, branching, chunk, top_k, beam=None, sinks=0):
    """Return outputs, clusters, selection and trees of the full pass."""
    tree = Hierarchy.regular(lengths, branching, repeat_last=True, sinks=sinks)
    clusters = cluster_keys(k, tree, chunk=chunk)
    selection = select(q, k, tree, top_k=top_k, beam=beam, clusters=clusters, causal=True)
    out = multiscale_attention(q, k, v, tree, selection=selection, clusters=clusters, causal=True, pooled_bias=BIAS)
    return out, clusters, selection, tree


def cache_of(batch, case, layers=1, **others):
    return ClusteredCache(layers, batch, KV_HEADS, DIM, value_dim=VALUE_DIM, **CASES[case], **others)


class Sequences:
    """A batch of sequences, with the expected output of every token."""

    def __init__(self, lengths, case, seed=0):
        self.lengths, self.case = lengths, case
        self.q, self.k, self.v = tokens(lengths, seed)
        self.out, self.clusters, self.selection, self.tree = full(self.q, self.k, self.v, lengths, **CASES[case])
        self.first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)

    def prompts(self, lengths):
        """Return the packed keys and values of the first tokens."""
        rows = torch.cat([first + torch.arange(n) for first, n in zip(self.first, lengths, strict=True)])
        return self.k[rows], self.v[rows]

    def begin(self, cache, lengths, layer=0):
        cache.begin(lengths)
        cache.fill(layer, *self.prompts(lengths))

    def step(self, cache, which=None, counted=None):
        """Add a token to every sequence, and return the largest error; `which` are the sequences in the cache."""
        which = torch.arange(len(self.lengths)) if which is None else torch.tensor(which)
        rows = self.first[which] + torch.tensor(cache.lengths)
        cache.append()
        out = cache.attend(0, self.q[rows], self.k[rows], self.v[rows], pooled_bias=BIAS, counted=counted)
        return (out - self.out[rows]).abs().max().item()


@pytest.mark.parametrize("case", CASES)
def test_decoding_equals_the_full_pass(case):
    text = Sequences([300, 300], case)
    cache = cache_of(2, case)
    errors = [text.step(cache) for _ in range(300)]
    assert max(errors) < 1e-5, f"first at token {next(i for i, e in enumerate(errors) if e >= 1e-5)}"


def test_full_passes_of_all_lengths_agree():
    """A longer text has another tree, but earlier tokens get the same results."""
    text = Sequences([150], "sink")
    for length in (1, 2, 31, 32, 33, 34, 64, 65, 66, 97, 98, 129, 149):
        part = [x[:length] for x in (text.q, text.k, text.v)]
        out = full(*part, [length], **CASES["sink"])[0]
        torch.testing.assert_close(out[-1], text.out[length - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("products", [2**24, 2**12])
def test_attend_prompts_equals_the_full_pass(monkeypatch, case, products):
    monkeypatch.setattr("hsa.attention.cache.clustered.PRODUCTS", products)
    lengths = [150, 90, 33, 1, 32, 65]
    text = Sequences([n + 5 for n in lengths], case)
    rows = torch.cat([first + torch.arange(n) for first, n in zip(text.first, lengths, strict=True)])
    cache = cache_of(len(lengths), case)
    cache.begin(lengths)
    out = cache.attend_prompts(0, text.q[rows], *text.prompts(lengths), pooled_bias=BIAS)
    torch.testing.assert_close(out, text.out[rows], rtol=0, atol=1e-5)
    assert max(text.step(cache) for _ in range(5)) < 1e-5


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.integers(1, 110), min_size=1, max_size=4),
    st.booleans(),
    st.integers(0, 99),
)
def test_decoding_after_prompts_of_unequal_lengths(case, prompts, pass_clusters, seed):
    text = Sequences([n + 40 for n in prompts], case, seed)
    cache = cache_of(len(prompts), case)
    tree = cache.begin(prompts)
    k, v = text.prompts(prompts)
    cache.fill(0, k, v, clusters=cluster_keys(k, tree, chunk=CASES[case]["chunk"]) if pass_clusters else None)
    assert max(text.step(cache) for _ in range(40)) < 1e-5


@settings(max_examples=15)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.tuples(st.integers(1, 130), st.integers(0, 130)), min_size=1, max_size=3),
    st.integers(0, 99),
)
def test_crop_removes_all_traces_of_tokens(case, prompts, seed):
    lengths, shorter = [n for n, _ in prompts], [min(n, m) for n, m in prompts]
    text = Sequences([n + 20 for n in lengths], case, seed)
    cache = cache_of(len(lengths), case)
    text.begin(cache, lengths)
    cache.crop(shorter)
    assert cache.lengths == shorter
    if max(shorter):
        for kept, wanted in zip(cache.leaves(0), text.prompts(shorter), strict=True):
            assert torch.equal(kept, wanted)
    assert max(text.step(cache) for _ in range(20)) < 1e-5


def test_repeated_crops_across_chunks():
    text = Sequences([200, 190], "binary")
    cache = cache_of(2, "binary")
    for removed, added in ((0, 70), (9, 20), (40, 71), (64, 64), (1, 1)):
        cache.crop([n - removed for n in cache.lengths])
        assert max(text.step(cache) for _ in range(added)) < 1e-5


def test_reorder():
    text = Sequences([100, 120, 140], "sink")
    cache = cache_of(3, "sink")
    text.begin(cache, [30, 50, 70])
    which = [0, 1, 2]
    for index in ([2, 0, 1], [1, 1, 0, 2, 0], [4], [0, 0]):
        cache.reorder(torch.tensor(index))
        which = [which[i] for i in index]
        assert cache.batch == len(which)
        assert max(text.step(cache, which) for _ in range(10)) < 1e-5


def test_save_and_restore():
    text = Sequences([170, 190], "binary")
    cache = cache_of(2, "binary")
    text.begin(cache, [90, 110])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    other = cache_of(5, "binary")
    other.load_state_dict(torch.load(file, weights_only=True))
    for _ in range(60):
        assert text.step(cache) < 1e-5
        assert text.step(other) < 1e-5
    with pytest.raises(InvalidInput, match=r"state\['settings'\]: expected"):
        cache_of(2, "sink").load_state_dict(cache.state_dict())


def test_layers_do_not_mix():
    texts = [Sequences([90], "binary", seed) for seed in (1, 2)]
    cache = cache_of(1, "binary", layers=2)
    cache.begin([60])
    for layer, text in enumerate(texts):
        cache.fill(layer, *text.prompts([60]))
    for t in range(60, 90):
        cache.append()
        for layer, text in enumerate(texts):
            row = slice(t, t + 1)
            out = cache.attend(layer, text.q[row], text.k[row], text.v[row], pooled_bias=BIAS)
            torch.testing.assert_close(out, text.out[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    case = CASES["sink"]
    q, k, v = tokens([130], dtype=dtype)
    out = full(q, k, v, [130], **case)[0]
    cache = ClusteredCache(1, 1, KV_HEADS, DIM, value_dim=VALUE_DIM, dtype=dtype, **case)
    atol = 1e-12 if dtype == torch.float64 else 0.02
    for t in range(130):
        cache.append()
        row = slice(t, t + 1)
        ours = cache.attend(0, q[row], k[row], v[row], pooled_bias=BIAS)
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, out[row], rtol=0, atol=atol)


def test_pooled_nodes_can_be_dropped_and_scaled():
    q, k, v = tokens([130])
    case = CASES["sink"]
    _, clusters, _, tree = full(q, k, v, [130], **case)
    options = {"pooled_bias": -torch.inf, "scale": 0.5}
    selection = select(q, k, tree, top_k=2, beam=5, clusters=clusters, causal=True, scale=0.5)
    out = multiscale_attention(q, k, v, tree, selection=selection, clusters=clusters, causal=True, **options)
    cache = cache_of(1, "sink")
    for t in range(130):
        cache.append()
        row = slice(t, t + 1)
        torch.testing.assert_close(cache.attend(0, q[row], k[row], v[row], **options), out[row], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", ["binary", "three members", "exact"])
def test_counts_equal_those_of_the_full_pass(case):
    text = Sequences([210], case)
    cache, counted = cache_of(1, case), Counted()
    for _ in range(210):
        text.step(cache, counted=counted)
    by_pass = flops(text.selection, HEADS * DIM, HEADS, hierarchy=text.tree)
    entry = 4 * HEADS * DIM + HEADS
    assert abs(counted.entries - by_pass.attention / entry * HEADS) < HEADS
    assert counted.scored == text.selection.scored


def test_work_grows_with_the_logarithm_of_the_length():
    def entries(length):
        q, k, v = tokens([length])
        cache, counted = ClusteredCache(1, 1, KV_HEADS, DIM, value_dim=VALUE_DIM, **CASES["binary"]), Counted()
        cache.begin([length - 1])
        cache.fill(0, k[:-1], v[:-1])
        cache.append()
        cache.attend(0, q[-1:], k[-1:], v[-1:], counted=counted)
        return counted.entries + counted.scored

    first, second, third = (entries(32 * 2**n) for n in (2, 5, 8))
    assert 0 < third - second < 1.3 * (second - first)


def test_memory():
    cache = cache_of(2, "binary", layers=3)
    memory = cache.memory()
    assert memory.leaves_kept
    assert memory.flat_bytes == 0
    text = Sequences([60, 70], "binary")
    cache.begin([60, 70])
    for layer in range(3):
        cache.fill(layer, *text.prompts([60, 70]))
    assert cache.memory().flat_bytes == 3 * 130 * KV_HEADS * (DIM + VALUE_DIM) * 4
    assert cache.memory().bytes > cache.memory().flat_bytes
    assert "every key and value is kept" in str(cache.memory())


def test_bad_input():
    cache = cache_of(2, "binary", max_length=65)
    q, k, v = (x[:2] for x in tokens([2, 2]))
    with pytest.raises(InvalidInput, match="append before attend"):
        cache.attend(0, q, k, v)
    with pytest.raises(InvalidInput, match="closes: expected None, got heights"):
        cache.append(closes=[1, 0])
    with pytest.raises(InvalidInput, match="max_length"):
        cache.begin([66, 3])
    cache = cache_of(2, "binary", max_length=65)
    tree = cache.begin([64, 65])
    prompts = tokens([64, 65])[1:]
    with pytest.raises(InvalidInput, match=r"clusters: expected .*, got .* in chunks of 16.*chunk=32"):
        cache.fill(0, *prompts, clusters=cluster_keys(prompts[0], tree, chunk=16))
    cache = cache_of(2, "binary", max_length=65)
    cache.begin([64, 65])
    cache.fill(0, *prompts)
    with pytest.raises(InvalidInput, match="65"):
        cache.append()
    with pytest.raises(InvalidInput, match=r"chunk: expected .*, got 24 with branching \(4, 2\).*chunk=32"):
        ClusteredCache(1, 1, 1, 8, branching=(4, 2), chunk=24)
    with pytest.raises(InvalidInput, match=r"branching: expected .*, got \(8, 4, 2\)"):
        ClusteredCache(1, 1, 1, 8, branching=(8, 4, 2))
    with pytest.raises(InvalidInput, match=r"beam: expected .* at least 4 .*, got 3"):
        ClusteredCache(1, 1, 1, 8, top_k=4, beam=3)


def test_refused_calls_do_not_change_the_cache():
    cache = ClusteredCache(1, 1, 2, 8, branching=(4, 2), chunk=16, top_k=2)
    q, k, v = torch.randn(3, 40, 2, 8).unbind(0)
    cache.begin([39])
    with pytest.raises(InvalidInput, match="q: expected"):
        cache.attend_prompts(0, q[:7], k[:39], v[:39])
    with pytest.raises(InvalidInput, match="pooled_bias"):
        cache.attend_prompts(0, q[:39], k[:39], v[:39], pooled_bias=torch.zeros(3))
    assert cache.attend_prompts(0, q[:39], k[:39], v[:39]).shape == (39, 2, 8)
    cache.append()
    with pytest.raises(InvalidInput, match="pooled_bias"):
        cache.attend(0, q[39:], k[39:], v[39:], pooled_bias=torch.zeros(3))
    assert cache.attend(0, q[39:], k[39:], v[39:]).shape == (1, 2, 8)


@pytest.mark.parametrize("inference", [False, True])
def test_no_gradients_are_recorded(inference):
    cache = ClusteredCache(1, 1, 2, 8, branching=(4, 2), chunk=16, top_k=2)
    q, k, v = (torch.randn(40, 2, 8, requires_grad=True) for _ in range(3))
    with torch.inference_mode(inference):
        cache.begin([39])
        assert not cache.attend_prompts(0, q[:39], k[:39], v[:39]).requires_grad
        cache.append()
        bias = torch.zeros(2, requires_grad=True)
        assert not cache.attend(0, q[39:], k[39:], v[39:], pooled_bias=bias).requires_grad
    assert not any(x.requires_grad or x.is_inference() for x in cache.leaves(0))
