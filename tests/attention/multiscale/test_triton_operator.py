"""Backend "triton" through the public functions: clusters, selection, attention, refusals, CUDA graphs."""

import pytest

pytest.importorskip("triton")

import torch

from hsa import Hierarchy, Queries, cluster_keys, hierarchical_attention, multiscale_attention, select
from hsa.errors import Unsupported
from tests.interpreter import DEVICE, quick_interpreter  # noqa: F401


def inputs(leaves=60, heads=2, dim=16, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(leaves, heads, dim, generator=generator).to(DEVICE, dtype).requires_grad_() for _ in range(3)]


def binary(leaves=60):
    return Hierarchy.regular([leaves], (4, 2), repeat_last=True).to(DEVICE)


@pytest.mark.parametrize("way", ["clusters", "causal"])
def test_clusters_selection_and_gradients(way):
    tree, (q, k, v) = binary(), inputs()
    shared = {"causal": True} if way == "causal" else {"clusters": cluster_keys(k, tree, backend="triton")}
    groups = None if way == "causal" else Queries.windows(tree, 8)
    options = {"queries": groups, "top_k": 2, "beam": 4, **shared}
    selection = select(q, k, tree, backend="triton", **options)
    by_torch = select(q, k, tree, backend="torch", **options)
    assert torch.equal(selection.families.sort(-1).values, by_torch.families.sort(-1).values)
    assert selection.scored == by_torch.scored
    results = []
    for backend, dtype in (("triton", torch.float32), ("torch", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = multiscale_attention(*leaves, tree, selection=selection, backend=backend, **shared)
        results.append((out, *torch.autograd.grad(out.sin().sum(), leaves)))
    for ours, expected in zip(*results, strict=True):
        torch.testing.assert_close(ours.double(), expected, atol=2e-5, rtol=2e-5)


def test_compiles_without_graph_breaks():
    tree, (q, k, v) = binary(40), inputs(40, heads=1)
    selection = select(q, k, tree, near=1, top_k=2)

    def attend(q, k, v):
        return multiscale_attention(q * 2, k, v, tree, selection=selection, backend="triton").sin()

    expected = attend(q, k, v)
    out = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    torch.testing.assert_close(out, expected)
    ours, theirs = (torch.autograd.grad(x.sum(), (q, k, v)) for x in (out, expected))
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"positions": True}, "does not take positions"), ({"dropout_p": 0.5}, "no dropout")],
)
def test_refusals(options, reason):
    tree, (q, k, v) = binary(20), inputs(20, heads=1)
    if "positions" in options:
        options["positions"] = torch.randn(tree.num_nodes, 3, device=DEVICE)
    with pytest.raises(Unsupported, match=reason):
        multiscale_attention(q, k, v, tree, backend="triton", **options)
    assert multiscale_attention(q, k, v, tree, **options).shape == v.shape  # "auto" chooses another backend


def test_deterministic_gradients_are_left_to_another_backend():
    tree, (q, k, v) = binary(20), inputs(20, heads=1)
    torch.use_deterministic_algorithms(True)
    try:
        with pytest.raises(Unsupported, match="in no fixed order"):
            multiscale_attention(q, k, v, tree, backend="triton")
        with torch.no_grad():
            assert multiscale_attention(q, k, v, tree, backend="triton").shape == v.shape
    finally:
        torch.use_deterministic_algorithms(False)


def test_wide_beams_are_refused():
    tree, (q, k, _) = binary(20), inputs(20, heads=1)
    with pytest.raises(Unsupported, match="reads 200 rows at once"):
        select(q, k, tree, top_k=1, beam=200, backend="triton")


@pytest.mark.gpu
def test_all_steps_can_be_captured_in_a_cuda_graph():
    tree, (q, k, v) = binary(300), [x.detach() for x in inputs(300)]

    def attend():
        order = cluster_keys(k, tree)
        selection = select(q, k, tree, queries=Queries.windows(tree, 16), top_k=2, beam=4, clusters=order)
        return multiscale_attention(q, k, v, tree, selection=selection, clusters=order) + hierarchical_attention(
            q, k, v, tree
        )

    expected = attend()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = attend()
    graph.replay()
    torch.testing.assert_close(out, expected)
