"""`MultiscaleCache`: decoding equals a pass over the whole text, also after prompts, crops and reordering."""

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
CASES = {
    "windows": {"branching": (4, 3), "near": 1},
    "binary": {"branching": (2,), "near": 3, "sinks": 1},
    "no near families": {"branching": (3, 2), "near": 0, "sinks": 2},
    "sentences": {"branching": (4, 3), "near": 1, "closing": 1},
    "chapters": {"branching": (3, 4, 2), "near": 2, "sinks": 2, "closing": 3},
    "closing above all families": {"branching": (5,), "near": 0, "closing": 9},
    "wide": {"branching": (16, 16), "near": 2, "sinks": 1},
}
BIASES = dict(zip(CASES, (0.0, BIAS, 0.3, BIAS, -torch.inf, -0.7, BIAS[:1]), strict=True))


def text_of(lengths, case, **others):
    return Text(lengths, **CASES[case], pooled_bias=BIASES[case], **others)


def cache_of(batch, case, layers=1, max_length=400, **others):
    return MultiscaleCache(
        layers, batch, KV_HEADS, DIM, value_dim=VALUE_DIM, max_length=max_length, **CASES[case], **others
    )


def assert_same_state(ours, theirs, atol=1e-6):
    """Compare two states; keys and values only in slots that hold a node."""
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


@pytest.mark.parametrize("case", CASES)
def test_decoding_equals_the_full_pass(case):
    text, cache = text_of([300, 300], case), cache_of(2, case)
    errors = [text.step(cache) for _ in range(300)]
    assert max(errors) < 1e-5, f"first at token {next(i for i, e in enumerate(errors) if e >= 1e-5)}"
    assert cache.lengths == [300, 300]


@pytest.mark.parametrize("case", ["binary", "chapters"])
def test_full_passes_of_all_lengths_agree(case):
    """A longer text has another tree, but earlier tokens get the same results."""
    text = text_of([130], case)
    for length in (*range(1, 40), 63, 64, 65, 66, 127, 128, 129, 130):
        part = Text.__new__(Text)
        part.near, part.attention = text.near, text.attention
        closes = None if text.closes is None else text.closes[:length]
        part.tree = causal_tree([length], CASES[case]["branching"], closes, CASES[case]["sinks"])
        out = part.outputs(text.q[:length], text.k[:length], text.v[:length])
        torch.testing.assert_close(out[-1], text.out[length - 1], rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_prompts_leave_the_same_state_as_appended_tokens(case):
    text, cache = text_of([80, 80], case), cache_of(2, case, max_length=90, rewind=2)
    for length in range(1, 81):
        text.step(cache)
        if length < 20 or length % 7 < 2:
            prefilled = cache_of(2, case, max_length=90, rewind=2)
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
def test_decoding_after_prompts_of_unequal_lengths(prompts, branching, case, bias, rewind, seed):
    heads = (3 if isinstance(bias, torch.Tensor) else HEADS, KV_HEADS)
    lengths = [n + 30 for n in prompts]
    text = Text(lengths, tuple(branching), **case, heads=heads, pooled_bias=bias, seed=seed)
    longest = max(lengths)
    cache = MultiscaleCache(
        1,
        len(prompts),
        KV_HEADS,
        DIM,
        value_dim=VALUE_DIM,
        branching=branching,
        max_length=longest,
        rewind=rewind,
        **case,
    )
    assert text.begin(cache, prompts) == causal_tree(
        prompts, branching, None if text.closes is None else text.closes[text.of(prompts)], case["sinks"]
    )
    assert cache.lengths == prompts
    assert max(text.step(cache) for _ in range(30)) < 1e-5
    with pytest.raises(InvalidInput, match="max_length"):
        cache.append()


@pytest.mark.parametrize("case", ["windows", "binary", "chapters"])
def test_crop_removes_all_traces_of_tokens(case):
    rewind, text = 5, text_of([65, 65], case)
    cache = cache_of(2, case, max_length=70, rewind=rewind)
    for length in range(65):
        removed = 1 + length % rewind
        for _ in range(removed):
            text.step_garbage(cache)
        cache.crop([length, length])
        assert cache.lengths == [length, length]
        assert text.step(cache) < 1e-5, length


@pytest.mark.parametrize("case", ["no near families", "sentences", "wide"])
def test_crops_that_differ_between_sequences(case):
    text, cache = text_of([150, 150, 150], case), cache_of(3, case, rewind=6)
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
    """Slots that the longest text has overwritten are not restored by cropping twice."""
    text, cache = text_of([60], "no near families"), cache_of(1, "no near families", rewind=3)
    text.begin(cache, [40])
    cache.crop([38])
    cache.crop([37])
    for saved_and_restored in (False, True):
        if saved_and_restored:
            cache.load_state_dict(saved(cache))
        with pytest.raises(InvalidInput, match=r"lengths: expected at most 3 tokens to remove .*, got 4\. .*rewind=4"):
            cache.crop([36])
    cache.reorder([0, 0])
    with pytest.raises(InvalidInput, match="rewind"):
        cache.crop([37, 36])
    assert (
        max(text.step(cache, which=[0, 0]) for _ in range(5)) < 1e-5
    )  # 42 tokens, two more than the greatest length before
    cache.crop([39, 40])
    assert max(text.step(cache, which=[0, 0]) for _ in range(9)) < 1e-5


def test_reorder():
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
    longest.append()  # the longest sequence was removed


def test_save_and_restore():
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
    assert all(torch.equal(state[name], kept[name]) for name in kept)  # a saved state does not change
    other.load_state_dict(state)
    text.step(other)
    assert all(torch.equal(state[name], kept[name]) for name in kept)


def test_layers_do_not_mix():
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


@pytest.mark.parametrize("case", ["windows", "chapters"])
def test_counts_equal_those_of_the_full_pass(case):
    text, cache, counted = text_of([90], case), cache_of(1, case), Counted()
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
    for each in (cache, flat):  # keys are equal, so both return the mean of all values
        each.append()
        out = each.attend(0, torch.randn(1, 2, 16), k[:1], v[:1])
        torch.testing.assert_close(out, (v.sum(0) + v[0]).expand(2, 16)[None] / (length + 1), rtol=0, atol=1e-6)


def test_number_of_rings_grows_with_the_logarithm_of_max_length():
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
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        cache.attend(0, *inputs(**{"rows": 2, **wrong}))
    cache.attend(0, *inputs(2))  # the refused call changed nothing
    if name != "q":
        cache = kind(1, 2, KV_HEADS, DIM, value_dim=VALUE_DIM)
        cache.begin([3, 4])
        with pytest.raises(InvalidInput, match=f"^{name}: expected"):
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
    with pytest.raises(InvalidInput, match=r"lengths: expected .* each of the 2 sequences .*, got \[3\]"):
        cache.begin([3])
    with pytest.raises(InvalidInput, match=r"lengths: expected a length of 1 or more .*, got \[3, 0\]"):
        cache.begin([3, 0])
    with pytest.raises(InvalidInput, match=r"at most 5 tokens \(max_length\), got 6 tokens"):
        cache.begin([6, 1])
    cache.begin([4, 2])
    with pytest.raises(InvalidInput, match=r"begin: expected .*, got a cache with tokens"):
        cache.begin([3, 2])
    with pytest.raises(InvalidInput, match="not waiting for a token"):
        cache.attend(0, *inputs(6))
    cache.fill(1, *prompts)
    for call in (cache.append, lambda: cache.crop([1, 1]), lambda: cache.reorder([0]), cache.state_dict):
        with pytest.raises(InvalidInput, match=r"layer 0 lacks the keys and values of the prompts.*fill"):
            call()
    with pytest.raises(InvalidInput, match=r"layer: 1 is not waiting for prompts; expected one of \[0\]"):
        cache.fill(1, *prompts)
    cache.fill(0, *prompts)
    cache.append()
    cache.attend(0, *token)
    with pytest.raises(InvalidInput, match=r"layer: 0 is not waiting for a token; expected one of \[1\], once each"):
        cache.attend(0, *token)
    with pytest.raises(InvalidInput, match="layer 1 lacks the keys and values of the newest token"):
        cache.append()
    with pytest.raises(InvalidInput, match=r"layer: 2 is not waiting for a token"):
        cache.attend(2, *token)
    cache.attend(1, *token)
    with pytest.raises(InvalidInput, match=r"at most 5 tokens .*, got 6 tokens"):
        cache.append()
    assert cache.lengths == [5, 3]
    with pytest.raises(InvalidInput, match="begin"):
        cache.begin([3, 2])


@pytest.mark.parametrize("kind", [MultiscaleCache, FlatCache])
def test_wrong_lengths_and_indices_are_refused(kind):
    cache = kind(1, 2, KV_HEADS, DIM, value_dim=VALUE_DIM)
    cache.begin([4, 2])
    cache.fill(0, *inputs(6)[1:])
    for lengths in ([5, 2], [-1, 2]):
        with pytest.raises(InvalidInput, match=r"lengths: expected at most .*\[4, 2\], got \[.+, 2\]"):
            cache.crop(lengths)
    for lengths in ([4], [4, 2, 1], 4):
        with pytest.raises(InvalidInput, match=r"lengths: expected one length for each of the 2 sequences, got \[4"):
            cache.crop(lengths)
    with pytest.raises(InvalidInput, match=r"lengths: expected .*, got float"):
        cache.crop([3.5, 2])
    for index in ([2, 0], [-1], [], [0.5], [[0, 1]], [True, False]):
        with pytest.raises(InvalidInput, match="index: expected"):
            cache.reorder(index)
    assert cache.lengths == [4, 2]


def test_crops_beyond_rewind_are_refused():
    cache = cache_of(2, "windows", rewind=2)
    text_of([9, 9], "windows").begin(cache, [9, 8])
    with pytest.raises(InvalidInput, match=r"at most 2 tokens to remove .*, got 3\. .*rewind=3"):
        cache.crop([9, 5])
    assert cache.lengths == [9, 8]


def test_heights_above_closing_are_refused():
    cache = cache_of(2, "sentences")
    with pytest.raises(InvalidInput, match=r"closes: expected heights from 0 to 1.*, got 2\. .*closing=2"):
        cache.begin([2, 2], [0, 1, 2, 0])
    with pytest.raises(InvalidInput, match=r"closes: expected .*, got shape"):
        cache.begin([2, 2], [0, 1, 0])
    cache.begin([2, 2], [0, 1, 1, 0])  # the refused calls changed nothing
    cache.fill(0, *inputs(4)[1:])
    for wrong in ([2, 0], [-1, 0], [0], [0.5, 0.5]):
        with pytest.raises(InvalidInput, match="closes: expected"):
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
        with pytest.raises(InvalidInput, match=rf"state\['{name}'\]: expected"):
            other.load_state_dict(state)
    settings = {"near": 0, "rewind": 4}, {"near": 1, "rewind": 0}  # rings of the same size
    one, two = (MultiscaleCache(1, 1, KV_HEADS, DIM, branching=(4, 4), max_length=64, **s) for s in settings)
    assert one.slots == two.slots
    with pytest.raises(InvalidInput, match=r"state\['settings'\]: expected"):
        two.load_state_dict(one.state_dict())
    with pytest.raises(InvalidInput, match=r"state\['keys'\]: missing; expected a tensor"):
        cache_of(2, "windows").load_state_dict({})


@pytest.mark.parametrize(
    "wrong",
    [{"near": -1}, {"sinks": 0.5}, {"closing": -1}, {"rewind": True}, {"branching": (1,)}, {"max_length": 0}],
)
def test_wrong_settings_are_refused(wrong):
    (name,) = wrong
    with pytest.raises(InvalidInput, match=f"^{name}: expected"):
        MultiscaleCache(1, 1, 1, 8, **wrong)


def test_backend_on_a_cpu():
    assert MultiscaleCache(1, 1, 1, 8).backend.name == "torch"
    with pytest.raises(InvalidInput, match="'auto' or one of"):
        MultiscaleCache(1, 1, 1, 8, backend="cuda")


def test_a_refused_bias_does_not_change_the_cache():
    cache = cache_of(2, "windows")
    q, k, v = inputs(2)
    cache.append()
    for bias in (torch.zeros(3), float("nan"), "0"):
        with pytest.raises(InvalidInput, match="pooled_bias"):
            cache.attend(0, q, k, v, pooled_bias=bias)
    assert cache.attend(0, q, k, v).shape == (2, q.shape[1], VALUE_DIM)
    with pytest.raises(InvalidInput, match="dtype"):
        MultiscaleCache(1, 1, 1, 1, dtype=torch.int32)
