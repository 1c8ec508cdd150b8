"""Random ragged batches for clustered attention, and a dense oracle."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from hsa import ClusteredKeys, TileSelection, cluster, clustered_attention, select_groups

HEADS, KV_HEADS, DIM, VALUE_DIM = 4, 2, 3, 5
WIDE = 64  # groups are scored in half of the channels
seeds = st.integers(0, 10**6)
BRANCHINGS = [(2, 2, 2), (2, 4, 2), (4, 2, 1), (2, 2, 1), (2, 1, 2), (4, 1, 2)]


def rows_of(
    lengths, seed: int, *, queries=None, heads: tuple[int, int] = (HEADS, KV_HEADS), dim=DIM, dtype=torch.float64
) -> list[Tensor]:
    """Return random q, k and v. Queries are long, so that thresholds open some groups only."""
    generator = torch.Generator().manual_seed(seed)
    keys = sum(lengths)
    shapes = [(keys if queries is None else sum(queries), heads[0], dim), (keys, heads[1], dim)]
    shapes.append((keys, heads[1], VALUE_DIM))
    q, k, v = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes)
    return [x.to(dtype) for x in (3 * q, k, v)]


@dataclass
class Batch:
    """Inputs of one call.

    Attributes:
        lengths, queries: Number of keys and of queries of every sequence.
        causal, branching, tile: Arguments of the same name.
        rule: Arguments that say which groups are opened.
        windows, exact_until: Arguments of the same name.
    """

    q: Tensor = field(repr=False)
    k: Tensor = field(repr=False)
    v: Tensor = field(repr=False)
    lengths: list[int]
    queries: list[int]
    causal: bool
    branching: tuple[int, int, int]
    tile: int
    rule: dict[str, Any] = field(default_factory=dict)
    windows: bool = False
    exact_until: int = 0

    @property
    def chunk(self) -> int:
        return self.branching[0] * self.branching[1] * self.branching[2]

    def chunks(self, position: int) -> int:
        """Return the number of chunks that a query sees as trees: at a position, or of all keys without causality."""
        return position // self.chunk if position // self.chunk * self.chunk >= self.exact_until else 0

    @property
    def scale(self) -> float:
        return self.rule.get("scale") or self.q.shape[2] ** -0.5

    def attend(self, **options: Any) -> Any:
        sizes = {"branching": self.branching, "tile": self.tile, "windows": self.windows}
        sizes["exact_until"] = self.exact_until
        rule = {"scale": self.rule.get("scale")} if "selection" in options else self.rule
        options = {"query_lengths": self.queries, "causal": self.causal, **sizes, **rule, **options}
        return clustered_attention(self.q, self.k, self.v, self.lengths, **options)

    def cluster(self) -> ClusteredKeys:
        return cluster(self.k, self.v, self.lengths, windows=self.windows, branching=self.branching)

    def select(self, keys: ClusteredKeys, **options: Any) -> TileSelection:
        sizes = {"query_lengths": self.queries, "tile": self.tile, "exact_until": self.exact_until}
        options = {"causal": self.causal, **sizes, **self.rule, **options}
        return select_groups(self.q, self.k, keys, self.lengths, **options)

    def sequences(self) -> list[tuple[slice, slice]]:
        """Return the rows of q and of k of every sequence."""
        result, row, key = [], 0, 0
        for queries, keys in zip(self.queries, self.lengths, strict=True):
            result.append((slice(row, row + queries), slice(key, key + keys)))
            row, key = row + queries, key + keys
        return result


def random_batch(seed: int, *, own_queries: bool = False, longest: int = 26) -> Batch:
    """Return a batch with at least two complete chunks in one sequence.

    Other sequences have one token, less than a chunk, complete chunks alone, or any length.

    Args:
        own_queries: Whether queries are all tokens, instead of the last ones (causal) or others.
        longest: Maximum number of keys of a sequence.
    """
    random = Random(seed)
    branching, causal = random.choice(BRANCHINGS), random.random() < 0.6
    chunk = branching[0] * branching[1] * branching[2]
    lengths = [random.randint(2 * chunk, max(longest, 2 * chunk))]
    for _ in range(random.randrange(3)):
        complete = chunk * random.randint(1, max(1, longest // chunk))
        lengths.append(random.choice([1, random.randint(1, chunk - 1), complete, random.randint(1, longest)]))
    random.shuffle(lengths)
    tile = random.choice([t for t in (1, 2, 4, 8) if not causal or t <= chunk])
    queries = list(lengths)
    if not own_queries and random.random() < 0.5:
        # In causal attention, whole tiles come before the first query; there may be no query at all.
        queries = [random.choice([0, *range(n, 0, -tile)]) if causal else random.randint(0, 9) for n in lengths]
    per_head = tuple(random.choice([1.0, 0.3, 0.05]) for _ in range(HEADS))
    threshold = random.choice([1, 0.5, 0.2, 0.1, 0.03, per_head])
    rule = random.choice([{"threshold": threshold}, {"top_k": random.randrange(4)}])
    rule |= {"spread": random.choice([0.0, 1, 0.4]), "share_lists": random.random() < 0.5}
    dim = random.choice([DIM, WIDE])
    rule |= {"scale": random.choice([None, 0.9 * dim**-0.5])}
    q, k, v = rows_of(lengths, seed, queries=queries, dim=dim)
    windows, exact_until = random.random() < 0.3, random.choice([0, 0, chunk + 1, 2 * chunk])
    return Batch(q, k, v, lengths, queries, causal, branching, tile, rule, windows, exact_until)


def batches(**options: Any) -> st.SearchStrategy[Batch]:
    """Draw a batch by its seed: Hypothesis itself would draw mostly sequences without a complete chunk."""
    return st.integers(0, 2**32 - 1).map(lambda seed: random_batch(seed, **options))


def dense(batch: Batch, keys: ClusteredKeys, selection: TileSelection, pooled_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output and the log-sum-exp of softmax over single keys, where those of a pooled node get their mean logit.

    This is the same as clustered attention: log |B| stands for the keys of the node, and values are averaged in any case.
    """
    outputs, sums, tile = [], [], 0
    for sequence, (rows, columns) in enumerate(batch.sequences()):
        q, k, v = batch.q[rows] * batch.scale, batch.k[columns], batch.v[columns]
        before = len(k) - len(q) if batch.causal else 0  # position of the first query that is left
        while len(q):
            chunks = batch.chunks(before if batch.causal else len(k))
            size = min(batch.tile - before % batch.tile, len(q))
            for row in range(size):
                end = before + row + 1 if batch.causal else len(k)
                for head in range(HEADS):
                    kv_head = head // (HEADS // KV_HEADS)
                    opened = selection.tile(tile)[0, head // (HEADS // selection.lists)] <= row
                    logits = k[:end, kv_head] @ q[row, head]
                    for chunk in range(chunks):
                        order = order_of(keys, sequence, chunk, kv_head)
                        for nodes in pooled(opened.view(chunks, -1)[chunk].tolist(), batch.branching):
                            logits[order[nodes]] = logits[order[nodes]].mean() + pooled_bias[head]
                    outputs.append(logits.softmax(0) @ v[:end, kv_head])
                    sums.append(logits.logsumexp(0))
            q, before, tile = q[size:], before + size, tile + 1
    if not outputs:
        return batch.q.new_empty(0, HEADS, VALUE_DIM), batch.q.new_empty(0, HEADS)
    return torch.stack(outputs).unflatten(0, (-1, HEADS)), torch.stack(sums).unflatten(0, (-1, HEADS))


def order_of(keys: ClusteredKeys, sequence: int, chunk: int, kv_head: int) -> Tensor:
    """Return the keys of a chunk, as numbers in their sequence, in the order of the groups."""
    size = keys.shape.chunk
    number = sum(keys.chunks[:sequence]) + chunk
    order = torch.arange(size) if keys.order is None else keys.order[kv_head, number].long()
    return chunk * size + order


def pooled(opened: list[bool], branching: tuple[int, int, int]) -> list[slice]:
    """Return the largest nodes of a chunk without an open group, as slices of its keys in the order of the groups."""
    group, node = branching[0], branching[0] * branching[1]
    if not any(opened):
        return [slice(0, len(opened) * group)]
    result = []
    for begin in range(0, len(opened) * group, node):
        inside = opened[begin // group : (begin + node) // group]
        if any(inside):
            first = [begin + i * group for i, is_open in enumerate(inside) if not is_open]
            result += [slice(i, i + group) for i in first]
        else:
            result.append(slice(begin, begin + node))
    return result
