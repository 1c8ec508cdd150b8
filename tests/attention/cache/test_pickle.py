"""Caches can be pickled and copied in the middle of decoding, and go on with the same bits."""

import copy
import io
import pickle

import pytest
import torch

from hsa import ClusteredCache, MultiscaleCache, TiedCache
from hsa.attention.cache.flat import FlatCache

CACHES = {
    "flat": lambda: FlatCache(1, 2, 2, 8),
    "multiscale": lambda: MultiscaleCache(1, 2, 2, 8, branching=(4, 4)),
    "clustered": lambda: ClusteredCache(1, 2, 2, 8, branching=(4, 2, 1), tile=4, top_k=2),
    "tied": lambda: TiedCache(2, (4, 4)),
}


def by_torch(cache):
    file = io.BytesIO()
    torch.save(cache, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "torch.save": by_torch, "deepcopy": copy.deepcopy}


def step(cache, tokens):
    outs = []
    for _ in range(tokens):
        cache.append()
        outs.append(cache.attend(0, *torch.randn(3, 2, 2, 8).unbind(0)))
    return torch.stack(outs)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", CACHES)
def test_a_copy_goes_on(name, way):
    torch.manual_seed(0)
    cache = CACHES[name]()
    step(cache, 19)
    other = COPIES[way](cache)
    torch.manual_seed(1)
    expected = step(cache, 9)
    torch.manual_seed(1)
    assert torch.equal(step(other, 9), expected)
