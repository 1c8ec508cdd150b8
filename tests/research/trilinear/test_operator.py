"""Three-way attention: the dense backend compared with the definition, the streaming backend with the dense one."""

import inspect
from itertools import product
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hsa import Hierarchy
from hsa.attention.checks import checking
from hsa.errors import HsaError, InvalidInput, NonFinite, Unsupported
from hsa.research.decomposition import CP
from hsa.research.trilinear import dense, streaming
from hsa.research.trilinear.counts import flops_trilinear
from hsa.research.trilinear.operator import TRILINEAR, trilinear_attention
from tests.forests import gradients
from tests.research.trilinear.three_way import DIM, FORMS, HEADS, RANK, VALUE_DIM, assert_same, form, full, rows

seeds = st.integers(0, 10**6)
lengths = st.lists(st.integers(1, 9), min_size=1, max_size=4)
LIMITS = [{}, {"causal": True}, {"window": 3}, {"window": 2, "causal": True}, {"window": 1}, {"window": 100}]
limits = st.sampled_from(LIMITS)
ON_THE_CPU = ("streaming", "dense")  # test_triton_operator.py has the kernels


def chunks_of(numbers):
    return patch.dict(streaming.CHUNK, cpu=numbers)


def assert_streaming_equals_dense(inputs, chunk, attend, tolerance=1e-10):
    """Compare output and gradients of `attend(backend)`."""
    with chunks_of(chunk):
        ours = attend("streaming")
        ours = [ours, *gradients(ours, inputs)]
    expected = attend("dense")
    expected = [expected, *gradients(expected, inputs)]
    for a, b in zip(ours, expected, strict=True):
        assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1)


def definition(q, k1, k2, v1, v2, tensor, *, causal=False, window=None, scale=None):
    """Compute one tree by sums over all triples, one query at a time."""
    out = []
    scale = DIM**-0.5 if scale is None else scale
    for i in range(len(q)):
        seen = [
            [j for j in range(len(k)) if not (causal and j > i) and not (window is not None and abs(i - j) >= window)]
            for k in (k1, k2)
        ]
        pairs = list(product(*seen))
        logits = [torch.einsum("habc,ha,hb,hc->h", tensor, q[i], k1[j], k2[k]) * scale for j, k in pairs]
        weights = torch.stack(logits).softmax(0)
        values = torch.stack([v1[j] * v2[k] for j, k in pairs])
        out.append((weights[..., None] * values).sum(0))
    return torch.stack(out)


@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=5)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=2), seed=seeds, options=limits, data=st.data())
def test_dense_matches_the_definition(name, sizes, seed, options, data):
    forest = Hierarchy.flat(sizes)
    first = second = forest
    if not options:
        first, second = (Hierarchy.flat([data.draw(st.integers(1, 4)) for _ in sizes]) for _ in range(2))
    x = rows(forest, first, second, seed=seed)
    tensor, _ = form(name, seed)
    sets = {} if options else {"first": first, "second": second}
    out = trilinear_attention(*x, forest, tensor=tensor, backend="dense", **options, **sets)
    split = (y.split(f.lengths) for y, f in zip(x, (forest, first, second, first, second), strict=True))
    expected = torch.cat([definition(*tree, full(tensor), **options) for tree in zip(*split, strict=True)])
    assert_same([out], [expected])


@pytest.mark.parametrize("chunk", [2**20, 157])
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=12)
@given(sizes=lengths, seed=seeds, options=limits)
def test_streaming_equals_dense(name, chunk, sizes, seed, options):
    forest = Hierarchy.flat(sizes)
    x = rows(forest, seed=seed, requires_grad=True)
    tensor, parameters = form(name, seed, requires_grad=True)
    assert_streaming_equals_dense(
        [*x, *parameters],
        chunk,
        lambda backend: trilinear_attention(*x, forest, tensor=tensor, backend=backend, **options),
    )


@pytest.mark.parametrize("chunk", [2**20, 2003])
@pytest.mark.parametrize("options", LIMITS)
def test_longer_trees_are_cut_into_blocks(options, chunk):
    """Cover several blocks, edges of windows, and trees shorter than a window."""
    forest = Hierarchy.flat([41, 3, 41, 67])
    options = {k: 7 * v if k == "window" and v < 100 else v for k, v in options.items()}
    x = rows(forest, requires_grad=True)
    assert_streaming_equals_dense(x, chunk, lambda backend: trilinear_attention(*x, forest, backend=backend, **options))


@pytest.mark.parametrize("chunk", [2**20, 157])
@pytest.mark.parametrize("name", FORMS)
@settings(max_examples=8)
@given(sizes=st.lists(st.tuples(*[st.integers(1, 8)] * 3), min_size=1, max_size=4), seed=seeds)
def test_different_sets(name, chunk, sizes, seed):
    forests = [Hierarchy.flat(list(of_set)) for of_set in zip(*sizes, strict=True)]
    x = rows(*forests, seed=seed, requires_grad=True)
    tensor, parameters = form(name, seed, requires_grad=True)
    sets = {"first": forests[1], "second": forests[2], "tensor": tensor}
    assert_streaming_equals_dense(
        [*x, *parameters], chunk, lambda backend: trilinear_attention(*x, forests[0], backend=backend, **sets)
    )


@pytest.mark.parametrize("options", LIMITS)
@pytest.mark.parametrize("name", ["diagonal", "full", "CP"])
def test_single_precision(name, options):
    """Use logits small enough for the seven digits of float32."""
    forest = Hierarchy.flat([23, 5])
    x = rows(forest, dtype=torch.float32, requires_grad=True)
    tensor, parameters = form(name, dtype=torch.float32, requires_grad=True)
    assert_streaming_equals_dense(
        [*x, *parameters],
        997,
        lambda backend: trilinear_attention(*x, forest, tensor=tensor, scale=0.2, backend=backend, **options),
        tolerance=1e-6,
    )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backend", [b for b in TRILINEAR if b.name in ON_THE_CPU], ids=lambda b: b.name)
@pytest.mark.parametrize("name", ["none", "full"])
def test_half_precision_within_the_tolerance(name, backend, dtype):
    forest = Hierarchy.flat([23, 5])
    x = rows(forest, dtype=dtype, requires_grad=True)
    tensor, parameters = form(name, dtype=dtype, requires_grad=True)
    out = trilinear_attention(*x, forest, tensor=tensor, backend=backend.name)
    assert out.dtype == dtype
    inputs = [*x, *parameters]
    exact = [y.detach().double().requires_grad_() for y in inputs]
    expected = trilinear_attention(*exact[:5], forest, tensor=exact[5] if parameters else None, backend="dense")
    weight = torch.randn(out.shape, dtype=torch.float64).to(dtype)
    ours = [out, *torch.autograd.grad(out, inputs, weight)]
    wanted = [expected, *torch.autograd.grad(expected, exact, weight.double())]
    for a, b in zip(ours, wanted, strict=True):
        assert a.dtype == dtype
        assert (a.double() - b).abs().max() <= backend.tolerance[dtype] * b.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["none", "full"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 11}])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_streaming_on_a_gpu(dtype, options, name):
    """Products of bfloat16 inputs are computed in bfloat16."""
    forest = Hierarchy.flat([61, 5, 61]).to("cuda")
    inputs = [*rows(forest, dtype=dtype), *form(name, dtype=dtype)[1]]
    weight = torch.randn(forest.num_leaves, HEADS, VALUE_DIM).to("cuda", dtype)
    results = []
    for backend, precision in (("streaming", dtype), ("dense", torch.float64)):
        x = [y.to("cuda", precision).requires_grad_() for y in inputs]
        tensor = x[5] if name == "full" else None
        with patch.dict(streaming.CHUNK, cuda=2**16):
            out = trilinear_attention(*x[:5], forest, tensor=tensor, backend=backend, **options)
            results.append([out, *torch.autograd.grad(out, x, weight.to(precision))])
    tolerance = next(b.tolerance for b in TRILINEAR if b.name == "streaming")[dtype]
    for a, b in zip(*results, strict=True):
        assert (a.double() - b).abs().max() <= tolerance * b.abs().max()


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("per_head", [False, True])
def test_diagonal_equals_its_full_tensor(backend, per_head):
    forest = Hierarchy.flat([6, 4])
    x = rows(forest)
    tensor, _ = form("diagonal per head" if per_head else "diagonal")
    tensors = [tensor, full(tensor), full(tensor) if per_head else full(tensor)[0]]
    outs = [trilinear_attention(*x, forest, tensor=t, backend=backend) for t in tensors]
    assert_same(outs[1:], outs[:1] * 2)
    ones = trilinear_attention(*x, forest, tensor=torch.ones(DIM, dtype=torch.float64), backend=backend)
    assert_same([ones], [trilinear_attention(*x, forest, backend=backend)])


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("per_head", [False, True])
def test_cp_equals_its_full_tensor(backend, per_head):
    forest = Hierarchy.flat([6, 4])
    x = rows(forest)
    cp, _ = form("CP per head" if per_head else "CP")
    outs = [trilinear_attention(*x, forest, tensor=t, backend=backend) for t in (cp, cp.tensor())]
    assert_same(outs[:1], outs[1:])


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_cp_of_the_largest_rank_can_equal_any_tensor(backend):
    """Write T exactly as Σ_ab e_a ⊗ e_b ⊗ T_ab, a sum of dim² outer products."""
    forest = Hierarchy.flat([6, 4])
    x = rows(forest)
    tensor, _ = form("full per head")
    eye = torch.eye(DIM, dtype=torch.float64)
    exact = CP(eye.repeat_interleave(DIM, 0), eye.repeat(DIM, 1), tensor.flatten(1, 2))
    assert exact.rank == DIM**2
    torch.testing.assert_close(exact.tensor(), tensor, rtol=0, atol=0)
    outs = [trilinear_attention(*x, forest, tensor=t, backend=backend) for t in (exact, tensor)]
    assert_same(outs[:1], outs[1:])


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in FORMS), ("diagonal", {"causal": True}), ("full", {"window": 2})]
)
def test_gradcheck(name, options):
    forest = Hierarchy.flat([3, 1])
    x = rows(forest, requires_grad=True)
    _, parameters = form(name, requires_grad=True)

    def attend(*inputs):
        tensor = CP(*inputs[5:]) if name.startswith("CP") else next(iter(inputs[5:]), None)
        return trilinear_attention(*inputs[:5], forest, tensor=tensor, scale=0.7, **options)

    assert torch.autograd.gradcheck(attend, [*x, *parameters])


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window": 3}])
def test_no_output_depends_on_a_later_leaf(backend, options):
    forest = Hierarchy.flat([3, 11])
    x = rows(forest, requires_grad=True)
    out = trilinear_attention(*x, forest, backend=backend, **options)
    for i in range(forest.num_leaves):
        for grad in torch.autograd.grad(out[i].square().sum(), x, retain_graph=True):
            assert (grad[i + 1 :] == 0).all()
            assert i in (0, 3) or (grad[i] != 0).any()  # the first leaf of a tree sees only itself
    with torch.no_grad():
        changed = [y.clone() for y in x]
        for y in changed:
            y[9:] = torch.randn_like(y[9:])
        assert torch.equal(trilinear_attention(*changed, forest, backend=backend, **options)[:9], out[:9])


@given(sizes=lengths, seed=seeds, options=limits)
@settings(max_examples=15)
def test_a_tree_does_not_depend_on_its_batch(sizes, seed, options):
    forest = Hierarchy.flat(sizes)
    x = rows(forest, seed=seed)
    out = trilinear_attention(*x, forest, **options).split(sizes)
    for t, tree in enumerate(forest.uncollate()):
        alone = trilinear_attention(*(y.split(sizes)[t] for y in x), tree, **options)
        assert_same([out[t]], [alone], 1e-12)


def test_only_the_lengths_of_trees_matter():
    nested = Hierarchy.from_nested([[3, [2, 4]], [1]])
    x = rows(nested)
    assert torch.equal(trilinear_attention(*x, nested), trilinear_attention(*x, Hierarchy.flat([9, 1])))


@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("options", LIMITS[:4])
@pytest.mark.parametrize("name", ["none", "full", "CP"])
def test_no_trees_and_single_leaves(backend, options, name):
    tensor, parameters = form(name, requires_grad=True)
    for sizes in ([], [1], [1, 1, 1]):
        forest = Hierarchy.flat(sizes)
        x = rows(forest, requires_grad=True)
        out = trilinear_attention(*x, forest, tensor=tensor, backend=backend, **options)
        assert out.shape == (len(sizes), HEADS, VALUE_DIM)
        assert_same([out], [x[3] * x[4]], 1e-12)  # a leaf that sees only itself
        for grad in gradients(out, [*x, *parameters]):
            assert grad.isfinite().all()


@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_large_logits_stay_finite(backend):
    forest = Hierarchy.flat([9])
    x = rows(forest, dtype=torch.float32)
    x = [(y * 1e4).requires_grad_() for y in x]
    out = trilinear_attention(*x, forest, backend=backend, causal=True)
    assert out.isfinite().all()
    assert all(grad.isfinite().all() for grad in torch.autograd.grad(out.sum(), x))


class Memory(TorchDispatchMode):
    """Record of memory allocated inside the block: peak bytes, and bytes of the largest tensor."""

    def __init__(self):
        super().__init__()
        self.alive, self.peak, self.largest = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for x in tree_leaves(result):
            if isinstance(x, torch.Tensor):
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self.alive = {key: (ref, size) for key, (ref, size) in self.alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window": 9}])
@pytest.mark.parametrize("name", ["none", "full"])
def test_streaming_memory_is_linear(name, options):
    chunk, peaks = 2**10, {}
    for backend, n in (("streaming", 8), ("streaming", 16), ("streaming", 32), ("dense", 32)):
        forest = Hierarchy.flat([n])
        x = rows(forest, requires_grad=True)
        tensor, parameters = form(name, requires_grad=True)
        trilinear_attention(*x, forest, tensor=tensor, backend=backend, **options)  # builds cached plans
        with chunks_of(chunk), Memory() as memory:
            out = trilinear_attention(*x, forest, tensor=tensor, backend=backend, **options)
            torch.autograd.grad(out.sum(), [*x, *parameters])
        peaks[backend, n] = memory.peak
        assert backend == "dense" or memory.largest <= 8 * chunk
    assert peaks["dense", 32] > 8 * HEADS * 32**3
    row = 8 * HEADS * (3 * DIM + 2 * VALUE_DIM)
    for n in (8, 16, 32):  # a few chunks, and a few copies of each row
        assert peaks["streaming", n] < 6 * 8 * chunk + 8 * n * row
    assert peaks["streaming", 32] < 4 * peaks["streaming", 16] < 16 * peaks["streaming", 8]


def test_auto_streams_on_the_cpu(monkeypatch):
    forest = Hierarchy.flat([5])
    x = rows(forest)
    expected = trilinear_attention(*x, forest)
    monkeypatch.setattr(dense, "MEMORY", 0)
    assert torch.equal(trilinear_attention(*x, forest, backend="streaming"), expected)
    with pytest.raises(Unsupported, match="streaming"):
        trilinear_attention(*x, forest, backend="dense")


def test_backends_have_one_signature():
    signatures = [inspect.signature(backend.run) for backend in TRILINEAR]
    assert signatures == signatures[:1] * len(TRILINEAR)


def test_checking_mode_names_the_leaf():
    forest = Hierarchy.flat([2, 3])
    x = rows(forest)
    x[1][3, 1, 0] = torch.nan
    with checking(), pytest.raises(NonFinite, match=r"k1: leaf 3 \(leaf 1 of tree 1\), head 1"):
        trilinear_attention(*x, forest)


FLAT = Hierarchy.flat([4, 3])


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"q": torch.zeros(6, HEADS, DIM)}, {}, "q: expected 7.*, got 6 rows"),
        ({"q": torch.zeros(7, DIM)}, {}, "q: expected .*, got shape"),
        ({"k1": torch.zeros(7, HEADS, DIM + 1)}, {}, "k1: expected a width of 3, as q has, got 4"),
        (
            {"k2": torch.zeros(7, HEADS + 1, DIM), "v2": torch.zeros(7, HEADS + 1, VALUE_DIM)},
            {},
            "k2: expected 2 heads, as q has, got 3",
        ),
        ({"v1": torch.zeros(7, HEADS - 1, VALUE_DIM)}, {}, "v1: expected 2 heads, as q has, got 1"),
        ({"v2": torch.zeros(7, HEADS, VALUE_DIM + 1)}, {}, "v2: expected a width of 5, as v1 has, got 6"),
        ({"k2": torch.zeros(7, HEADS, DIM).double()}, {}, "dtype"),
        (
            {"q": torch.zeros(7, HEADS, DIM).double()},
            {},
            "k1: expected dtype torch.float64, as q has, got torch.float32",
        ),
        ({}, {"tensor": torch.zeros(DIM + 1)}, r"tensor: expected .*, got shape \(4,\)"),
        ({}, {"tensor": torch.zeros(DIM, DIM)}, r"tensor: expected .*, got shape \(3, 3\)"),
        ({}, {"tensor": torch.zeros(HEADS + 1, DIM, DIM, DIM)}, "tensor: expected .*, got shape"),
        ({}, {"tensor": torch.zeros(DIM, dtype=torch.float64)}, "tensor: expected dtype .*, got torch.float64"),
        ({}, {"tensor": [1.0]}, "tensor: expected .*, got list"),
        (
            {},
            {"tensor": CP(*torch.zeros(3, 10, DIM))},
            "tensor: expected a rank of at most 9, which suffices for any 3 × 3 × 3 tensor, got a CP of rank 10",
        ),
        (
            {},
            {"tensor": CP(torch.zeros(2, DIM), torch.zeros(4, DIM), torch.zeros(2, DIM))},
            r"tensor\.b: expected .*, got shape",
        ),
        ({}, {"tensor": CP(*torch.zeros(3, 0, DIM))}, r"tensor\.a: expected .*, got shape \(0, 3\)"),
        ({}, {"tensor": CP(*torch.zeros(3, 2, DIM + 1))}, r"tensor\.a"),
        ({}, {"tensor": CP(*torch.zeros(3, DIM))}, r"tensor\.a"),
        ({}, {"tensor": CP(*torch.zeros(3, 2, DIM).double())}, r"tensor\.a: expected dtype .*, got torch.float64"),
        ({}, {"tensor": CP("a", "b", "c")}, r"tensor\.a: expected .*, got str"),
        ({}, {"window": 0}, "window: expected .*, got 0"),
        ({}, {"window": 2.5}, "window: expected .*, got 2.5"),
        (
            {},
            {"first": Hierarchy.flat([4, 3]), "causal": True},
            "first: expected None, the forest of the queries, got another forest.*Omit causal and window",
        ),
        ({}, {"second": Hierarchy.flat([4, 3]), "window": 2}, "second: expected None, .*, got another forest"),
        ({}, {"first": Hierarchy.flat([7])}, "first: expected 2, as the hierarchy of q has, got 1 trees"),
        ({}, {"second": Hierarchy.flat([4, 2, 1])}, "second: expected 2, as the hierarchy of q has, got 3 trees"),
        ({}, {"first": [4, 3]}, "first: expected .*, got list"),
        ({}, {"scale": float("nan")}, "scale"),
        ({}, {"backend": "cuda"}, "backend"),
    ],
)
def test_bad_input(change, options, message):
    x = dict(zip(("q", "k1", "k2", "v1", "v2"), rows(FLAT, dtype=torch.float32), strict=True)) | change
    with pytest.raises(InvalidInput, match=message):
        trilinear_attention(*x.values(), FLAT, **options)


def test_dense_refuses_too_much_memory():
    forest = Hierarchy.flat([1024])
    x = rows(forest, dtype=torch.float32)
    with pytest.raises(Unsupported, match=r"16\.0 GiB, more than 2: use backend='streaming'"):
        trilinear_attention(*x, forest, backend="dense")
    assert trilinear_attention(*x, forest, window=2).isfinite().all()


def test_kernels_refuse_a_full_tensor():
    with pytest.raises(HsaError, match="not a full tensor"):
        trilinear_attention(*rows(FLAT), FLAT, tensor=form("full")[0], backend="triton")


@given(sizes=lengths, options=limits)
@settings(max_examples=20)
def test_counts_equal_those_of_visible_pairs(sizes, options):
    forest = Hierarchy.flat(sizes)
    reach, causal = options.get("window", 100), options.get("causal", False)
    triples = pairs = 0
    for n in sizes:
        for i in range(n):
            seen = sum(abs(i - j) < reach and not (causal and j > i) for j in range(n))
            triples, pairs = triples + seen**2, pairs + seen
    count = flops_trilinear(forest, 26, 2, value_width=14, **options)
    assert count.total == count.attention == triples * (2 * 26 + 2 * 14 + 2) + pairs * (26 + 2 * 14)


def test_counts_of_different_sets():
    forests = [Hierarchy.flat(n) for n in ([3, 5], [7, 2], [1, 11])]
    count = flops_trilinear(forests[0], 6, 2, first=forests[1], second=forests[2])
    assert count.attention == (3 * 7 * 1 + 5 * 2 * 11) * (4 * 6 + 2) + (3 * 7 + 5 * 2) * 3 * 6
    with pytest.raises(InvalidInput, match="trees"):
        flops_trilinear(forests[0], 6, 2, first=FLAT.uncollate()[0])
    with pytest.raises(InvalidInput, match="width"):
        flops_trilinear(forests[0], 0, 2)


def test_sizes_of_these_tests_are_distinct():
    assert RANK <= DIM**2
    assert len({HEADS, DIM, VALUE_DIM, RANK}) == 4
