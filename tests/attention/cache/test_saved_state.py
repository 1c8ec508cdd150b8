"""Damaged states are refused by every cache, which then stays as it was."""

import copy

import pytest
import torch

from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.flat import FlatCache
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.attention.cache.tied import TiedCache
from hsa.errors import InvalidInput

MAKE = {
    "flat": lambda: FlatCache(2, 2, 3, 5, value_dim=7, max_length=50),
    "multiscale": lambda: MultiscaleCache(2, 2, 3, 5, value_dim=7, branching=(3, 2), max_length=50),
    "clustered": lambda: ClusteredCache(2, 2, 3, 5, value_dim=7, branching=(2, 2, 2), tile=4, max_length=50),
    "tied": lambda: TiedCache(2, (3, 2), layers=2, sinks=1),
}


def filled(kind):
    cache = MAKE[kind]()
    for _ in range(20):
        cache.append()
        for layer in range(2):
            cache.attend(layer, torch.randn(2, 3, 5), torch.randn(2, 3, 5), torch.randn(2, 3, 7))
    return cache


def leaves(value, path=()):
    """Return the paths of all entries of a nested state."""
    if isinstance(value, dict | list | tuple):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return [p for key, part in items for p in ((*path, key), *leaves(part, (*path, key)))]
    return []


def changed(state, path, change):
    """Return a copy of a state with one entry changed, or removed if the change returns None."""
    if len(path) == 0:
        return change(state)
    own = list(state) if isinstance(state, tuple) else copy.copy(state)
    new = changed(own[path[0]], path[1:], change)
    if new is None:
        del own[path[0]]
    else:
        own[path[0]] = new
    return tuple(own) if isinstance(state, tuple) else own


def equal(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def other_values(value):
    """Return changes of an entry that no cache may accept."""
    if isinstance(value, torch.Tensor):
        wider = torch.cat([value, value], -1)
        narrower = value[..., :-1]
        kind = torch.float64 if value.is_floating_point() else torch.int8
        return [None, "text", wider, narrower, value[None], value[:-1], value.to(kind)]
    if isinstance(value, int) and not isinstance(value, bool):
        return [None, "text", -1, 10**6, 2.5]
    return [None, "text", 7, []]


@pytest.mark.parametrize("kind", MAKE)
def test_every_damage_is_refused(kind):
    state = filled(kind).state_dict()
    cache = filled(kind)
    before = copy.deepcopy(cache.state_dict())
    for path in leaves(state):
        value = state
        for key in path:
            value = value[key]
        for other in other_values(value):
            if equal(other, value):
                continue
            damaged = changed(state, path, lambda old, other=other: other)
            with pytest.raises(InvalidInput, match=r"^state"):
                cache.load_state_dict(damaged)
            assert equal(cache.state_dict(), before), path
    for other in (None, [], "text", {}):
        with pytest.raises(InvalidInput, match=r"^state"):
            cache.load_state_dict(other)
    cache.load_state_dict(state)
    assert equal(cache.state_dict(), state)


@pytest.mark.parametrize("kind", MAKE)
def test_states_of_empty_caches(kind):
    cache = filled(kind)
    cache.load_state_dict(MAKE[kind]().state_dict())
    assert cache.lengths == [0, 0]
