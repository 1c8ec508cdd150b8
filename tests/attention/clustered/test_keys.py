"""Clustered keys: the order of the keys, means, spreads, and independence of chunks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa import ClusteredKeys, cluster
from hsa.attention.clustered.keys import spreads_of
from tests.attention.clustered.batches import BRANCHINGS, DIM, KV_HEADS, VALUE_DIM, batches, order_of, rows_of, seeds


def chunks_of(batch, keys: ClusteredKeys):
    """Return for every complete chunk and head its number in the batch, and the rows of its keys by group."""
    result, number = [], 0
    for sequence, (_, columns) in enumerate(batch.sequences()):
        for chunk in range(keys.chunks[sequence]):
            for head in range(KV_HEADS):
                result.append((number, head, columns.start + order_of(keys, sequence, chunk, head)))
            number += 1
    return result


def levels_of(keys: ClusteredKeys, name: str):
    """Return the keys, groups, nodes and chunks of a table, `[kv_heads, chunks, rows of a chunk, dim]`."""
    return getattr(keys, name).split(keys.shape.rows, 2)


@given(batches())
def test_the_order_is_a_permutation_of_every_chunk(batch):
    keys = batch.cluster()
    assert keys.chunks == tuple(n // batch.chunk for n in batch.lengths)
    assert keys.num_chunks == sum(keys.chunks)
    assert keys.shape.branching == batch.branching
    if batch.windows:
        assert keys.order is None
        return
    assert keys.order.shape == (KV_HEADS, keys.num_chunks, batch.chunk)
    numbers = torch.arange(batch.chunk).expand_as(keys.order).to(keys.order.dtype)
    assert torch.equal(keys.order.sort(-1).values, numbers)
    groups = keys.order.unflatten(-1, (-1, batch.branching[0]))
    assert (groups[:, :, 0, 0] == 0).all()  # the first key is in the first group
    assert (groups.diff(dim=-1) > 0).all()  # keys of a group are in their own order


@given(batches())
def test_tables_hold_keys_and_means(batch):
    keys = batch.cluster()
    sizes = (1, keys.shape.group, keys.shape.node, keys.shape.chunk)
    for name, x in (("k", batch.k), ("v", batch.v)):
        for number, head, rows in chunks_of(batch, keys):
            for level, size in zip(levels_of(keys, name), sizes, strict=True):
                mean = x[rows, head].unflatten(0, (-1, size)).mean(1)
                torch.testing.assert_close(level[head, number], mean, rtol=1e-12, atol=1e-12)


@given(batches())
def test_windows_keep_the_order(batch):
    keys = cluster(batch.k, batch.v, batch.lengths, windows=True, branching=batch.branching)
    assert keys.order is None
    lengths = [n * batch.chunk for n in keys.chunks]
    rows = torch.cat([torch.arange(c.start, c.start + n) for (_, c), n in zip(batch.sequences(), lengths, strict=True)])
    assert torch.equal(levels_of(keys, "k")[0].flatten(1, 2), batch.k[rows].transpose(0, 1))
    assert torch.equal(levels_of(keys, "v")[0].flatten(1, 2), batch.v[rows].transpose(0, 1))


@given(seeds, st.sampled_from([b for b in BRANCHINGS if b[0] > 2] + [(8, 2, 1)]), st.booleans())
def test_the_spread_is_the_principal_direction_times_the_standard_deviation(seed, branching, windows):
    """Compare with a singular value decomposition, where one direction dominates."""
    generator = torch.Generator().manual_seed(seed)
    _, k, v = rows_of([40], seed)
    direction = torch.randn(1, KV_HEADS, DIM, generator=generator, dtype=torch.float64)
    k = 0.003 * k + direction / direction.norm(dim=-1, keepdim=True) * torch.randn(
        40, KV_HEADS, 1, generator=generator, dtype=torch.float64
    )
    keys = cluster(k, v, [40], windows=windows, branching=branching)
    group = branching[0]
    members = levels_of(keys, "k")[0].unflatten(2, (-1, group))
    spread = keys.scored[1]
    assert spread.shape == (KV_HEADS, keys.num_chunks, keys.shape.groups, DIM)
    _, values, right = torch.linalg.svd(members - members.mean(3, keepdim=True))
    clear = values[..., 0] > 100 * values[..., 1]
    assert clear.any()
    expected = right[..., 0, :] * values[..., :1] / group**0.5
    sign = (expected * spread).sum(-1, keepdim=True).sign()
    torch.testing.assert_close(spread[clear], (sign * expected)[clear], rtol=1e-5, atol=1e-5)
    # Any direction has at most the deviation of the principal one.
    assert (spread.norm(dim=-1) <= values[..., 0] / group**0.5 * (1 + 1e-9)).all()


@given(batches(), st.integers(0, 10**6))
def test_scores_are_relative_means_and_spreads_in_the_channels_that_vary(batch, seed):
    """Both halves of a rotary pair are chosen, by length times deviation of the keys in the first chunk of the sequence."""
    factors = torch.randn(batch.k.shape[2], generator=torch.Generator().manual_seed(seed), dtype=torch.float64).exp()
    batch.k *= factors
    batch.k += factors.flip(0)  # a mean, which has length and no deviation
    keys, dim, sizes = batch.cluster(), batch.k.shape[2], batch.branching
    means, spreads = keys.scored
    _, groups, _, roots = levels_of(keys, "k")
    chunks = [(s, number) for s, count in enumerate(keys.chunks) for number in range(count)]
    for head in range(KV_HEADS):
        for n, (sequence, _) in enumerate(chunks):
            first = batch.k[batch.sequences()[sequence][1].start :][: batch.chunk, head]
            weights = first.square().sum(0).sqrt() * first.std(0, unbiased=False)
            if dim < 64:
                expected = list(range(dim))
            else:
                pairs = (weights[: dim // 2] + weights[dim // 2 :]).topk(dim // 4).indices.tolist()
                expected = sorted(pairs) + [i + dim // 2 for i in sorted(pairs)]
            assert keys.channels[head, n].tolist() == expected
            relative = (groups[head, n] - roots[head, n])[:, expected]
            torch.testing.assert_close(means[head, n], relative, rtol=1e-9, atol=1e-12)
    whole = spreads_of(levels_of(keys, "k")[0].flatten(1, 2).unflatten(1, (-1, sizes[0]))).unflatten(
        1, (len(chunks), -1)
    )
    index = keys.channels.long().unsqueeze(2).expand(-1, -1, keys.shape.groups, -1)
    torch.testing.assert_close(spreads, whole.gather(3, index), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("dim", [2, 17])
def test_groups_are_clusters(dim):
    """Keys around distant points are found again, whatever the order and the dimension."""
    torch.manual_seed(3)
    centres = torch.randn(8, dim, dtype=torch.float64) * 100
    which = torch.arange(8).repeat_interleave(4)[torch.randperm(32)]
    k = (centres[which] + torch.randn(32, dim, dtype=torch.float64))[:, None]
    keys = cluster(k, k, [32], branching=(4, 4, 2))
    found = which[keys.order[0, 0].long()].unflatten(0, (8, 4))
    pure = (found == found[:, :1]).all(1)
    assert pure.sum() >= 5  # halves of equal size may cut through a point
    inside = keys.k[0, 0, :32].unflatten(0, (8, 4)).var(1).sum()
    assert inside < k[:, 0].unflatten(0, (8, 4)).var(1).sum() / 3


def test_splits_are_at_the_median():
    """Groups of keys of one dimension are intervals of equal size."""
    _, k, v = rows_of([16], 1)
    keys = cluster(k[..., :1], v, [16], branching=(4, 2, 2))
    groups = keys.k[:, 0, :16, 0].unflatten(1, (4, 4))
    for head in range(KV_HEADS):
        low, high = groups[head].amin(1), groups[head].amax(1)
        order = low.argsort()
        assert (high[order][:-1] < low[order][1:]).all()


@given(batches(), st.floats(0.01, 100))
def test_the_order_does_not_depend_on_the_mean_and_the_length_of_keys(batch, factor):
    plain, moved = (
        cluster(k, batch.v, batch.lengths, branching=batch.branching)
        for k in (batch.k, factor * batch.k + 10 * factor * batch.k[:1])
    )
    assert torch.equal(moved.order, plain.order)
    if torch.equal(moved.channels, plain.channels):
        torch.testing.assert_close(moved.scores / factor, plain.scores, rtol=1e-9, atol=1e-9)


@given(batches(), st.integers(0, 10**6))
def test_chunks_of_a_prefix_are_those_of_the_whole(batch, seed):
    """Later keys, keys of other sequences and the rest of a chunk have no effect."""
    lengths = [max(1, n - 1 - (seed + i) % n) for i, n in enumerate(batch.lengths)]
    rows = torch.cat([torch.arange(c.start, c.start + n) for (_, c), n in zip(batch.sequences(), lengths, strict=True)])
    part = cluster(batch.k[rows], batch.v[rows], lengths, windows=batch.windows, branching=batch.branching)
    whole = batch.cluster()
    kept, base = [], 0
    for few, many in zip(part.chunks, whole.chunks, strict=True):
        kept += range(base, base + few)
        base += many
    if not kept:
        assert part.k.shape == (KV_HEADS, 0, part.shape.page, batch.k.shape[2])
        assert part.v.shape == (KV_HEADS, 0, part.shape.page, VALUE_DIM)
        return
    if not batch.windows:
        assert torch.equal(part.order, whole.order[:, kept])
    for name in ("k", "v"):
        torch.testing.assert_close(getattr(part, name), getattr(whole, name)[:, kept], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(part.scores, whole.scores[:, kept], rtol=1e-9, atol=1e-9)
    assert torch.equal(part.channels, whole.channels[:, kept])


def test_equal_keys_and_keys_that_are_not_finite():
    """The first key stays in the first group, and other chunks do not change."""
    _, k, v = rows_of([16], 1)
    alike = cluster(k[:1].expand(16, -1, -1), v, [16], branching=(2, 2, 2))
    assert (alike.scores.abs() < 1e-12).all()
    assert (alike.order[:, :, 0] == 0).all()
    plain = cluster(k, v, [16], branching=(2, 2, 2))
    for value in (torch.nan, torch.inf, -torch.inf):
        for row in (0, 5):
            broken = k.clone()
            broken[row, 1, 0] = value
            keys = cluster(broken, v, [16], branching=(2, 2, 2))
            assert torch.equal(keys.order[:, 1], plain.order[:, 1])
            assert torch.equal(keys.order[0], plain.order[0])
            assert keys.order[1, 0, 0] == 0
            assert sorted(keys.order[1, 0].tolist()) == list(range(8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_lower_precision(dtype):
    _, k, v = rows_of([48], 1, dtype=dtype)
    keys = cluster(k, v, [48])
    assert keys.k.shape == (KV_HEADS, 0, keys.shape.page, DIM)
    keys = cluster(k, v, [48], branching=(4, 2, 2))
    assert keys.k.dtype == keys.v.dtype == keys.scores.dtype == dtype
    precise = cluster(k.double(), v.double(), [48], branching=(4, 2, 2))
    same = (keys.order == precise.order).float().mean()
    assert same > 0.95  # rounding may move a key from one half to the other
    rows, *means = (level.double() for level in levels_of(keys, "k"))
    roundings = 4 if dtype == torch.float32 else 1.001  # half precision is rounded once, at every level
    for level in means:
        exact = rows.unflatten(2, (level.shape[2], -1)).mean(3)
        assert ((level - exact).abs() <= roundings * torch.finfo(dtype).eps / 2 * exact.abs() + 1e-7).all()


@pytest.mark.parametrize("factor", [1e-5, 1e5])
def test_spreads_of_short_and_long_keys(factor):
    """Float32 neither overflows nor underflows in the iteration."""
    _, k, v = rows_of([64], 1, dtype=torch.float32)
    keys, scaled = (cluster(x, v, [64], branching=(4, 2, 2)) for x in (k, k * factor))
    torch.testing.assert_close(scaled.scores / factor, keys.scores, rtol=1e-3, atol=1e-3)


def test_a_text_says_what_the_keys_are():
    _, k, v = rows_of([21], 1)
    texts = [repr(cluster(k, v, [21], branching=(2, 2, 2), windows=w)) for w in (False, True)]
    assert texts == [f"ClusteredKeys(2 chunks of 8 keys, 2 heads, {kind})" for kind in ("clusters", "windows")]
