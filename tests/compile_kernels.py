"""Compile the kernels for a GPU without having one: `python tests/compile_kernels.py CAPABILITY few|all`.

The operators run on CPU tensors with a driver that only knows the GPU's name: every launch is compiled for that GPU, but not
executed. Results are not used.
"""

import os
import sys
from contextlib import nullcontext
from types import SimpleNamespace

if __name__ == "__main__":
    os.environ.pop("TRITON_INTERPRET", None)  # read when kernels are defined, below

import torch
from triton.backends.compiler import GPUTarget
from triton.compiler.compiler import CompiledKernel
from triton.runtime.driver import driver

# Modules of kernels are imported here, before `prepare` turns the interpreter on.
from hsa import (
    Entmax,
    Hierarchy,
    Queries,
    cluster_keys,
    clustered_attention,
    hierarchical_attention,
    multiscale_attention,
    select,
)
from hsa.attention.cache.clustered import ClusteredCache
from hsa.attention.cache.multiscale import MultiscaleCache
from hsa.attention.cache.triton import clustered_step, multiscale_step  # noqa: F401
from hsa.attention.clustered.triton import gradient
from hsa.attention.clustered.triton import operator as clustered_kernels  # noqa: F401
from hsa.attention.clustered.why_not import MOST_BYTES
from hsa.attention.hierarchical.triton import operator as hierarchical_kernels  # noqa: F401
from hsa.attention.kernels import available
from hsa.attention.kernels.levels import levels
from hsa.attention.multiscale.triton import cluster, pyramid, ranking
from hsa.attention.multiscale.triton import operator as multiscale_kernels  # noqa: F401
from hsa.attention.multiscale.triton.search import search_families
from hsa.nn.triton import head_norm
from hsa.research.trilinear.operator import trilinear_attention
from hsa.research.trilinear.triton import operator as trilinear_kernels  # noqa: F401

SMALLEST_SHARED_MEMORY = 99 * 2**10  # per block on Ampere and Ada cards
LEARNED = Entmax(torch.tensor([[1.3], [1.7]]), least=1.3)
PER_HEAD = (1 / 256, 1 / 128, 1 / 64, 1 / 32)
compiled = set()


def note(kernel):
    compiled.add((kernel.name, kernel.hash))
    assert kernel.metadata.shared <= SMALLEST_SHARED_MEMORY, (kernel.name, kernel.metadata.shared)
    return lambda *arguments: None


def prepare(capability):
    target = GPUTarget("cuda", capability, 32)
    driver.set_active(
        SimpleNamespace(
            get_current_target=lambda: target, get_current_device=lambda: 0, get_current_stream=lambda device: 0
        )
    )
    CompiledKernel._init_handles = lambda kernel: None
    CompiledKernel.run = property(note)
    torch.cuda.current_device = lambda: 0
    available.capability = lambda device: divmod(capability, 10)
    available.device_of = lambda x: nullcontext()
    gradient.HostCounts.read = lambda counts: torch.zeros_like(counts.counts).numpy()  # kernels have not written them
    os.environ["TRITON_INTERPRET"] = "1"  # at this point it only allows backend="triton" for CPU tensors


def inputs(tree, dtype):
    return [torch.randn(tree.num_leaves, 4, 64, dtype=dtype, requires_grad=True) for _ in range(3)]


def compile_hierarchical(tree, dtype, normalizer="softmax"):
    hierarchical_attention(*inputs(tree, dtype), tree, normalizer=normalizer, backend="triton").sum().backward()


def compile_multiscale(tree, dtype, causal):
    q, k, v = inputs(tree, dtype)
    clusters = None if causal else cluster_keys(k, tree, backend="torch")
    cluster.cluster_keys(k.detach(), tree)
    groups = None if causal else Queries.windows(tree, 16)
    shared = {"clusters": clusters, "causal": causal}
    selection = select(q, k, tree, queries=groups, top_k=4, beam=8, backend="torch", **shared)
    multiscale_attention(q, k, v, tree, selection=selection, backend="triton", **shared).sum().backward()
    order = None if causal else clusters.order
    queries, keys = selection.queries, pyramid.pyramid(k.detach(), levels(tree), order)
    low = torch.zeros(queries.num_groups, dtype=torch.long)
    where = (q.detach(), keys, ranking.search_tables(tree), queries.offsets, queries.tree)
    settings = {"limit": selection.limit, "scale": 0.1, "top_k": 4, "most_queries": queries.largest_group}
    search_families(*where, low, low + 1, width=8, **settings)
    search_families(*where, None, None, width=None, **settings)


def compile_clustered(dtype, dim, **rule):
    q, k, v = (torch.randn(600, heads, dim, dtype=dtype, requires_grad=True) for heads in (4, 2, 2))
    with torch.no_grad():
        clustered_attention(q, k, v, backend="triton", **rule)
    if 2 * dim * dtype.itemsize <= MOST_BYTES:
        clustered_attention(q, k, v, backend="triton", **rule).sum().backward()


def compile_decoding(dtype, dim, **rule):
    trees = MultiscaleCache(1, 2, 2, dim, sinks=1, dtype=dtype, backend="triton")
    clusters = ClusteredCache(1, 2, 2, dim, dtype=dtype, backend="triton", **rule)
    for cache in (trees, clusters):
        cache.append()
        cache.attend(0, *(torch.randn(2, heads, dim, dtype=dtype) for heads in (4, 2, 2)))
    clusters.extend([3, 3])
    clusters.attend_prompts(0, *(torch.randn(6, heads, dim, dtype=dtype) for heads in (4, 2, 2)))


def compile_trilinear(dtype, dim, causal):
    tensors = [torch.randn(512, 4, dim, dtype=dtype, requires_grad=True) for _ in range(5)]
    trilinear_attention(*tensors, Hierarchy.flat([512]), causal=causal, backend="triton").sum().backward()


def compile_head_norm(dtype, dim):
    x, weight, bias = (torch.randn(*shape, requires_grad=True) for shape in ((512, 4, dim), (dim,), (dim,)))
    head_norm.head_norm(x.to(dtype), weight, bias, 1e-5).sum().backward()


if __name__ == "__main__":
    prepare(int(sys.argv[1]))
    regular = Hierarchy.regular([512], (16, 4))
    compile_hierarchical(regular, torch.bfloat16)
    compile_hierarchical(regular, torch.bfloat16, LEARNED)
    for dim in (16, 64):
        compile_clustered(torch.bfloat16, dim, causal=True)
        compile_decoding(torch.bfloat16, dim)
    compile_clustered(torch.bfloat16, 64, causal=True, threshold=PER_HEAD)
    compile_decoding(torch.bfloat16, 64, threshold=PER_HEAD)
    compile_trilinear(torch.bfloat16, 64, causal=False)
    compile_head_norm(torch.bfloat16, 32)
    if sys.argv[2] == "all":
        for dtype in (torch.bfloat16, torch.float32):
            compile_hierarchical(regular, dtype)
            for dim in (64, 128):
                compile_clustered(dtype, dim, causal=True, top_k=8)
                compile_clustered(dtype, dim, windows=True)
                compile_decoding(dtype, dim)
                compile_head_norm(dtype, dim)
            compile_clustered(torch.bfloat16, 256)
            compile_decoding(dtype, 256)
            mixed = Hierarchy.from_nested([[5, 20, 40], [3, 3]])
            for normalizer in ("softmax", Entmax(1.5), Entmax(2.0), LEARNED):
                compile_hierarchical(mixed, dtype, normalizer)
            compile_hierarchical(regular, dtype, Entmax(2.0, counts="logits"))
            for causal in (False, True):
                compile_multiscale(Hierarchy.regular([512], (8, 2), repeat_last=True), dtype, causal)
                for dim in (32, 64, 128):
                    compile_trilinear(dtype, dim, causal)
    print(len(compiled))
