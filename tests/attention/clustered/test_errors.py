"""Bad input of clustered attention: messages say where, what was expected, what was passed and how to fix it."""

import math
import re

import pytest
import torch

from hsa import HsaError, cluster, clustered_attention, select_groups
from tests.attention.clustered.batches import HEADS, KV_HEADS, rows_of

SIZES = {"branching": (2, 2, 2), "tile": 4}
LENGTH = 30
Q, K, V = rows_of([LENGTH], 0)
KEYS = cluster(K, V, [LENGTH], branching=(2, 2, 2))
SELECTION = select_groups(Q, K, KEYS, [LENGTH], causal=True, top_k=1, tile=4)
OPENED = torch.ones(1, HEADS, 12, dtype=torch.bool)


def attend(q=Q, k=K, v=V, lengths=None, **options):
    return lambda: clustered_attention(q, k, v, lengths, **{**SIZES, **options})


def attend_with_keys(q=Q, k=K, v=V, lengths=None, **options):
    return lambda: clustered_attention(q, k, v, lengths, **{"keys": KEYS, "tile": 4, **options})


def attend_with_selection(q=Q, k=K, v=V, lengths=None, **options):
    return attend(q, k, v, lengths, **{"causal": True, "selection": SELECTION, **options})


def select(q=Q, k=K, keys=KEYS, lengths=(LENGTH,), **options):
    return lambda: select_groups(q, k, keys, lengths, **{"tile": 4, **options})


def continue_with(opened, **options):
    return attend(Q[-3:], query_lengths=[3], causal=True, opened=opened, **options)


def rules():
    """Yield values of threshold, top_k and spread."""
    for call in (attend, select):
        for value in (0, -1, 2.5, math.nan, math.inf, "x", True, torch.tensor(0.1)):
            message = r"threshold: expected a number above 0 and at most 1, got {}. Smaller values open more groups"
            yield call(threshold=value), message.format(re.escape(repr(value)))
        for value in ((0.1, 0.2), [0.1] * 5, torch.full((3,), 0.1)):
            expected = rf"one number, or one for each of the {HEADS} query heads, got a sequence of {len(value)}"
            yield call(threshold=value), f"threshold: expected {expected}"
        yield call(threshold=()), r"threshold: expected a number, or one per query head, got \(\)"
        for value in (0, 2.5, math.nan, "x", True, None, [0.1]):
            message = (
                r"threshold\[2\]: expected a number above 0 and at most 1, got {}. Smaller values open more groups"
            )
            yield call(threshold=[0.1, 0.2, value, 0.3]), message.format(re.escape(repr(value)))
        for value in (-1, 2.5, math.nan, "x", True):
            yield call(top_k=value), rf"top_k: expected a number of groups, 0 or more, got {value!r}"
        for value in (-1, math.nan, math.inf, "x", True):
            yield call(spread=value), rf"spread: expected a number of 0 or more, got {value!r}"
        for value in (0.1, [0.1] * HEADS):
            yield call(threshold=value, top_k=1), r"top_k: expected None with a threshold, got 1. Pass one of the two"


def sizes():
    """Yield values of tile and branching."""
    for value in (0, 3, 256, 1.5, "4", True, None):
        yield attend(tile=value), rf"tile: expected a power of two from 1 to 128, got {value!r}"
        yield select(tile=value), rf"tile: expected a power of two from 1 to 128, got {value!r}"
    too_large = (
        r"tile: expected at most 8, the keys of a chunk, in causal attention, got 16. The queries of a tile must lie"
    )
    yield attend(tile=16, causal=True), too_large
    yield select(tile=16, causal=True), too_large

    def cut(branching):
        return lambda: cluster(K, V, [LENGTH], branching=branching)

    for call in (lambda b: attend(branching=b, tile=1), cut):
        for value in ((2, 2), (2, 2, 2, 2), "222", 8):
            yield call(value), r"branching: expected keys per group, .*, such as \(8, 8, 4\), got "
        yield call((1, 2, 2)), r"branching\[0\]: expected a power of two from 2 to 256, got 1"
        yield call((512, 1, 1)), r"branching\[0\]: expected a power of two from 2 to 256, got 512"
        yield call((2, 3, 2)), r"branching\[1\]: expected a power of two from 1 to 256, got 3"
        yield call((2, 2, 0)), r"branching\[2\]: expected a power of two from 1 to 256, got 0"
        yield call((2, 2.0, 2)), r"branching\[1\]: expected a power of two .*, got 2.0"
        yield call((64, 64, 2)), r"branching: expected chunks of at most 4,096 keys, got \(64, 64, 2\): 8,192 keys"


def lengths():
    """Yield values of lengths, query_lengths and recent."""
    rows = "Pass one row per {}, sequences one after another, without padding"
    for call in (attend, select):
        yield call(lengths=[29]), r"q: expected 29 rows, the number of queries, got 30 rows. " + rows.format("query")
        yield (
            call(lengths=[31], query_lengths=[30]),
            r"k: expected 31 rows, the sum of the lengths, got 30 rows. " + rows.format("key"),
        )
        yield call(lengths=[30, 0]), r"lengths\[1\]: expected a number from 1, got 0"
        yield call(lengths=[30.0]), r"lengths: expected integers, got float64 values"
        yield call(query_lengths=[29]), r"q: expected 29 rows, the number of queries, got 30 rows"
        yield call(query_lengths=[10, 20]), r"query_lengths: expected one number per sequence, 1 in all, got 2"
        yield call(lengths=30), r"lengths: expected a list or vector of numbers, one per sequence, got 30"
        yield call(lengths=[[30]]), r"lengths: expected a list or vector of numbers, one per sequence, got \[\[30\]\]"
        for value in ("yes", 1, None):
            yield call(causal=value), rf"causal: expected True or False, got {value!r}"
        yield call(query_lengths=[-1]), r"query_lengths\[0\]: expected a number from 0, got -1"
        yield (
            call(query_lengths=[31], causal=True),
            r"query_lengths\[0\]: expected a number from 0 to 30, the keys of the sequence, got 31",
        )
    yield lambda: cluster(K, V, [29]), r"k: expected 29 rows, the sum of the lengths, got 30 rows"
    yield lambda: cluster(K, V[:29], [30]), r"v: expected 30 rows, the sum of the lengths, got 29 rows"

    last = {"query_lengths": [2], "lengths": [30], "q": Q[-2:]}
    few = {**last, "k": K[-5:], "v": V[-5:]}
    yield (
        attend(**{**few, "k": K[-6:], "v": V[-6:]}, recent=[6]),
        r"recent: expected None without `keys`, got .*. Pass keys=hsa.cluster\(…\)",
    )
    for causal in (False, True):
        opened = OPENED if causal else None
        yield (
            attend_with_keys(**few, recent=[5], causal=causal, opened=opened),
            r"recent\[0\]: expected at least 6 keys, .*, got 5",
        )
    yield attend_with_keys(**last, recent=[31]), r"recent\[0\]: expected a number from 0 to 30, .*, got 31"
    yield attend_with_keys(**last, recent=[30, 1]), r"recent: expected one number per sequence, 1 in all, got 2"
    yield attend_with_keys(**few, recent=[6]), r"k: expected 6 rows, .*, got 5 rows"


def keys():
    """Yield clustered keys that do not fit."""
    fix = r". Make them with hsa.cluster from the same keys, lengths and branching"
    two = r"keys: expected chunks of \(2, 2, 2\), 1, 2 per sequence, got chunks of \(2, 2, 2\), 3 per sequence" + fix
    yield attend_with_keys(lengths=[10, 20]), two
    yield select(lengths=[10, 20]), two
    for call, names in ((attend_with_keys, ("k", "v")), (select, ("k",))):
        tensors = {"q": Q, "k": K, "v": V} if "v" in names else {"q": Q, "k": K}
        single = {name: x.float() for name, x in tensors.items()}
        yield call(**single), r"keys.k: expected torch.float32 of shape .*, got torch.float64 of shape .*" + fix
        one = {name: x[:, :1] for name, x in tensors.items()}
        yield call(**one), r"keys.k: expected .* \(1, 3, 15, 3\) on cpu, got .* \(2, 3, 15, 3\) on cpu" + fix
        yield call(keys=K), r"keys: expected an hsa.ClusteredKeys, got Tensor. Use hsa.cluster\(k, v, lengths\)"
    yield select(keys=None), r"keys: expected an hsa.ClusteredKeys, got NoneType"
    yield (
        attend_with_keys(branching=(4, 2, 2)),
        r"branching: expected \(2, 2, 2\), as the keys, or None, got \(4, 2, 2\)",
    )
    yield attend_with_keys(windows=True), r"windows: expected False, as the keys are clustered, got True"
    yield lambda: cluster(K, V[:, :1], [LENGTH]), r"v: expected 2 heads, as k, got 1 heads"
    yield lambda: cluster(K, None, [LENGTH]), r"v: expected a tensor \[keys, heads, head_dim\], got NoneType"
    yield (
        attend_with_keys(v=V[..., :4]),
        r"keys.v: expected .* \(2, 3, 15, 4\) on cpu, got .* \(2, 3, 15, 5\) on cpu" + fix,
    )


def selections():
    """Yield selections that do not fit, and options that they replace."""
    fix = r". Make it with hsa.select_groups for the queries and keys that attention gets"
    others = r"selection: expected one made for these sequences and tiles, got one for others" + fix
    for options in ({"causal": False}, {"tile": 2}, {"branching": (4, 2, 1)}, {"lengths": [14, 16]}):
        yield attend_with_selection(**options), others
    yield attend_with_selection(q=Q[:28], query_lengths=[28]), others
    yield (
        attend_with_selection(q=Q[:, :2], k=K[:, :1], v=V[:, :1]),
        r"selection: expected 2 or 1 lists per tile, got 4" + fix,
    )
    yield (
        attend_with_selection(keys=cluster(K, V, [LENGTH], branching=(2, 2, 2))),
        r"selection: expected one made with these keys, got one made with others" + fix,
    )
    replaced = (("threshold", 0.1), ("top_k", 1), ("opened", OPENED), ("spread", 0.5), ("share_lists", True))
    for name, value in replaced:
        message = rf"{name}: expected no value together with a selection, got one. Pass {name} to hsa.select_groups"
        yield attend_with_selection(**{name: value}), message
    wrong = r"selection: expected an hsa.TileSelection, got Tensor. Use hsa.select_groups\(q, k, keys, lengths, …\)"
    yield attend(selection=SELECTION.first), wrong


def opened():
    """Yield opened groups that do not fit the tile of the first query."""
    missing = (
        r"opened: the first query of sequence 0 is token 27, inside a tile of 4; expected the groups that .* have opened"
        r". Pass opened=selection.opened\(\) of the preceding queries, or begin with the first query of a tile"
    )
    yield continue_with(None), missing
    yield select(Q[-3:], query_lengths=[3], causal=True), missing
    kind = r"opened: expected a boolean tensor \[sequences, lists, groups\] of at least \(1, 4, 12\) on cpu, got "
    yield continue_with([True]), kind + "list. Use TileSelection.opened"
    yield continue_with(OPENED.float()), kind + r"torch.float32 of \(1, 4, 12\). Use TileSelection.opened"
    yield continue_with(OPENED[0]), kind + r"torch.bool of \(4, 12\)"
    yield continue_with(OPENED[:, :2]), kind + r"shape \(1, 2, 12\)"
    yield continue_with(OPENED.expand(2, -1, -1)), kind + r"shape \(2, 4, 12\)"
    yield continue_with(OPENED[..., :5]), kind + r"shape \(1, 4, 5\)"
    yield continue_with(OPENED.to("meta")), kind + r"shape \(1, 4, 12\) on meta"
    shared = r"opened: .* of at least \(1, 2, 12\) on cpu, got shape \(1, 4, 12\)"
    yield continue_with(OPENED, share_lists=True), shared


def tensors():
    """Yield shapes, dtypes and devices of q, k and v, and other options."""
    for name, x in (("q", Q), ("k", K), ("v", V)):
        yield attend(**{name: x[:, 0]}), rf"{name}: expected \[.*\], got shape \(30, "
        yield attend(**{name: x[None]}, lengths=[LENGTH]), rf"{name}: expected \[.*\], got shape \(1, 30, "
        yield attend(**{name: x[:, :0]}), rf"{name}: expected at least one head .*, got shape \(30, 0, "
        yield attend(**{name: x.long()}), rf"{name}: expected a floating-point dtype: .*, got dtype torch.int64"
        yield attend(**{name: x.numpy()}), rf"{name}: expected a tensor .*, got ndarray"
        yield attend(**{name: None}), rf"{name}: expected a tensor .*, got NoneType"
    yield attend(k=K.float()), r"k: expected dtype torch.float64, as q, got dtype torch.float32. Cast all tensors"
    yield attend(v=V.float()), r"v: expected dtype torch.float64, as q, got dtype torch.float32. Cast all tensors"
    yield attend(v=V.to("meta")), r"v: expected device cpu, as q, got device meta"
    yield attend(v=V[:4]), r"v: expected 30 rows, the sum of the lengths, got 4 rows"
    yield attend(v=V[:, :1]), r"v: expected 2 heads, as k, got 1 heads"
    for call in (attend, select):
        yield call(q=Q[..., :2]), r"k: expected head_dim 2, as q, got head_dim 3"
        yield call(q=Q[:, :3]), r"k: expected 3 heads, as q, or a divisor of that .*, got 2 heads"
        yield call(scale=math.nan), r"scale: expected a finite number, got nan"
        yield call(backend="cuda"), r"backend: expected 'auto' or one of \['triton', 'torch', 'reference'\], got 'cuda'"
        yield (
            call(backend="triton"),
            r"no backend can run this .*\n  triton: .*tiles must have at least 16 queries, not 4; branching must be",
        )
    yield attend(dropout_p=1.0), r"dropout_p: expected .*, got 1.0"
    yield attend(pooled_bias=torch.zeros(KV_HEADS)), r"pooled_bias: expected a number or \(4,\).*, got shape \(2,\)"
    yield attend(pooled_bias=math.inf), r"pooled_bias: expected a number below \+∞ .*, got inf"
    yield attend(pooled_bias=None), r"pooled_bias: expected .*, got None"


CALLS = [
    (call, message) for kind in (rules, sizes, lengths, keys, selections, opened, tensors) for call, message in kind()
]


@pytest.mark.parametrize(("call", "message"), CALLS)
def test_bad_input(call, message):
    with pytest.raises(HsaError, match=message):
        call()


def test_an_opening_is_not_needed_where_no_chunk_is_visible():
    """The tile of the first query lies in the first chunk: all its keys are exact."""
    out = clustered_attention(Q[:7], K[:7], V[:7], causal=True, **SIZES)
    last = clustered_attention(Q[5:7], K[:7], V[:7], query_lengths=[2], causal=True, **SIZES)
    torch.testing.assert_close(last, out[5:], rtol=1e-12, atol=1e-12)


def test_recent_keys_may_be_all_keys():
    out = clustered_attention(Q, K, V, recent=[LENGTH], top_k=1, **SIZES)
    assert torch.equal(out, clustered_attention(Q, K, V, top_k=1, **SIZES))
