"""`FlatCache`: exact attention over all tokens so far."""

import pytest
import torch

from hsa import multiscale_attention, select
from hsa.attention.cache.flat import FlatCache
from hsa.attention.cache.interface import Counted, Memory
from hsa.errors import InvalidInput
from tests.attention.cache.growing import DIM, HEADS, KV_HEADS, VALUE_DIM, Text, saved


def cache_of(batch, layers=1, **others):
    return FlatCache(layers, batch, KV_HEADS, DIM, value_dim=VALUE_DIM, **others)


class FlatText(Text):
    """Texts whose tokens see all tokens up to themselves: all families are selected."""

    def outputs(self, q, k, v):
        selection = select(q, k, self.tree, near=sum(self.lengths), causal=True)
        return multiscale_attention(q, k, v, self.tree, selection=selection, causal=True)


def test_decoding_equals_exact_attention():
    text, cache = FlatText([100, 100]), cache_of(2)
    assert max(text.step(cache) for _ in range(100)) < 1e-5
    q, k, v = text.q[:100], text.k[:100], text.v[:100]
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, 1).transpose(0, 1) for x in (k, v))
    by_torch = torch.nn.functional.scaled_dot_product_attention(q.transpose(0, 1), k, v, is_causal=True)
    torch.testing.assert_close(text.out[:100], by_torch.transpose(0, 1), rtol=0, atol=1e-5)


def test_prompts_of_unequal_lengths_and_layers():
    prompts = [17, 1, 40]
    texts, cache = [FlatText([n + 30 for n in prompts], seed=seed) for seed in (1, 2)], cache_of(3, layers=2)
    assert cache.begin(prompts).lengths == prompts
    for layer, text in enumerate(texts):
        cache.fill(layer, *text.prompts(prompts))
    for _ in range(30):
        rows = texts[0].rows(cache)
        cache.append()
        assert max(text.attend(cache, rows, layer=layer) for layer, text in enumerate(texts)) < 1e-5
    assert cache.lengths == [n + 30 for n in prompts]


def test_crop_and_reorder():
    text, cache = FlatText([110, 110, 110]), cache_of(3)
    text.begin(cache, [20, 40, 60])
    which = [0, 1, 2]
    for index in ([2, 0, 1], [1, 1, 0, 2, 0], [4], [0, 0]):
        assert max(text.step(cache, which=which) for _ in range(7)) < 1e-5
        text.step_garbage(cache)
        cache.reorder(torch.tensor(index))
        which = [which[i] for i in index]
        wanted = [n - 1 - 2 * i for i, n in enumerate(cache.lengths)]
        cache.crop(wanted)
        assert cache.lengths == wanted
        assert max(text.step(cache, which=which) for _ in range(3)) < 1e-5


def test_cache_cropped_to_nothing_takes_new_prompts():
    text, cache = FlatText([30, 30]), cache_of(2)
    text.begin(cache, [9, 5])
    cache.crop([0, 0])
    text.begin(cache, [4, 7])
    assert text.step(cache) < 1e-5


def test_save_and_restore():
    text, cache, other = FlatText([60, 60]), cache_of(2), cache_of(5)
    text.begin(cache, [20, 31])
    other.load_state_dict(saved(cache))
    for _ in range(20):
        assert text.step(cache) < 1e-5
        assert text.step(other) < 1e-5
    wrong = {"keys": (VALUE_DIM, VALUE_DIM), "values": (DIM, DIM)}
    for name, (dim, value_dim) in wrong.items():
        with pytest.raises(InvalidInput, match=rf"state\['{name}'\].*sizes of the saved one"):
            FlatCache(1, 2, KV_HEADS, dim, value_dim=value_dim).load_state_dict(cache.state_dict())
    with pytest.raises(InvalidInput, match=r"state\['keys'\].*bfloat16"):
        cache_of(2, dtype=torch.bfloat16).load_state_dict(cache.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_precisions(dtype):
    text, cache = FlatText([50, 50], dtype=dtype), cache_of(2, dtype=dtype)
    text.begin(cache, [10, 20])
    assert max(text.step(cache) for _ in range(30)) < (1e-12 if dtype == torch.float64 else 0.02)


def test_every_token_counts_as_an_entry():
    text, cache, counted = FlatText([60, 60]), cache_of(2), Counted()
    text.begin(cache, [20, 32])
    rows = text.rows(cache)
    cache.append()
    cache.attend(0, text.q[rows], text.k[rows], text.v[rows], counted=counted)
    assert counted == Counted(entries=(21 + 33) * HEADS)


def test_memory():
    text, cache = FlatText([60, 60]), cache_of(2)
    text.begin(cache, [20, 32])
    row = KV_HEADS * (DIM + VALUE_DIM) * 4
    assert cache.memory() == Memory(2 * 32 * row, 52 * row, leaves_kept=True)
    text.step(cache)
    assert cache.memory() == Memory(2 * 64 * row, 54 * row, leaves_kept=True)
    assert str(cache.memory()).endswith("in a flat cache); every key and value is kept")
