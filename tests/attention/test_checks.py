"""The checking mode, shapes in type annotations, torch.compile, and devices."""

import copy
import pickle

import pytest
import torch
from beartype import beartype
from jaxtyping import jaxtyped

import hsa
from hsa import Entmax, Hierarchy, HsaError, checking, hierarchical_attention, multiscale_attention, select
from tests.forests import random_inputs


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_checking_names_the_first_leaf_that_is_not_finite(name, value):
    forest = Hierarchy.from_nested([[3, 2], [4]])
    inputs = dict(zip("qkv", random_inputs(forest, 0, kv_heads=6), strict=True))
    inputs[name][6, 4, 1] = value
    inputs[name][8, 0, 0] = value
    hierarchical_attention(**inputs, hierarchy=forest)  # values are not checked outside
    for operator in (hierarchical_attention, multiscale_attention):
        with pytest.raises(HsaError, match=rf"{name}: leaf 6 \(leaf 1 of tree 1\), head 4 is {value}\."), checking():
            operator(**inputs, hierarchy=forest)
    hierarchical_attention(**inputs, hierarchy=forest)


def test_checking_passes_finite_values():
    forest = Hierarchy.flat([3])
    with checking():
        assert hierarchical_attention(*random_inputs(forest, 0), forest).isfinite().all()


@pytest.mark.parametrize("operator", [hierarchical_attention, multiscale_attention])
def test_shapes_in_type_annotations_are_correct(operator):
    forest = Hierarchy.from_nested([[3, 2], [4]])
    checked = jaxtyped(typechecker=beartype)(operator)
    q, k, v = random_inputs(forest, 0)
    torch.testing.assert_close(checked(q, k, v, forest), operator(q, k, v, forest))


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor that is not a leaf"
)  # from Dynamo, at a graph break
@pytest.mark.parametrize("operator", [hierarchical_attention, multiscale_attention])
def test_torch_compile(operator):
    """The graph breaks where a plan is built, and around multiscale attention; values and gradients stay the same."""
    forest = Hierarchy.from_nested([[3, [2, 4]], [5]], sinks=(0,))
    q, k, v = random_inputs(forest, 0, kv_heads=6, requires_grad=True)
    plain = operator(q, k, v, forest)
    (expected,) = torch.autograd.grad(plain.square().sum(), q)
    torch._dynamo.reset()
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(lambda q, k, v: operator(q, k, v, forest), backend=backend)
    out = compiled(q, k, v)
    torch.testing.assert_close(out, plain)
    (grad,) = torch.autograd.grad(out.square().sum(), q)
    torch.testing.assert_close(grad, expected)
    assert bool(graphs) == (operator is hierarchical_attention)


def test_hierarchical_attention_compiles_without_a_graph_break():
    forest = Hierarchy.from_nested([[3, [2, 4]], [5]], sinks=(0,))
    q, k, v = random_inputs(forest, 0, kv_heads=6)
    plain = hierarchical_attention(q, k, v, forest)  # builds the plan
    torch._dynamo.reset()
    compiled = torch.compile(lambda *x: hierarchical_attention(*x, forest), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(q, k, v), plain)


@pytest.mark.filterwarnings("ignore")  # the compiler reads .grad of tensors that have none
@pytest.mark.parametrize(
    "operator", [hierarchical_attention, pytest.param(multiscale_attention, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("alpha", [1.5, torch.tensor([[1.9, 1.4, 2.0], [1.6, 2.0, 1.2]])])
def test_torch_compile_with_entmax(operator, alpha):
    forest = Hierarchy.from_nested([[[3, 5], [2, 2, 4], [7], [1, 6]]])
    q, k, v = random_inputs(forest, 1, heads=3, kv_heads=3)

    def attend(q, k, v):
        return operator(q, k, v, forest, normalizer=Entmax(alpha))

    compiled = torch.compile(attend, backend="eager")
    for needs_grad in (False, True):
        inputs = [x.clone().requires_grad_(needs_grad) for x in (q, k, v)]
        torch.testing.assert_close(compiled(*inputs), attend(*inputs), rtol=0, atol=1e-12)
    gradients = [torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (compiled, attend)]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_no_grad_and_inference_mode():
    forest = Hierarchy.regular([30], (4, 2))
    q, k, v = random_inputs(forest, 0, requires_grad=True)
    selection = select(q, k, forest, top_k=1)
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            for run in (
                lambda: hierarchical_attention(q, k, v, forest),
                lambda: multiscale_attention(q, k, v, forest, selection=selection),
            ):
                out = run()
                assert not out.requires_grad
                assert out.isfinite().all()
    assert hierarchical_attention(q, k, v, forest).requires_grad


def test_plans_are_built_once():
    forest = Hierarchy.regular([30], (4, 2))
    q, k, v = random_inputs(forest, 0)
    hierarchical_attention(q, k, v, forest)
    before = dict(forest._cache)
    hierarchical_attention(q, k, v, forest)
    assert forest._cache.keys() == before.keys()
    assert all(forest._cache[key] is before[key] for key in before)


def test_a_hierarchy_can_be_copied_and_pickled():
    forest = Hierarchy.regular([30], (4, 2))
    hierarchical_attention(*random_inputs(forest, 0), forest)
    for twin in (copy.deepcopy(forest), pickle.loads(pickle.dumps(forest))):
        assert twin == forest
        assert twin.num_nodes == forest.num_nodes


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_equals_cpu(dtype):
    forest = Hierarchy.collate([Hierarchy.regular([300], (8, 4)), Hierarchy.from_nested([[7, [2, 11]]], sinks=(0,))])
    q, k, v = random_inputs(forest, 0, dim=16, value_dim=16, dtype=dtype)
    there = forest.to("cuda")

    def over_clusters(q, k, v, f):
        clusters = hsa.cluster_keys(k, f)  # may differ between devices, which has no effect if all groups are exact
        selection = select(q, k, f, top_k=100, clusters=clusters)
        return multiscale_attention(q, k, v, f, clusters=clusters, selection=selection)

    for run in (
        hierarchical_attention,
        lambda q, k, v, f: multiscale_attention(q, k, v, f, selection=select(q, k, f, near=1, top_k=2)),
        over_clusters,
    ):
        on_gpu = run(*(x.cuda() for x in (q, k, v)), there).cpu().double()
        on_cpu = run(q, k, v, forest).double()
        assert (on_gpu - on_cpu).abs().max() < (0.05 if dtype == torch.bfloat16 else 1e-4) * on_cpu.abs().max()
