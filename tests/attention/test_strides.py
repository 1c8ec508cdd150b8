"""Operators give the same for tensors that are the same, however they lie in memory."""

import pytest
import torch

import hsa
from hsa import Entmax, Hierarchy
from hsa.attention.cache.multiscale import MultiscaleCache

HEADS, DIM = 3, 5
TREES = {"windows": Hierarchy.regular([20, 7], (4, 2)), "flat": Hierarchy.flat([20, 7])}
LAYOUTS = {
    "channels first": lambda x: x.permute(2, 1, 0).contiguous().permute(2, 1, 0),
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every other": lambda x: torch.stack([x, -x], -1).flatten(-2)[..., ::2],
    "expanded": lambda x: x[:, :1].expand_as(x),
}
OPERATORS = {
    "hierarchical": lambda q, k, v, tree: hsa.hierarchical_attention(q, k, v, tree),
    "hierarchical, without self": lambda q, k, v, tree: hsa.hierarchical_attention(q, k, v, tree, include_self=False),
    "hierarchical, entmax": lambda q, k, v, tree: hsa.hierarchical_attention(q, k, v, tree, normalizer=Entmax(1.5)),
    "multiscale": lambda q, k, v, tree: hsa.multiscale_attention(q, k, v, tree, near=1, top_k=1),
    "multiscale, causal": lambda q, k, v, tree: hsa.multiscale_attention(q, k, v, tree, top_k=1, causal=True),
    "multiscale, entmax": lambda q, k, v, tree: hsa.multiscale_attention(q, k, v, tree, near=1, normalizer=Entmax(1.5)),
    "clustered": lambda q, k, v, tree: hsa.multiscale_attention(
        q, k, v, tree, top_k=2, clusters=hsa.cluster_keys(k, tree)
    ),
    "energy": lambda q, k, v, tree: hsa.energy(q, k, tree) + 0 * v.sum((0, 2)),
}


def check_strides(operator, tree, layout, which, device, dtype):
    torch.manual_seed(0)
    options = {"dtype": dtype, "device": device, "requires_grad": True}
    leaves = [torch.randn(27, HEADS, DIM, **options) for _ in "qkv"]
    moved = [LAYOUTS[layout](x) if name in which else x for name, x in zip("qkv", leaves, strict=True)]
    plain = [x.contiguous() for x in moved]
    outs = [OPERATORS[operator](*parts, TREES[tree].to(device)) for parts in (moved, plain)]
    torch.testing.assert_close(*outs)
    weight = torch.randn_like(outs[0])
    for ours, wanted in zip(*(torch.autograd.grad(out, leaves, weight) for out in outs), strict=True):
        torch.testing.assert_close(ours, wanted)


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_strides_do_not_matter(operator, tree, layout, which):
    check_strides(operator, tree, layout, which, "cpu", torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("which", ["q", "k", "v", "qkv"])
def test_strides_do_not_matter_to_kernels(operator, tree, layout, which):
    check_strides(operator, tree, layout, which, "cuda", torch.float32)


def test_strides_of_a_cached_step():
    torch.manual_seed(0)
    outs = []
    keys = torch.randn(4, 2, HEADS, DIM)
    for layout in ("channels first", "heads first", None):
        cache = MultiscaleCache(1, 2, HEADS, DIM, branching=(4, 2))
        cache.begin([1, 1])
        change = LAYOUTS[layout] if layout else torch.Tensor.contiguous
        cache.fill(0, *(change(x) for x in keys[:2]))
        cache.append()
        outs.append(cache.attend(0, *(change(x) for x in keys[1:])))
    torch.testing.assert_close(outs[0], outs[2])
    torch.testing.assert_close(outs[1], outs[2])
