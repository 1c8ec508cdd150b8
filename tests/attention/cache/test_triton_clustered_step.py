"""Kernels of `ClusteredCache`: the same results as a pass over the whole text, in the interpreter or on a GPU."""

import pytest

pytest.importorskip("triton")

import torch

from hsa import clustered_attention
from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.interface import Counted
from hsa.attention.clustered import operator
from hsa.errors import InvalidInput, Unsupported
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401

SMALL = {"branching": (8, 8, 1), "tile": 16}
CASES = {
    "threshold": (SMALL | {"threshold": 0.05}, (2, 2, 16, 16)),
    "grouped heads": (SMALL | {"threshold": 0.1, "spread": 0.4}, (6, 2, 16, 32)),
    "shared lists": (SMALL | {"threshold": 0.1, "share_lists": True}, (4, 2, 16, 16)),
    "per head": (SMALL | {"threshold": (0.1, 1.0, 0.02, 0.3, 0.01, 0.05)}, (6, 2, 16, 32)),
    "shared lists per head": (SMALL | {"threshold": (0.1, 1.0, 0.02, 0.3), "share_lists": True}, (4, 2, 16, 16)),
    "windows": (SMALL | {"threshold": 0.05, "windows": True, "spread": 0.0, "tile": 32}, (2, 1, 32, 48)),
    "nothing": (SMALL | {"threshold": 1.0}, (1, 1, 16, 16)),
    "many heads": (SMALL | {"threshold": 0.05}, (37, 1, 16, 16)),
    "many heads of a list": (SMALL | {"threshold": 0.05, "share_lists": True}, (37, 1, 16, 16)),
    "exact at first": (SMALL | {"threshold": 0.1, "exact_until": 128}, (4, 2, 16, 16)),
    "half of the channels": (SMALL | {"threshold": 0.05}, (2, 1, 64, 16)),
    "two nodes": ({"branching": (8, 8, 2), "tile": 64, "threshold": 0.03}, (2, 1, 16, 16)),
}


def tokens(lengths, sizes, dtype=torch.float32, seed=0):
    """Return random queries, keys and values, packed."""
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, dim, value_dim = sizes
    shapes = ((heads, dim), (kv_heads, dim), (kv_heads, value_dim))
    q, k, v = (torch.randn(sum(lengths), *shape, generator=generator).to(dtype).to(DEVICE) for shape in shapes)
    return 2 * q, k, v


class Text:
    """Sequences with the output of every token, and a cache that reads them."""

    def __init__(self, lengths, options, sizes, dtype=torch.float32, atol=2e-5, **others):
        self.lengths, self.atol = lengths, atol
        self.q, self.k, self.v = tokens(lengths, sizes, dtype)
        self.bias = torch.linspace(-0.5, 0.3, sizes[0], device=DEVICE)
        # In half precision, kernels select with 8 bits, so other backends may open other groups.
        shared = {"causal": True, "pooled_bias": self.bias, "backend": "torch" if dtype == torch.float32 else "triton"}
        self.out = clustered_attention(self.q, self.k, self.v, lengths, **shared, **options)
        _, kv_heads, dim, value_dim = sizes
        storage = {"value_dim": value_dim, "dtype": dtype, "device": DEVICE, "backend": "triton", **others}
        self.cache = ClusteredCache(1, len(lengths), kv_heads, dim, **storage, **options)
        self.first = torch.tensor(lengths).cumsum(0) - torch.tensor(lengths)

    def rows(self, begins, ends):
        rows = [f + torch.arange(a, b) for f, a, b in zip(self.first, begins, ends, strict=True)]
        return torch.cat(rows).to(DEVICE)

    def read(self, new):
        """Add tokens to every sequence at once."""
        before = self.cache.lengths
        rows = self.rows(before, [n + m for n, m in zip(before, new, strict=True)])
        self.cache.extend(new) if any(before) else self.cache.begin(new)
        out = self.cache.attend_prompts(0, self.q[rows], self.k[rows], self.v[rows], pooled_bias=self.bias)
        self.close(out, rows)

    def step(self):
        before = self.cache.lengths
        rows = self.rows(before, [n + 1 for n in before])
        self.cache.append()
        self.close(self.attend(rows), rows)

    def attend(self, rows):
        return self.cache.attend(0, self.q[rows], self.k[rows], self.v[rows], pooled_bias=self.bias)

    def close(self, out, rows):
        difference = (out.float() - self.out[rows].float()).abs()
        if out.dtype == torch.float32:
            assert difference.max() < self.atol
        else:  # a group whose estimate is almost equal to the bound may be open in one of the two
            assert (difference > self.atol).float().mean() < 2e-3


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_steps_equal_the_full_pass(case):
    """Sequences of unequal lengths, across the borders of tiles and chunks."""
    options, sizes = case
    text = Text([150, 142], options, sizes)
    text.read([121, 113])
    for _ in range(29):
        text.step()


@pytest.mark.parametrize("name", ["threshold", "exact at first"])
def test_from_the_first_token(name):
    text = Text([70], *CASES[name])
    text.cache.append()
    text.close(text.attend(torch.tensor([0], device=DEVICE)), torch.tensor([0], device=DEVICE))
    for _ in range(69):
        text.step()


@pytest.mark.parametrize("name", ["threshold", "grouped heads", "shared lists", "many heads of a list", "per head"])
def test_several_tokens_at_once(name):
    """Tokens may cross the border of a tile or of a chunk."""
    text = Text([165, 170], *CASES[name])
    text.read([100, 107])
    for number in (3, 1, 16, 5, 16, 2, 7):
        text.read([number, number])
    text.step()


@pytest.fixture
def few_programs(monkeypatch):
    """Divide chunks among few programs, which read and list few of them at a time."""
    from hsa.attention.cache.triton import clustered_step

    few = {"MOST_SCORERS": 4, "MOST_SPLITS": 2, "OPENED": 64, "MERGED": 256, "ESTIMATED_BYTES": 2**9}
    for name, value in few.items():
        monkeypatch.setattr(clustered_step, name, value)
    clustered_step.launches.cache_clear()
    yield
    clustered_step.launches.cache_clear()


@pytest.mark.parametrize("name", ["grouped heads", "shared lists"])
def test_open_groups_of_two_tiles(few_programs, name):
    """More chunks than programs, the last programs with fewer; tokens that start a tile, or cross its border.

    The open groups of this tile and of the one before equal those of PyTorch.
    """
    options, sizes = CASES[name]
    sizes = 6, *sizes[1:]  # three heads per list, if lists are shared
    texts = [Text([395, 330], options, sizes, backend=backend) for backend in ("triton", "torch")]
    for number in ([380, 315], [2, 2], [1, 1], [1, 1], [5, 5]):
        for text in texts:
            text.step() if number == [1, 1] else text.read(number)
        kernel, torch_ = (text.cache._stored[0] for text in texts)
        for group in ("first", "before"):
            assert torch.equal(kernel[group], torch_[group])
        assert (kernel["before"] < 255).any()


def test_more_programs_than_chunks():
    """Give 14 or 15 of 16 programs no chunk."""
    text = Text([131], *CASES["threshold"], max_length=1024)
    text.read([126])
    for _ in range(5):
        text.step()


def test_memory_of_several_tokens():
    """Steps of up to 2ⁿ tokens share their memory, which is counted but not saved."""
    text = Text([165], *CASES["threshold"], max_length=256)
    text.read([100])
    text.step()
    one, state = text.cache.memory().bytes, len(text.cache.state_dict()["layers"][0])
    text.read([7])
    several = text.cache.memory().bytes
    assert several - one > 8 * 2 * 4 * 8 * 4  # estimates: tokens, heads, chunks, groups, bytes
    for number in (8, 5, 6):
        text.read([number])
    text.step()
    assert text.cache.memory().bytes == several
    assert len(text.cache.state_dict()["layers"][0]) == state


def test_pieces_steps_crops_and_reordering_alternate():
    text = Text([200, 200], *CASES["grouped heads"])
    text.read([70, 64])
    for crop, new, steps in ((0, (3, 3), 5), (4, (21, 0), 3), (9, (2, 2), 2), (1, (40, 50), 4)):
        text.cache.crop([n - crop for n in text.cache.lengths])
        text.read(list(new))
        for _ in range(steps):
            text.step()
    text.cache.reorder([1, 0])
    text.first = text.first.flip(0)
    text.step()


def test_state_moves_between_backends():
    """Chunks that a kernel has clustered are read by PyTorch, and the other way round."""
    text = Text([140], *CASES["threshold"])
    text.read([130])
    state = text.cache.state_dict()
    other = Text([140], *CASES["threshold"])
    other.cache = ClusteredCache(1, 1, 2, 16, backend="torch", device=DEVICE, **CASES["threshold"][0])
    other.cache.load_state_dict(state)
    for _ in range(10):
        other.step()
        text.step()
    text.cache.load_state_dict(state)
    text.step()


def test_saved_scores_of_another_type_are_computed_again():
    text = Text([150], *CASES["half of the channels"])
    text.read([150])
    scores, state = text.cache._stored[0]["scores"][:, :, :2].clone(), text.cache.state_dict()
    state["layers"][0]["scores"] = torch.zeros_like(state["layers"][0]["scores"], dtype=torch.float8_e4m3fn)
    text.cache.load_state_dict(state)
    torch.testing.assert_close(text.cache._stored[0]["scores"][:, :, :2], scores)


@pytest.mark.parametrize("lengths", [[150], [70, 133]])
def test_prompts_of_the_same_lengths_repeat_launches(lengths, monkeypatch):
    """A first prompt is recorded, and others repeat its launches: with other values, and never with other options."""
    options, sizes = CASES["grouped heads"]
    calls, select_groups = [], operator.select_groups
    monkeypatch.setattr(operator, "select_groups", lambda *x, **y: calls.append(1) or select_groups(*x, **y))
    for seed, threshold in ((1, 0.1), (2, 0.1), (3, 0.1), (4, 0.02)):
        q, k, v = tokens(lengths, sizes, seed=seed)
        storage = {"value_dim": sizes[3], "device": DEVICE, "backend": "triton"}
        cache = ClusteredCache(1, len(lengths), sizes[1], sizes[2], **storage, **{**options, "threshold": threshold})
        cache.begin(lengths)
        out = cache.attend_prompts(0, q, k, v)
        wanted = clustered_attention(
            q, k, v, lengths, causal=True, backend="torch", **{**options, "threshold": threshold}
        )
        torch.testing.assert_close(out, wanted, atol=2e-5, rtol=0)
        new = tokens([1] * len(lengths), sizes, seed=9)  # the open groups of the last tile were kept
        cache.append()
        step = cache.attend(0, *new)
        rows = torch.tensor(lengths).cumsum(0)
        longer = [
            torch.cat([torch.cat(pair) for pair in zip(x.tensor_split(rows[:-1]), y[:, None], strict=True)])
            for x, y in zip((q, k, v), new, strict=True)
        ]
        whole = clustered_attention(
            *longer, [n + 1 for n in lengths], causal=True, backend="torch", **{**options, "threshold": threshold}
        )
        torch.testing.assert_close(step, whole[rows + torch.arange(len(lengths))], atol=2e-5, rtol=0)
    assert len(calls) == 2


def test_counting_runs_in_pytorch():
    text = Text([140], *CASES["threshold"])
    text.read([128])
    text.cache.append()
    row, counted = torch.tensor([128], device=DEVICE), Counted()
    out = text.cache.attend(0, text.q[row], text.k[row], text.v[row], pooled_bias=text.bias, counted=counted)
    text.close(out, row)
    assert counted.entries > 0
    for _ in range(11):
        text.step()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"top_k": 3}, "select by threshold, not by top_k"),
        ({"tile": 8}, "at least 16 queries"),
        ({"branching": (4, 4, 4)}, "branching must be"),
    ],
)
def test_refusals(options, reason):
    with pytest.raises(Unsupported, match=reason):
        ClusteredCache(1, 1, 1, 16, backend="triton", device=DEVICE, **options)
    assert ClusteredCache(1, 1, 1, 16, device=DEVICE, **options).backend.name == "torch"


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_half_precision(dim):
    text = Text([1100, 1150], {"threshold": 1 / 64}, (14, 2, dim, dim), torch.bfloat16, atol=0.02)
    text.read([1000, 1010])
    for _ in range(90):
        text.step()


@pytest.mark.gpu
@pytest.mark.parametrize("threshold", [1 / 64, (1 / 64, 1 / 16, 1 / 256, 1 / 4)])
def test_cuda_graph(threshold):
    text = Text([1200, 1100], {"threshold": threshold}, (4, 2, 64, 64), torch.bfloat16, atol=0.02, max_length=1100)
    text.read([1000, 900])
    text.step()
    static = [x[text.rows([0, 0], [1, 1])].clone() for x in (text.q, text.k, text.v)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        text.cache.append()
        out = text.cache.attend(0, *static, pooled_bias=text.bias)
    for n in range(98):
        rows = text.rows([1001 + n, 901 + n], [1002 + n, 902 + n])
        for x, y in zip(static, (text.q, text.k, text.v), strict=True):
            x.copy_(y[rows])
        graph.replay()
        text.close(out, rows)
    assert text.cache.lengths == [1099, 999]
    text.step()  # called from Python again
    with pytest.raises(InvalidInput, match="max_length"):
        text.cache.append()


@pytest.mark.gpu
def test_a_graph_beyond_the_capacity_returns_nan():
    text = Text([600], {"threshold": 1 / 64}, (2, 2, 64, 64), torch.bfloat16, max_length=512)
    text.read([510])
    text.step()
    row = text.rows([0], [1])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        text.cache.append()
        out = text.attend(row)
    graph.replay()
    assert out.isfinite().all()
    graph.replay()
    assert out.isnan().all()


@pytest.mark.gpu
def test_capture_needs_a_length():
    text = Text([600], {"threshold": 1 / 64}, (2, 2, 64, 64), torch.bfloat16)
    text.read([510])
    text.step()
    graph = torch.cuda.CUDAGraph()
    with pytest.raises(InvalidInput, match="max_length"), torch.cuda.graph(graph):
        text.cache.append()
