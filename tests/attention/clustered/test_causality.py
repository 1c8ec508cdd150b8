"""Causal clustered attention: later tokens have no effect, and a prompt can be read in any pieces."""

from dataclasses import replace
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import cluster, clustered_attention, select_groups
from tests.attention.clustered.batches import BRANCHINGS, Batch, random_batch, rows_of

RULES = {"threshold": {"threshold": 0.2}, "top_k": {"top_k": 2}, "shared": {"threshold": 0.3, "share_lists": True}}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def close(a, b, tolerance=1e-10):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@rules
@pytest.mark.parametrize("windows", [False, True])
def test_causal_jacobian_is_exactly_zero(rule, windows):
    """No output has a gradient with respect to later tokens or to other sequences."""
    lengths = [29, 11]
    leaves = [x.requires_grad_() for x in rows_of(lengths, 4)]
    options = {"causal": True, "windows": windows, "branching": (2, 2, 2), "tile": 4, "return_lse": True}
    out, lse = clustered_attention(*leaves, lengths, **rule, **options)
    for i in (0, 3, 7, 8, 13, 21, 23, 28, 29, 38, 39):
        grads = torch.autograd.grad(out[i].sum() + lse[i].sum(), leaves, retain_graph=True)
        others = torch.ones(40, dtype=torch.bool)
        others[29 if i >= 29 else 0 : i + 1] = False
        for grad in grads:
            assert (grad[others] == 0).all()
            assert (grad[i] != 0).any()
        for grad in grads[1:]:  # all earlier keys and values are seen
            assert (grad[~others] != 0).any(-1).all()


@rules
@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize(("backend", "tolerance"), [("torch", 1e-13), ("reference", 0.0)])
def test_later_tokens_have_no_effect(rule, windows, backend, tolerance):
    """Results are the same bits where every query is computed alone; rows of a tile share the order of their sums."""
    q, k, v = rows_of([27], 11)
    options = {"causal": True, "windows": windows, "branching": (2, 2, 2), "tile": 4, "backend": backend}
    out, lse = clustered_attention(q, k, v, return_lse=True, **rule, **options)
    for i in (0, 2, 5, 7, 10, 15, 16, 17, 18, 21, 24, 25):
        changed = [x.clone() for x in (q, k, v)]
        for x in changed:
            x[i + 1 :] = torch.randn_like(x[i + 1 :]) * 10
        later = clustered_attention(*changed, return_lse=True, **rule, **options)
        close((later[0][: i + 1], later[1][: i + 1]), (out[: i + 1], lse[: i + 1]), tolerance)
        assert (later[0][i + 1 :] != out[i + 1 :]).any()


def pieces_of(batch: Batch, ends: list[list[int]], *, recent=None, backend: str = "auto") -> torch.Tensor:
    """Return the output of a batch that is read in pieces.

    Args:
        ends: End of every piece, for every sequence.
        recent: Function of the smallest number of keys to keep and of all keys; all are passed without `keys` if None.
    """
    out = torch.empty(len(batch.q), batch.q.shape[1], batch.v.shape[2], dtype=batch.q.dtype)
    first = [columns.start for _, columns in batch.sequences()]
    done, opened = [0] * len(first), None
    for end in ends:
        rows = torch.cat([torch.arange(f + d, f + e) for f, d, e in zip(first, done, end, strict=True)])
        seen = torch.cat([torch.arange(f, f + e) for f, e in zip(first, end, strict=True)])
        queries = [e - d for d, e in zip(done, end, strict=True)]
        piece = replace(batch, q=batch.q[rows], k=batch.k[seen], v=batch.v[seen], lengths=end, queries=queries)
        keys = piece.cluster()
        more = {}
        if recent is not None:
            held = [recent(e - batch.chunks(d) * batch.chunk, e) for d, e in zip(done, end, strict=True)]
            kept = torch.cat([torch.arange(f + e - n, f + e) for f, e, n in zip(first, end, held, strict=True)])
            piece = replace(piece, k=batch.k[kept], v=batch.v[kept])
            more = {"recent": held}
        selection = piece.select(keys, opened=opened, backend=backend, **more)
        if recent is not None:
            more["keys"] = keys
        out[rows] = piece.attend(opened=opened, backend=backend, **more)
        again = piece.attend(selection=selection, backend=backend, **more)
        assert torch.equal(out[rows], again)  # attention selects the same by itself
        opened, done = selection.opened(), end
    return out


def random_prompts(seed: int) -> tuple[Batch, list[list[int]]]:
    """Return a causal batch with all its tokens as queries, and the ends of pieces, often inside of tiles."""
    random = Random(seed)
    batch = random_batch(seed, own_queries=True)
    if not batch.causal:
        branching = random.choice(BRANCHINGS)
        chunk = branching[0] * branching[1] * branching[2]
        tile = random.choice([t for t in (2, 4, 8) if t <= chunk])
        batch = replace(batch, causal=True, branching=branching, tile=tile)
    pieces, ends = random.randint(1, 6), []
    for n in batch.lengths:  # short sequences end early and have no queries in the last pieces
        cuts = sorted(random.sample(range(1, n), min(pieces, n) - 1))
        ends.append([*cuts, *[n] * (pieces - len(cuts))])
    return batch, [list(end) for end in zip(*ends, strict=True)]


prompts = st.integers(0, 2**32 - 1).map(random_prompts)


@given(prompts)
def test_any_pieces_of_a_prompt_give_the_same_rows(prompt):
    batch, ends = prompt
    close(pieces_of(batch, ends), batch.attend())


@given(prompts, st.booleans())
def test_any_pieces_with_the_recent_keys_alone_give_the_same_rows(prompt, least):
    batch, ends = prompt
    close(pieces_of(batch, ends, recent=lambda need, every: need if least else (need + every) // 2), batch.attend())


@settings(max_examples=8)
@given(st.integers(0, 2**32 - 1))
def test_pieces_of_the_reference(seed):
    batch, ends = random_prompts(seed)
    close(pieces_of(batch, ends, backend="reference"), batch.attend())


@rules
def test_token_by_token(rule):
    q, k, v = rows_of([35, 35], 5)
    batch = Batch(q, k, v, [35, 35], [35, 35], True, (2, 2, 2), 8, rule)
    full = batch.attend()
    close(pieces_of(batch, [[i + 1, i + 1] for i in range(35)], recent=lambda need, every: need), full)
    # Earlier queries of a tile matter: without them the rows differ.
    alone = []
    for i in range(16, 35):
        keys = cluster(k[: i + 1], v[: i + 1], [i + 1], branching=(2, 2, 2))
        first_group = (torch.arange(16) == 0).expand(1, 2 if "share_lists" in rule else 4, -1)
        options = {"query_lengths": [1], "causal": True, "opened": first_group, "tile": 8, **rule}
        selection = select_groups(q[i : i + 1], k[: i + 1], keys, [i + 1], **options)
        more = {"query_lengths": [1], "causal": True, "keys": keys, "tile": 8, "selection": selection}
        alone.append(clustered_attention(q[i : i + 1], k[: i + 1], v[: i + 1], [i + 1], **more))
    assert (torch.cat(alone) - full[16:35]).abs().max() > 1e-3


def test_sequences_without_new_queries_keep_their_open_groups():
    torch.manual_seed(1)
    q, k, v = (torch.randn(60, 2, 4, dtype=torch.float64) * 3 for _ in range(3))
    options = {"causal": True, "tile": 8, "threshold": 0.3}
    full = clustered_attention(q, k, v, [30, 30], branching=(2, 2, 2), **options)
    opened, done = None, (0, 0)
    for ends in ((17, 17), (19, 17), (22, 22)):
        new = [end - begin for begin, end in zip(done, ends, strict=True)]
        rows = torch.cat(
            [30 * i + torch.arange(begin, end) for i, (begin, end) in enumerate(zip(done, ends, strict=True))]
        )
        prefix = torch.cat([30 * i + torch.arange(end) for i, end in enumerate(ends)])
        keys = cluster(k[prefix], v[prefix], ends, branching=(2, 2, 2))
        selection = select_groups(q[rows], k[prefix], keys, ends, query_lengths=new, opened=opened, **options)
        out = clustered_attention(
            q[rows], k[prefix], v[prefix], ends, query_lengths=new, keys=keys, selection=selection, causal=True, tile=8
        )
        torch.testing.assert_close(out, full[rows])
        opened, done = selection.opened(), ends
