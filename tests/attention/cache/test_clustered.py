"""`ClusteredCache`: decoding equals a pass over the whole text, also after prompts, crops and reordering."""

import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import cluster, clustered_attention, select_groups
from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Counted
from hsa.errors import InvalidInput

HEADS, KV_HEADS, DIM, VALUE_DIM = 6, 3, 64, 7
BIAS = torch.tensor([0.0, -0.5, 0.3, -1.0, 0.1, -0.2])
CASES = {
    "threshold": {"branching": (4, 2, 4), "tile": 8, "threshold": 1 / 16},
    "per head": {"branching": (4, 2, 4), "tile": 8, "threshold": (1 / 16, 1 / 2, 1 / 64, 1.0, 1 / 8, 1 / 32)},
    "no spread": {"branching": (4, 2, 4), "tile": 8, "threshold": 1 / 16, "spread": 0.0},
    "shared lists": {"branching": (2, 4, 2), "tile": 4, "threshold": 1 / 16, "share_lists": True},
    "shared lists per head": {
        "branching": (2, 4, 2),
        "tile": 4,
        "threshold": (1 / 16, 1 / 2, 1 / 64, 1.0, 1 / 8, 1 / 32),
        "share_lists": True,
    },
    "windows": {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 16, "windows": True},
    "top_k": {"branching": (4, 2, 2), "tile": 8, "top_k": 2},
    "shared top_k": {"branching": (4, 2, 2), "tile": 16, "top_k": 1, "share_lists": True},
    "tiles of a query": {"branching": (2, 2, 2), "tile": 1, "threshold": 1 / 8},
    "chunks of a group": {"branching": (8, 1, 1), "tile": 4, "top_k": 1},
    "exact at first": {"branching": (4, 2, 2), "tile": 8, "threshold": 1 / 16, "exact_until": 40},
    "exact at first, windows": {"branching": (2, 2, 2), "tile": 4, "top_k": 1, "exact_until": 24, "windows": True},
    "nothing selected": {"branching": (4, 2, 2), "tile": 8, "top_k": 0},
    "everything selected": {"branching": (4, 2, 2), "tile": 8, "top_k": 80},
}


def tokens(lengths, seed=0, dtype=torch.float64):
    """Return random queries, keys and values, packed."""
    generator = torch.Generator().manual_seed(seed)
    sizes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUE_DIM))
    return [torch.randn(sum(lengths), *size, generator=generator, dtype=torch.float64).to(dtype) for size in sizes]


def full(q, k, v, lengths, case, **others):
    return clustered_attention(q, k, v, lengths, causal=True, **{"pooled_bias": BIAS, **CASES[case], **others})


def cache_of(batch, case, layers=1, dtype=torch.float64, **others):
    return ClusteredCache(layers, batch, KV_HEADS, DIM, value_dim=VALUE_DIM, dtype=dtype, **CASES[case], **others)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


class Sequences:
    """A batch of sequences, with the expected output of every token."""

    def __init__(self, lengths, case, seed=0):
        self.lengths, self.case = lengths, case
        self.q, self.k, self.v = tokens(lengths, seed)
        self.out = full(self.q, self.k, self.v, lengths, case)
        self.first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)

    def rows(self, begins, ends):
        """Return the packed rows of tokens of every sequence."""
        return torch.cat([f + torch.arange(a, b) for f, a, b in zip(self.first, begins, ends, strict=True)])

    def read(self, cache, new):
        """Add tokens to every sequence, as prompts, and check their attention."""
        before = cache.lengths
        rows = self.rows(before, [a + n for a, n in zip(before, new, strict=True)])
        cache.extend(new) if any(before) or not all(new) else cache.begin(new)
        out = cache.attend_prompts(0, self.q[rows], self.k[rows], self.v[rows], pooled_bias=BIAS)
        close(out, self.out[rows])

    def step(self, cache, which=None, counted=None):
        """Add a token to every sequence, and check its attention; `which` are the sequences in the cache."""
        which = torch.arange(len(self.lengths)) if which is None else torch.tensor(which)
        rows = self.first[which] + torch.tensor(cache.lengths)
        cache.append()
        out = cache.attend(0, self.q[rows], self.k[rows], self.v[rows], pooled_bias=BIAS, counted=counted)
        close(out, self.out[rows])

    def steps(self, cache, number, which=None):
        for _ in range(number):
            self.step(cache, which)


def same_state(one, other):
    """Compare what caches keep of their sequences; tensors may have rows that are not in use."""
    assert one.lengths == other.lengths
    ours, theirs = one.state_dict()["layers"][0], other.state_dict()["layers"][0]
    for i, n in enumerate(one.lengths):
        chunks, rest = divmod(n, one.shape.chunk)
        for name in ours:
            close(ours[name][:, i, :chunks], theirs[name][:, i, :chunks])
        for name in ("k", "v"):
            close(ours[name][:, i, chunks : chunks + 1, :rest], theirs[name][:, i, chunks : chunks + 1, :rest])


@pytest.mark.parametrize("case", CASES)
def test_decoding_equals_the_full_pass(case):
    text = Sequences([150, 150], case)
    text.steps(cache_of(2, case), 150)


def test_default_sizes():
    lengths = [600, 530]
    q, k, v = tokens(lengths, dtype=torch.float32)
    wanted = clustered_attention(q, k, v, lengths, causal=True)
    cache = ClusteredCache(1, 2, KV_HEADS, DIM, value_dim=VALUE_DIM)
    rows = torch.cat([torch.arange(505), 600 + torch.arange(450)])
    cache.begin([505, 450])
    close(cache.attend_prompts(0, q[rows], k[rows], v[rows]), wanted[rows], atol=1e-5)
    for n in range(80):
        row = torch.tensor([505 + n, 600 + 450 + n])
        cache.append()
        close(cache.attend(0, q[row], k[row], v[row]), wanted[row], atol=1e-5)


@settings(max_examples=25)
@given(st.sampled_from(sorted(CASES)), st.lists(st.integers(1, 110), min_size=1, max_size=4), st.integers(0, 99))
def test_decoding_after_prompts_of_unequal_lengths(case, prompts, seed):
    text = Sequences([n + 40 for n in prompts], case, seed)
    cache = cache_of(len(prompts), case)
    text.read(cache, prompts)
    text.steps(cache, 40)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.tuples(*[st.integers(0, 60)] * 3), min_size=1, max_size=5),
    st.integers(0, 99),
)
def test_any_split_of_prompts_gives_the_same_rows_and_state(case, pieces, seed):
    total = [sum(part) for part in zip(*pieces, strict=True)]
    text = Sequences([n + 10 for n in total], case, seed)
    cache, whole = cache_of(3, case), cache_of(3, case)
    for piece in pieces:
        text.read(cache, list(piece))
    text.read(whole, total)
    same_state(cache, whole)
    text.steps(cache, 10)


@pytest.mark.parametrize("case", ["threshold", "windows", "shared top_k"])
def test_pieces_and_tokens_alternate(case):
    text = Sequences([170, 200], case)
    cache = cache_of(2, case)
    for new, steps in (([3, 40], 5), ([0, 7], 30), ([21, 0], 3), ([13, 17], 9)):
        text.read(cache, new)
        text.steps(cache, steps)
    cache.extend([0, 0])
    empty = torch.empty(0, HEADS, DIM).double()
    assert cache.attend_prompts(0, empty, empty[:, :KV_HEADS], empty[:, :KV_HEADS, :VALUE_DIM]).shape == (0, 6, 7)
    text.steps(cache, 5)


@settings(max_examples=20)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.integers(1, 110), min_size=1, max_size=3),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_prompts_whose_attention_is_already_computed(case, prompts, pass_keys, pass_rows, seed):
    text = Sequences([n + 20 for n in prompts], case, seed)
    rows = text.rows([0] * len(prompts), prompts)
    q, k, v = text.q[rows], text.k[rows], text.v[rows]
    options = dict(CASES[case])
    tables = {name: options.pop(name) for name in ("branching", "windows") if name in options}
    keys = cluster(k, v, prompts, **tables)
    selection = select_groups(q, k, keys, prompts, causal=True, **options)
    cache, other = cache_of(len(prompts), case), cache_of(len(prompts), case)
    cache.begin(prompts)
    cache.fill(0, k, v, keys if pass_keys else None, selection if pass_rows else selection.opened())
    text.read(other, prompts)
    if pass_rows:
        same_state(cache, other)
    text.steps(cache, 20)


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(CASES)),
    st.lists(st.tuples(st.integers(1, 130), st.integers(0, 1), st.integers(0, 15)), min_size=1, max_size=3),
    st.booleans(),
    st.integers(0, 99),
)
def test_crop_to_the_last_two_tiles_is_exact(case, prompts, step_by_step, seed):
    tile, lengths = CASES[case]["tile"], [n for n, *_ in prompts]
    # The last token kept lies in the tile of the last token, or in the one before.
    shorter = [
        max(0, min(n, ((n - 1) // tile - tiles) * tile + 1 + row % tile)) if n > tiles * tile else n
        for n, tiles, row in prompts
    ]
    text = Sequences([n + 20 for n in lengths], case, seed)
    cache = cache_of(len(lengths), case)
    if step_by_step:
        lengths = [lengths[0]] * len(lengths)
        shorter = [min(shorter[0], lengths[0])] * len(lengths)
        text = Sequences([n + 20 for n in lengths], case, seed)
        text.steps(cache, lengths[0])
    else:
        text.read(cache, lengths)
    cache.crop(shorter)
    assert cache.lengths == shorter
    if max(shorter):
        rows = text.rows([0] * len(shorter), shorter)
        for kept, wanted in zip(cache.leaves(0), (text.k, text.v), strict=True):
            assert torch.equal(kept, wanted[rows])
    text.steps(cache, 20)


@settings(max_examples=20)
@given(st.sampled_from(sorted(CASES)), st.integers(1, 130), st.integers(0, 130), st.integers(0, 99))
def test_crop_anywhere_is_exact_from_the_next_tile_on(case, length, shorter, seed):
    shorter, tile = min(length, shorter), CASES[case]["tile"]
    text = Sequences([length + 40], case, seed)
    cache = cache_of(1, case)
    text.read(cache, [length])
    cache.crop([shorter])
    while cache.lengths[0] % tile:
        row = slice(cache.lengths[0], cache.lengths[0] + 1)
        cache.append()
        cache.attend(0, text.q[row], text.k[row], text.v[row], pooled_bias=BIAS)
    text.steps(cache, 20)


def test_repeated_crops_across_tiles_and_chunks():
    text = Sequences([200, 190], "threshold")
    cache = cache_of(2, "threshold")
    for removed, added in ((0, 70), (3, 20), (8, 21), (5, 64), (1, 1), (8, 8)):
        cache.crop([n - removed for n in cache.lengths])
        text.steps(cache, added)


def test_reorder():
    text = Sequences([100, 120, 140], "threshold")
    cache = cache_of(3, "threshold")
    text.read(cache, [30, 50, 70])
    which = [0, 1, 2]
    for index in ([2, 0, 1], [1, 1, 0, 2, 0], [4], [0, 0]):
        cache.reorder(torch.tensor(index))
        which = [which[i] for i in index]
        assert cache.batch == len(which)
        text.steps(cache, 7, which)


@pytest.mark.parametrize("case", ["threshold", "per head"])
def test_save_and_restore(case):
    text = Sequences([170, 190], case)
    cache = cache_of(2, case)
    text.read(cache, [90, 110])
    file = io.BytesIO()
    torch.save(cache.state_dict(), file)
    file.seek(0)
    other = cache_of(5, case)
    other.load_state_dict(torch.load(file, weights_only=True))
    other.crop([n - 3 for n in other.lengths])
    text.steps(other, 63)
    text.steps(cache, 60)
    same_state(cache, other)
    with pytest.raises(InvalidInput, match=r"state\['settings'\]: expected"):
        cache_of(2, "no spread").load_state_dict(cache.state_dict())


def test_layers_do_not_mix():
    texts = [Sequences([90], "threshold", seed) for seed in (1, 2)]
    cache = cache_of(1, "threshold", layers=2)
    cache.begin([60])
    for layer, text in enumerate(texts):
        cache.attend_prompts(layer, text.q[:60], text.k[:60], text.v[:60])
    for t in range(60, 90):
        cache.append()
        for layer, text in enumerate(texts):
            row = slice(t, t + 1)
            close(cache.attend(layer, text.q[row], text.k[row], text.v[row], pooled_bias=BIAS), text.out[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype):
    q, k, v = tokens([130], dtype=dtype)
    out = full(q, k, v, [130], "threshold")
    cache = cache_of(1, "threshold", dtype=dtype)
    for t in range(130):
        cache.append()
        row = slice(t, t + 1)
        ours = cache.attend(0, q[row], k[row], v[row], pooled_bias=BIAS)
        assert ours.dtype == dtype
        close(ours, out[row], atol=1e-5 if dtype == torch.float32 else 0.02)


def test_pooled_nodes_can_be_dropped_and_scaled():
    q, k, v = tokens([130])
    options = {"pooled_bias": -torch.inf, "scale": 0.5}
    out = full(q, k, v, [130], "threshold", **options)
    cache = cache_of(1, "threshold")
    cache.begin([61])
    close(cache.attend_prompts(0, q[:61], k[:61], v[:61], **options), out[:61])
    for t in range(61, 130):
        cache.append()
        row = slice(t, t + 1)
        close(cache.attend(0, q[row], k[row], v[row], **options), out[row])


@pytest.mark.parametrize("case", ["nothing selected", "everything selected", "top_k"])
def test_counts(case):
    text = Sequences([50], case)
    cache, counted = cache_of(1, case), Counted()
    for _ in range(50):
        text.step(cache, counted=counted)
    own = sum(t % 16 + 1 for t in range(50))
    earlier = [t // 16 for t in range(50)]  # chunks of 16 keys, 4 groups and 2 nodes
    if case == "everything selected":
        assert counted.entries == HEADS * (own + 16 * sum(earlier))
    if case == "nothing selected":  # the first group: 4 keys, its sibling, the other node
        assert counted.entries == HEADS * (own + sum(4 + 1 + 1 + n - 1 for n in earlier if n))
    per_chunk = 2 * 4 * (DIM + 1) + (2 * DIM + 1)  # groups in half of the channels, and the mean of the chunk
    assert counted.selection == HEADS * per_chunk * sum(earlier)
    assert counted.pooling == 3 * 2 * KV_HEADS * (DIM + VALUE_DIM) * (16 + 4 + 2)
    assert counted.clustering > 0


def test_memory():
    cache = cache_of(2, "threshold", layers=3)
    assert cache.memory().leaves_kept
    assert cache.memory().flat_bytes == 0
    text = Sequences([60, 70], "threshold")
    cache.begin([60, 70])
    for layer in range(3):
        rows = text.rows([0, 0], [60, 70])
        cache.attend_prompts(layer, text.q[rows], text.k[rows], text.v[rows])
    assert cache.memory().flat_bytes == 3 * 130 * KV_HEADS * (DIM + VALUE_DIM) * 8
    assert cache.memory().bytes > cache.memory().flat_bytes
    assert "every key and value is kept" in str(cache.memory())


def test_memory_is_little_more_than_that_of_a_flat_cache():
    cache = ClusteredCache(1, 1, 2, 64, dtype=torch.bfloat16)
    q, k, v = (torch.randn(8192, heads, 64, dtype=torch.bfloat16) for heads in (8, 2, 2))
    cache.begin([8192])
    cache.fill(0, k, v)
    cache.append()
    cache.attend(0, q[:1], k[:1], v[:1])
    assert 1 < cache.memory().bytes / cache.memory().flat_bytes < 1.3


def test_bad_input():
    cache = cache_of(2, "threshold", max_length=65)
    q, k, v = (x[:2] for x in tokens([2, 2]))
    with pytest.raises(InvalidInput, match="append before attend"):
        cache.attend(0, q, k, v)
    with pytest.raises(InvalidInput, match="closes: expected None, got heights"):
        cache.append(closes=[1, 0])
    with pytest.raises(InvalidInput, match="max_length"):
        cache.begin([66, 3])
    cache = cache_of(2, "threshold", max_length=65)
    cache.begin([64, 63])
    q, k, v = tokens([64, 63])
    with pytest.raises(
        InvalidInput, match=r"opened: prompt 1 of 63 tokens ends inside a tile of 8; expected .*attend_p"
    ):
        cache.fill(0, k, v)
    with pytest.raises(InvalidInput, match=r"opened: expected .* \[2, lists, groups\], got Tensor"):
        cache.fill(0, k, v, opened=torch.ones(2, 6, 4))
    keys = cluster(k, v, [64, 63], branching=(4, 2, 4))
    for lengths in ([63, 64], [64, 63]):
        selection = select_groups(q, k, cluster(k, v, lengths, branching=(4, 2, 2)), lengths, causal=True, tile=8)
        with pytest.raises(InvalidInput, match="opened: expected one for these prompts and tiles, got a selection for"):
            cache.fill(0, k, v, keys, selection)
    with pytest.raises(InvalidInput, match=r"keys: expected chunks of \(4, 2, 4\).*, got chunks of \(4, 2, 2\)"):
        cache.fill(0, k, v, cluster(k, v, [64, 63], branching=(4, 2, 2)), selection.opened())
    cache.attend_prompts(0, q, k, v)
    for lengths in ([1], [-1, 2]):
        with pytest.raises(InvalidInput, match=r"lengths: expected .* each of the 2 sequences"):
            cache.extend(lengths)
    with pytest.raises(InvalidInput, match="max_length"):
        cache.extend([0, 3])
    cache.append()
    with pytest.raises(InvalidInput, match="expected 6, as for earlier tokens"):
        cache.attend(0, q[:2, :3], k[:2], v[:2])
    cache = cache_of(1, "threshold")
    cache.begin([8])
    cache.fill(0, k[:8], v[:8])
    cache.extend([8])
    with pytest.raises(
        InvalidInput, match=r"fill: expected a new one, got a cache that had tokens\. Use attend_prompts"
    ):
        cache.fill(0, k[:8], v[:8])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"branching": (8, 2)}, r"branching: expected .*, got \(8, 2\)"),
        ({"tile": 65}, "tile: expected a power of two"),
        ({"branching": (2, 2, 2), "tile": 16}, "tile: expected at most 8"),
        ({"threshold": 2}, "threshold: expected"),
        ({"threshold": [0.5, 2]}, r"threshold\[1\]: expected"),
        ({"threshold": 0.5, "top_k": 2}, "top_k: expected None with a threshold"),
        ({"spread": -1}, "spread: expected"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(InvalidInput, match=message):
        ClusteredCache(1, 1, 1, 8, **options)


def test_refused_calls_do_not_change_the_cache():
    cache = ClusteredCache(1, 1, 2, 8, branching=(4, 2, 2), tile=8, top_k=2)
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


def test_the_number_of_heads_is_that_of_the_thresholds():
    """The cache learns its number of query heads from the first queries."""
    cache = ClusteredCache(1, 1, 2, 8, branching=(4, 2, 2), tile=8, threshold=torch.tensor([0.5, 0.25, 0.1, 0.1]))
    q, k, v = torch.randn(40, 4, 8), *torch.randn(2, 40, 2, 8)
    message = "threshold: expected one number, or one for each of the 2 query heads, got a sequence of 4"
    cache.begin([39])
    with pytest.raises(InvalidInput, match=message):
        cache.attend_prompts(0, q[:39, :2], k[:39], v[:39])
    assert cache.attend_prompts(0, q[:39], k[:39], v[:39]).shape == (39, 4, 8)
    cache.append()
    with pytest.raises(InvalidInput, match=message):
        cache.attend(0, q[39:, :2], k[39:], v[39:])
    assert cache.attend(0, q[39:], k[39:], v[39:]).shape == (1, 4, 8)


@pytest.mark.parametrize("inference", [False, True])
def test_no_gradients_are_recorded(inference):
    cache = ClusteredCache(1, 1, 2, 8, branching=(4, 2, 2), tile=8, top_k=2)
    q, k, v = (torch.randn(40, 2, 8, requires_grad=True) for _ in range(3))
    with torch.inference_mode(inference):
        cache.begin([39])
        assert not cache.attend_prompts(0, q[:39], k[:39], v[:39]).requires_grad
        cache.append()
        bias = torch.zeros(2, requires_grad=True)
        assert not cache.attend(0, q[39:], k[39:], v[39:], pooled_bias=bias).requires_grad
    assert not any(x.requires_grad or x.is_inference() for x in cache.leaves(0))
