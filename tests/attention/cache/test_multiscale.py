"""The causal tree, token by token: the same numbers as the full pass, whatever happened to the cache before."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import select
from hsa.attention.cache.flat import FlatCache
from hsa.attention.cache.interface import Counted, Memory
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.attention.flops import flops
from hsa.errors import InvalidInput
from hsa.tree.causal_tree import causal_tree
from tests.attention.cache.growing import DIM, HEADS, KV_HEADS, VALUE_DIM, Text, saved

BIAS = torch.tensor([0.0, -0.5, 0.3, -1.0, 0.1, -0.2])
WAYS = {
    "windows": {"branching": (4, 3), "near": 1},
    "binary": {"branching": (2,), "near": 3, "sinks": 1},
    "nothing near": {"branching": (3, 2), "near": 0, "sinks": 2},
    "sentences": {"branching": (4, 3), "near": 1, "closing": 1},
    "chapters": {"branching": (3, 4, 2), "near": 2, "sinks": 2, "closing": 3},
    "closing above all windows": {"branching": (5,), "near": 0, "closing": 9},
    "wide": {"branching": (16, 16), "near": 2, "sinks": 1},
}
BIASES = dict(zip(WAYS, (0.0, BIAS, 0.3, BIAS, -torch.inf, -0.7, BIAS[:1]), strict=True))


def text_of(lengths, way, **others):
    return Text(lengths, **WAYS[way], pooled_bias=BIASES[way], **others)


def cache_of(batch, way, layers=1, max_length=400, **others):
    return MultiscaleCache(
        layers, batch, KV_HEADS, DIM, value_dim=VALUE_DIM, max_length=max_length, **WAYS[way], **others
    )


def assert_same_state(ours, theirs, atol=1e-6):
    """Keys and values count where there is a node."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        if name == "settings":
            assert ours[name] == theirs[name]
        elif name not in ("keys", "values"):
            assert torch.equal(ours[name], theirs[name]), name
    taken = ours["leaves"] > 0
    for name in ("keys", "values"):
        pair = (state[name].transpose(2, 3)[:, taken] for state in (ours, theirs))
        torch.testing.assert_close(*pair, rtol=0, atol=atol)


@pytest.mark.parametrize("way", WAYS)
def test_token_by_token_is_the_full_pass(way):
    text, cache = text_of([300, 300], way), cache_of(2, way)
    errors = [text.step(cache) for _ in range(300)]
    assert max(errors) < 1e-5, f"first at token {next(i for i, e in enumerate(errors) if e >= 1e-5)}"
    assert cache.lengths == [300, 300]


@pytest.mark.parametrize("way", ["binary", "chapters"])
def test_at_every_length_it_is_the_full_pass_of_that_length(way):
    """The tree over a longer text is another one, but not for the tokens that were there before."""
    text = text_of([130], way)
    for length in (*range(1, 40), 63, 64, 65, 66, 127, 128, 129, 130):
        part = Text.__new__(Text)
        part.near, part.attention = text.near, text.attention
        closes = None if text.closes is None else text.closes[:length]
        part.tree = causal_tree([length], WAYS[way]["branching"], closes, WAYS[way]["sinks"])
        out = part.outputs(text.q[:length], text.k[:length], text.v[:length])
        torch.testing.assert_close(out[-1], text.out[length - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_prompts_give_the_state_that_appending_gives(way):
    text, cache = text_of([80, 80], way), cache_of(2, way, max_length=90, rewind=2)
    for length in range(1, 81):
        text.step(cache)
        if length < 20 or length % 7 < 2:
            prefilled = cache_of(2, way, max_length=90, rewind=2)
            text.begin(prefilled, [length, length])
            assert_same_state(prefilled.state_dict(), cache.state_dict())


@settings(max_examples=15)
@given(
    st.lists(st.integers(1, 130), min_size=1, max_size=4),
    st.lists(st.integers(2, 5), min_size=1, max_size=3),
    st.fixed_dictionaries({"near": st.integers(0, 3), "sinks": st.integers(0, 2), "closing": st.integers(0, 3)}),
    st.sampled_from([0.0, 0.4, BIAS[:3], -torch.inf]),
    st.integers(0, 3),
    st.integers(0, 999),
)
def test_prompts_of_unequal_lengths_and_then_token_by_token(prompts, branching, way, bias, rewind, seed):
    heads = (3 if isinstance(bias, torch.Tensor) else HEADS, KV_HEADS)
    lengths = [n + 30 for n in prompts]
    text = Text(lengths, tuple(branching), **way, heads=heads, pooled_bias=bias, seed=seed)
    most = max(lengths)
    cache = MultiscaleCache(
        1, len(prompts), KV_HEADS, DIM, value_dim=VALUE_DIM, branching=branching, max_length=most, rewind=rewind, **way
    )
    assert text.begin(cache, prompts) == causal_tree(
        prompts, branching, None if text.closes is None else text.closes[text.of(prompts)], way["sinks"]
    )
    assert cache.lengths == prompts
    assert max(text.step(cache) for _ in range(30)) < 1e-5
    with pytest.raises(InvalidInput, match="max_length"):
        cache.append()


@pytest.mark.parametrize("way", ["windows", "binary", "chapters"])
def test_after_a_crop_it_is_as_if_the_tokens_had_never_been(way):
    rewind, text = 5, text_of([65, 65], way)
    cache = cache_of(2, way, max_length=70, rewind=rewind)
    for length in range(65):
        removed = 1 + length % rewind
        for _ in range(removed):
            text.step_garbage(cache)
        cache.crop([length, length])
        assert cache.lengths == [length, length]
        assert text.step(cache) < 1e-5, length


@pytest.mark.parametrize("way", ["nothing near", "sentences", "wide"])
def test_crops_that_differ_between_sequences(way):
    text, cache = text_of([150, 150, 150], way), cache_of(3, way, rewind=6)
    text.begin(cache, [10, 23, 40])
    for turn in range(15):
        assert max(text.step(cache) for _ in range(4)) < 1e-5
        wanted = [n - back for n, back in zip(cache.lengths, (turn % 4, 2, 4 - turn % 5), strict=True)]
        for _ in range(2):
            text.step_garbage(cache)
        cache.crop(wanted)
        assert cache.lengths == wanted
    assert max(text.step(cache) for _ in range(9)) < 1e-5


def test_crops_add_up():
    """What was overwritten on the way to the longest text does not come back by cropping twice."""
    text, cache = text_of([60], "nothing near"), cache_of(1, "nothing near", rewind=3)
    text.begin(cache, [40])
    cache.crop([38])
    cache.crop([37])
    for saved_and_restored in (False, True):
        if saved_and_restored:
            cache.load_state_dict(saved(cache))
        with pytest.raises(InvalidInput, match=r"lengths: given .*at most 3.*rewind"):
            cache.crop([36])
    cache.reorder([0, 0])
    with pytest.raises(InvalidInput, match="rewind"):
        cache.crop([37, 36])
    assert max(text.step(cache, which=[0, 0]) for _ in range(5)) < 1e-5  # 42: two more than ever before
    cache.crop([39, 40])
    assert max(text.step(cache, which=[0, 0]) for _ in range(9)) < 1e-5


def test_reordered_sequences():
    text, cache = text_of([100, 120, 140], "chapters"), cache_of(3, "chapters")
    text.begin(cache, [30, 50, 70])
    which = [0, 1, 2]
    for grew, index in ((0, [2, 0, 1]), (10, [1, 1, 0, 2, 0]), (20, [4]), (30, [0, 0])):
        cache.reorder(torch.tensor(index))
        which = [which[i] for i in index]
        assert cache.batch == len(which)
        assert cache.lengths == [(30, 50, 70)[i] + grew for i in which]
        assert max(text.step(cache, which) for _ in range(10)) < 1e-5
    longest = cache_of(2, "windows", max_length=20)
    text_of([20, 20], "windows").begin(longest, [20, 9])
    longest.reorder([1, 1])
    longest.append()  # the longest sequence has gone


def test_saved_and_restored():
    text, cache, other = text_of([170, 190], "chapters"), cache_of(2, "chapters"), cache_of(5, "chapters")
    text.begin(cache, [90, 110])
    text.step(cache)
    other.load_state_dict(saved(cache))
    assert other.batch == 2
    for _ in range(30):
        assert text.step(cache) < 1e-5
        assert text.step(other) < 1e-5
    assert_same_state(cache.state_dict(), other.state_dict(), atol=0)
    state = cache.state_dict()
    kept = {name: x.clone() for name, x in state.items() if name != "settings"}
    text.step(cache)
    assert all(torch.equal(state[name], kept[name]) for name in kept)  # what was taken is not touched any more
    other.load_state_dict(state)
    text.step(other)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_layers_are_kept_apart():
    texts, cache = [text_of([90], "windows", seed=seed) for seed in (1, 2)], cache_of(1, "windows", layers=2)
    cache.begin([30])
    for layer, text in enumerate(texts):
        cache.fill(layer, *text.prompts([30]))
    for _ in range(60):
        rows = texts[0].rows(cache)
        cache.append()
        for layer in (1, 0):
            assert texts[layer].attend(cache, rows, layer) < 1e-5


@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-6), (torch.bfloat16, 0.03), (torch.float16, 3e-3)])
def test_other_precisions(dtype, atol):
    text, cache = text_of([130, 130], "chapters", dtype=dtype), cache_of(2, "chapters", dtype=dtype)
    text.begin(cache, [50, 27])
    assert max(text.step(cache) for _ in range(70)) < atol
    if dtype != torch.float64:
        assert max(x.abs().max() for x in (cache.keys, cache.values)) < 10


def test_scale_and_one_head():
    text = Text([70], (3,), heads=(KV_HEADS, KV_HEADS), scale=0.9, pooled_bias=0.2)
    cache = MultiscaleCache(1, 1, KV_HEADS, DIM, value_dim=VALUE_DIM, branching=(3,), max_length=70)
    assert max(text.step(cache) for _ in range(70)) < 1e-5


@pytest.mark.parametrize("way", ["windows", "chapters"])
def test_counts_are_those_of_the_full_pass(way):
    text, cache, counted = text_of([90], way), cache_of(1, way), Counted()
    for _ in range(90):
        rows = text.rows(cache)
        cache.append(None if text.closes is None else text.closes[rows])
        cache.attend(0, text.q[rows], text.k[rows], text.v[rows], counted=counted)
    selection = select(text.q, text.k, text.tree, near=text.near, causal=True)
    by_pass = flops(selection, HEADS * DIM, HEADS, hierarchy=text.tree)
    assert counted.entries == by_pass.attention / (4 * HEADS * DIM + HEADS) * HEADS


def real_bytes(cache):
    return sum(x.untyped_storage().nbytes() for x in vars(cache).values() if isinstance(x, torch.Tensor))


def test_memory_of_a_long_text():
    length = 2**17
    cache, flat = (kind(1, 1, 1, 16, max_length=2**20) for kind in (MultiscaleCache, FlatCache))
    k, v = torch.zeros(length, 1, 16), torch.randn(length, 1, 16)
    for each in (cache, flat):
        each.begin([length])
        each.fill(0, k, v)
    assert real_bytes(flat) == length * 2 * 16 * 4 == cache.memory().flat_bytes
    assert 500 * real_bytes(cache) <= real_bytes(flat)
    assert cache.memory() == Memory(real_bytes(cache) - cache.layout.nbytes, real_bytes(flat), leaves_kept=False)
    assert not any(isinstance(x, (list, tuple, dict)) and len(x) > 64 for x in vars(cache).values())
    assert "of the 16 MiB of a flat cache" in str(cache.memory())
    for each in (cache, flat):  # equal keys: both see the mean of all values
        each.append()
        out = each.attend(0, torch.randn(1, 2, 16), k[:1], v[:1])
        torch.testing.assert_close(out, (v.sum(0) + v[0]).expand(2, 16)[None] / (length + 1), rtol=0, atol=1e-6)


def test_a_longer_text_takes_a_ring_more_per_factor():
    short, long = (MultiscaleCache(1, 1, 1, 8, branching=(16, 16), near=1, max_length=2**n) for n in (12, 20))
    assert short.rings == [(0, 32), (32, 32), (64, 32)]
    assert long.rings[:3] == short.rings
    assert long.slots == 5 * 32
    assert MultiscaleCache(1, 1, 1, 8, branching=(16, 16), max_length=2**12 + 1).slots == 4 * 32
    with_all = MultiscaleCache(1, 1, 1, 8, branching=(4, 2), near=2, sinks=3, rewind=5, max_length=9)
    assert with_all.rings == [(3, 17), (20, 11), (31, 11)]
    closing = MultiscaleCache(1, 1, 1, 8, branching=(4, 2), near=0, closing=2, max_length=9)
    assert [size for _, size in closing.rings] == [4, 2, 2, 2, 2, 2]  # families of one token each, twice


def inputs(rows, heads=HEADS, dim=DIM, value_dim=VALUE_DIM, kv_heads=KV_HEADS, dtype=torch.float32):
    shapes = (heads, dim), (kv_heads, dim), (kv_heads, value_dim)
    return [torch.zeros(rows, *shape, dtype=dtype) for shape in shapes]


@pytest.mark.parametrize("kind", [MultiscaleCache, FlatCache])
@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("k", {"rows": 3}),
        ("k", {"dim": 4}),
        ("v", {"value_dim": 5}),
        ("k", {"kv_heads": 2}),
        ("q", {"heads": 4}),
        ("k", {"dtype": torch.float16}),
    ],
)
def test_tokens_of_another_model_or_batch_are_refused(kind, name, wrong):
    cache = kind(1, 2, KV_HEADS, DIM, value_dim=VALUE_DIM)
    cache.append()
    with pytest.raises(InvalidInput, match=f"^{name}: given"):
        cache.attend(0, *inputs(**{"rows": 2, **wrong}))
    cache.attend(0, *inputs(2))  # nothing has happened
    if name != "q":
        cache = kind(1, 2, KV_HEADS, DIM, value_dim=VALUE_DIM)
        cache.begin([3, 4])
        with pytest.raises(InvalidInput, match=f"^{name}: given"):
            cache.fill(0, *inputs(**{"rows": 7, **wrong})[1:])
        cache.fill(0, *inputs(7)[1:])


@pytest.mark.parametrize("kind", [MultiscaleCache, FlatCache])
def test_calls_in_the_wrong_order_are_refused(kind):
    cache = kind(2, 2, KV_HEADS, DIM, value_dim=VALUE_DIM, max_length=5)
    token, prompts = inputs(2), inputs(6)[1:]
    with pytest.raises(InvalidInput, match="append before attend"):
        cache.attend(0, *token)
    with pytest.raises(InvalidInput, match="begin before fill"):
        cache.fill(0, *prompts)
    with pytest.raises(InvalidInput, match=r"lengths: given .*each of 2 sequences"):
        cache.begin([3])
    with pytest.raises(InvalidInput, match=r"lengths: given .*a token or more"):
        cache.begin([3, 0])
    with pytest.raises(InvalidInput, match="at most 5, the max_length"):
        cache.begin([6, 1])
    cache.begin([4, 2])
    with pytest.raises(InvalidInput, match="begin: given a cache with tokens"):
        cache.begin([3, 2])
    with pytest.raises(InvalidInput, match="not waiting for a token"):
        cache.attend(0, *inputs(6))
    cache.fill(1, *prompts)
    for call in (cache.append, lambda: cache.crop([1, 1]), lambda: cache.reorder([0]), cache.state_dict):
        with pytest.raises(InvalidInput, match=r"layer 0 without the prompts.*fill"):
            call()
    with pytest.raises(InvalidInput, match="layer: given 1"):
        cache.fill(1, *prompts)
    cache.fill(0, *prompts)
    cache.append()
    cache.attend(0, *token)
    with pytest.raises(InvalidInput, match=r"layer: given 0.*once each"):
        cache.attend(0, *token)
    with pytest.raises(InvalidInput, match="layer 1 without the newest token"):
        cache.append()
    with pytest.raises(InvalidInput, match="layer: given 2"):
        cache.attend(2, *token)
    cache.attend(1, *token)
    with pytest.raises(InvalidInput, match=r"6 tokens.*at most 5"):
        cache.append()
    assert cache.lengths == [5, 3]
    with pytest.raises(InvalidInput, match="begin"):
        cache.begin([3, 2])


@pytest.mark.parametrize("kind", [MultiscaleCache, FlatCache])
def test_wrong_crops_and_orders_are_refused(kind):
    cache = kind(1, 2, KV_HEADS, DIM, value_dim=VALUE_DIM)
    cache.begin([4, 2])
    cache.fill(0, *inputs(6)[1:])
    for lengths in ([5, 2], [-1, 2]):
        with pytest.raises(InvalidInput, match=r"lengths: given .*\[4, 2\]"):
            cache.crop(lengths)
    for lengths in ([4], [4, 2, 1], 4):
        with pytest.raises(InvalidInput, match=r"lengths: given .* one for each of 2"):
            cache.crop(lengths)
    with pytest.raises(InvalidInput, match="lengths: given float"):
        cache.crop([3.5, 2])
    for index in ([2, 0], [-1], [], [0.5], [[0, 1]], [True, False]):
        with pytest.raises(InvalidInput, match="index: given"):
            cache.reorder(index)
    assert cache.lengths == [4, 2]


def test_crops_that_go_too_far_are_refused():
    cache = cache_of(2, "windows", rewind=2)
    text_of([9, 9], "windows").begin(cache, [9, 8])
    with pytest.raises(InvalidInput, match=r"3 tokens to remove .*at most 2.*rewind=3"):
        cache.crop([9, 5])
    assert cache.lengths == [9, 8]


def test_closing_more_than_the_cache_was_made_for_is_refused():
    cache = cache_of(2, "sentences")
    with pytest.raises(InvalidInput, match=r"closes: given .* height 2.*closing=2"):
        cache.begin([2, 2], [0, 1, 2, 0])
    with pytest.raises(InvalidInput, match="closes: given shape"):
        cache.begin([2, 2], [0, 1, 0])
    cache.begin([2, 2], [0, 1, 1, 0])  # nothing had happened
    cache.fill(0, *inputs(4)[1:])
    for wrong in ([2, 0], [-1, 0], [0], [0.5, 0.5]):
        with pytest.raises(InvalidInput, match="closes: given"):
            cache.append(wrong)
    cache.append([1, 0])
    assert cache.lengths == [3, 3]


def test_states_of_other_caches_are_refused():
    state = cache_of(2, "windows").state_dict()
    for name, other in (
        ("keys", MultiscaleCache(2, 2, KV_HEADS, DIM, value_dim=VALUE_DIM, max_length=400, branching=(4, 3))),
        ("keys", MultiscaleCache(1, 2, KV_HEADS, 4, value_dim=VALUE_DIM, max_length=400, branching=(4, 3))),
        ("values", MultiscaleCache(1, 2, KV_HEADS, DIM, max_length=400, branching=(4, 3))),
        ("keys", cache_of(2, "binary")),
        ("keys", cache_of(2, "windows", rewind=1)),
        ("keys", cache_of(2, "windows", dtype=torch.bfloat16)),
    ):
        with pytest.raises(InvalidInput, match=rf"state\['{name}'\]: given"):
            other.load_state_dict(state)
    settings = {"near": 0, "rewind": 4}, {"near": 1, "rewind": 0}  # rings of the same size
    one, two = (MultiscaleCache(1, 1, KV_HEADS, DIM, branching=(4, 4), max_length=64, **s) for s in settings)
    assert one.slots == two.slots
    with pytest.raises(InvalidInput, match=r"state\['settings'\]: given"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(InvalidInput, match=r"state\['keys'\]: given nothing"):
        cache_of(2, "windows").load_state_dict({})


@pytest.mark.parametrize(
    "wrong",
    [{"near": -1}, {"sinks": 0.5}, {"closing": -1}, {"rewind": True}, {"branching": (1,)}, {"max_length": 0}],
)
def test_settings_that_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(InvalidInput, match=f"^{name}: given"):
        MultiscaleCache(1, 1, 1, 8, **wrong)


def test_backend_on_a_cpu():
    assert MultiscaleCache(1, 1, 1, 8).backend.name == "torch"
    with pytest.raises(InvalidInput, match="'auto' or one of"):
        MultiscaleCache(1, 1, 1, 8, backend="cuda")


def test_a_refused_bias_leaves_the_cache_as_it_was():
    cache = cache_of(2, "windows")
    q, k, v = inputs(2)
    cache.append()
    for bias in (torch.zeros(3), float("nan"), "0"):
        with pytest.raises(InvalidInput, match="pooled_bias"):
            cache.attend(0, q, k, v, pooled_bias=bias)
    assert cache.attend(0, q, k, v).shape == (2, q.shape[1], VALUE_DIM)
    with pytest.raises(InvalidInput, match="dtype"):
        MultiscaleCache(1, 1, 1, 1, dtype=torch.int32)
