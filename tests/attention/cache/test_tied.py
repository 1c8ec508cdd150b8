"""`TiedCache`: the newest row of hierarchical attention with the paper's mask, at every length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hsa import Hierarchy, hierarchical_attention, multiscale_attention, select
from hsa.attention.cache.tied import TiedCache
from hsa.errors import InvalidInput
from hsa.tree.causal_tree import causal_tree

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 5, 3
Tokens = tuple[Tensor, Tensor, Tensor]


def tokens(number: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tokens:
    make = torch.Generator().manual_seed(seed)
    shapes = ((number, HEADS, DIM), (number, KV_HEADS, DIM), (number, KV_HEADS, VALUE_DIM))
    q, k, v = (torch.randn(*shape, generator=make, dtype=dtype) for shape in shapes)
    return 2 * q, k, v


def last_row(qkv: Tokens, length: int, tree: Hierarchy) -> Tensor:
    q, k, v = (x[:length] for x in qkv)
    return hierarchical_attention(q, k, v, tree, causal="paper-mask")[-1]


def step(
    cache: TiedCache, texts: Sequence[Tokens], closes: Sequence[np.ndarray] | None = None, layer: int = 0
) -> Tensor:
    """Decode the next token of every text."""
    at = list(cache.lengths)
    cache.append(None if closes is None else [int(c[t]) for c, t in zip(closes, at, strict=True)])
    rows = [torch.stack([text[i][t] for text, t in zip(texts, at, strict=True)]) for i in range(3)]
    return cache.attend(layer, *rows)


def test_every_length() -> None:
    """The newest token gets its row of the full pass, for 1 to 300 tokens in float32."""
    branching = (3, 2)
    qkv = tokens(300, dtype=torch.float32)
    cache = TiedCache(1, branching)
    for length in range(1, 301):
        out = step(cache, [qkv])
        torch.testing.assert_close(
            out[0], last_row(qkv, length, causal_tree([length], branching)), atol=1e-5, rtol=1e-5
        )


@settings(max_examples=15, deadline=None)
@given(
    branching=st.lists(st.integers(2, 5), min_size=1, max_size=3).map(tuple),
    sinks=st.integers(0, 3),
    lengths=st.lists(st.integers(1, 23), min_size=2, max_size=3),
    prefill=st.booleans(),
    seed=st.integers(0, 2**16),
)
def test_early_closing(branching: tuple[int, ...], sinks: int, lengths: list[int], prefill: bool, seed: int) -> None:
    """Tokens that close nodes early, sinks, batches of unequal lengths, with and without a prompt."""
    rng = np.random.default_rng(seed)
    longest = max(lengths) + 9
    texts = [tokens(longest, seed + i) for i in range(len(lengths))]
    closes = [rng.choice([0, 0, 0, 1, 2, 3], size=longest) for _ in lengths]
    cache = TiedCache(len(lengths), branching, sinks=sinks)
    if prefill:
        forest = cache.begin(lengths, np.concatenate([c[:n] for c, n in zip(closes, lengths, strict=True)]))
        assert forest.lengths == lengths
        cache.fill(0, *(torch.cat([text[i][:n] for text, n in zip(texts, lengths, strict=True)]) for i in range(3)))
        assert cache.lengths == lengths
    for _ in range(9):
        out = step(cache, texts, closes)
        for row, text, c, length in zip(out, texts, closes, cache.lengths, strict=True):
            torch.testing.assert_close(row, last_row(text, length, causal_tree([length], branching, c[:length], sinks)))


def test_rows_of_earlier_tokens_change() -> None:
    """Erratum 7: a full pass over a longer text gives earlier tokens other rows. Multiscale attention does not."""
    branching, length = (4, 4), 16
    q, k, v = tokens(length)
    cache = TiedCache(1, branching)
    incremental = torch.cat([step(cache, [(q, k, v)]) for _ in range(length)])
    tree = causal_tree([length], branching)
    full = hierarchical_attention(q, k, v, tree, causal="paper-mask")
    torch.testing.assert_close(incremental[-1], full[-1])
    moved = (incremental - full).abs().amax((1, 2)) > 1e-3
    # Rows of tokens with an earlier node and with a later token in their own node.
    assert moved.tolist() == [False] * 4 + [True, True, True, False] * 3

    def multiscale(until: int) -> Tensor:
        part, q_, k_, v_ = causal_tree([until], branching), q[:until], k[:until], v[:until]
        selection = select(q_, k_, part, causal=True)
        return multiscale_attention(q_, k_, v_, part, selection=selection, causal=True)

    rows = torch.stack([multiscale(until)[-1] for until in range(1, length + 1)])
    torch.testing.assert_close(rows, multiscale(length))


def test_layers_do_not_mix() -> None:
    texts = [tokens(11, 1), tokens(11, 2)]
    cache = TiedCache(1, (2, 3), layers=2)
    for length in range(1, 12):
        cache.append()
        for layer in (1, 0):  # in any order
            out = cache.attend(layer, *(x[length - 1 : length] for x in texts[layer]))
            torch.testing.assert_close(out[0], last_row(texts[layer], length, causal_tree([length], (2, 3))))


def test_reorder() -> None:
    texts = [tokens(20, i) for i in range(3)]
    closes = [np.random.default_rng(i).integers(0, 3, size=20) for i in range(3)]
    cache = TiedCache(3, (3, 2), sinks=1)
    for _ in range(9):
        step(cache, texts, closes)
    cache.reorder(torch.tensor([2, 0, 0, 2]))
    assert cache.batch == 4
    assert cache.lengths == [9] * 4
    order = [2, 0, 0, 2]
    for _ in range(8):
        out = step(cache, [texts[i] for i in order], [closes[i] for i in order])
        length = cache.lengths[0]
        for row, i in zip(out, order, strict=True):
            torch.testing.assert_close(
                row, last_row(texts[i], length, causal_tree([length], (3, 2), closes[i][:length], 1))
            )


def test_save_and_restore(tmp_path) -> None:
    texts = [tokens(20, i) for i in range(2)]
    cache = TiedCache(2, (3, 2), sinks=2)
    for _ in range(10):
        step(cache, texts)
    torch.save(cache.state_dict(), tmp_path / "cache.pt")
    other = TiedCache(2, (3, 2), sinks=2)
    other.load_state_dict(torch.load(tmp_path / "cache.pt", weights_only=True))
    assert other.lengths == cache.lengths
    for _ in range(5):
        assert torch.equal(step(cache, texts), step(other, texts))
    with pytest.raises(InvalidInput, match=r"state\['settings'\]: expected"):
        TiedCache(2, (3, 3), sinks=2).load_state_dict(cache.state_dict())


def test_memory_grows_with_the_logarithm() -> None:
    cache = TiedCache(1, (4,))
    q, k, v = tokens(4**6, dtype=torch.float32)
    assert cache.begin([4**6]).num_leaves == 4**6
    cache.fill(0, q, k, v)
    kept = cache.memory()
    # Seven levels of at most three members with a key and a value each; a query sum and an energy per level and root.
    assert kept.bytes == 4 * (7 * 3 * KV_HEADS * (DIM + VALUE_DIM) + 8 * HEADS * (DIM + 1))
    assert kept.flat_bytes == 4**6 * 4 * KV_HEADS * (DIM + VALUE_DIM)
    assert not kept.leaves_kept
    for _ in range(200):
        cache.append()
        cache.attend(0, q[:1], k[:1], v[:1])
    assert cache.memory().bytes == kept.bytes


def test_half_precision() -> None:
    qkv = tokens(40, dtype=torch.bfloat16)
    wide = tuple(x.double() for x in qkv)
    cache = TiedCache(1, (3, 2))
    for length in range(1, 41):
        out = step(cache, [qkv])
        assert out.dtype == torch.bfloat16
        expected = last_row(wide, length, causal_tree([length], (3, 2)))  # type: ignore[arg-type]
        torch.testing.assert_close(out[0].double(), expected, atol=3e-2, rtol=3e-2)


def test_bad_input() -> None:
    q, k, v = (x[:2] for x in tokens(2))
    with pytest.raises(InvalidInput, match="branching"):
        TiedCache(1, (4, 1))
    with pytest.raises(InvalidInput, match="batch"):
        TiedCache(0, (4,))
    cache = TiedCache(2, (2,))
    with pytest.raises(InvalidInput, match="layer: 0 is not waiting for a token; expected a call of append"):
        cache.attend(0, q, k, v)
    with pytest.raises(InvalidInput, match="layer: 0 is not waiting for prompts; expected a call of begin"):
        cache.fill(0, q, k, v)
    with pytest.raises(InvalidInput, match="closes"):
        cache.append([1])
    cache.append()
    with pytest.raises(InvalidInput, match=r"only 0 of 1 layers have the newest tokens.*attend after append"):
        cache.append()
    with pytest.raises(InvalidInput, match=r"only 0 of 1 layers have the newest tokens.*attend after append"):
        cache.reorder([0])
    with pytest.raises(InvalidInput, match="one row per sequence"):
        cache.attend(0, q[:1], k[:1], v[:1])
    with pytest.raises(InvalidInput, match="heads in k and v that divide"):
        cache.attend(0, q, k.float(), v)
    with pytest.raises(InvalidInput, match="layer: expected a number from 0 to 0, got 1"):
        cache.attend(1, q, k, v)
    cache.attend(0, q, k, v)
    with pytest.raises(InvalidInput, match="layer: 0 is not waiting for a token; expected a call of append"):
        cache.attend(0, q, k, v)
    cache.append()
    with pytest.raises(InvalidInput, match="one cache per model"):
        cache.attend(0, q[:, :2], k, v)
    cache.attend(0, q, k, v)
    with pytest.raises(InvalidInput, match="an empty cache"):
        cache.begin([3, 4])
    with pytest.raises(InvalidInput, match="index"):
        cache.reorder([2])
    with pytest.raises(InvalidInput, match="lengths: expected one length for each of the 2 sequences, got"):
        TiedCache(2, (2,)).begin([3])
