"""Keys that clustered attention must list with other estimates of a group's share: `python -m benchmarks.estimates QKV.pt`.

The file holds queries, keys and values of some layers of a real model, written with the option `--save-qkv` of
`python -m benchmarks.tiled_quality`. Each estimate selects groups with several thresholds, as `hsa.clustered_attention`
does; groups that are not open are pooled one by one. The table has the listed keys per tile at which the output is off by
10, 7, 5 and 3% (root mean square over layers and heads), interpolated between thresholds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import hsa
from benchmarks.measure import write_table

TOKENS, CHUNK, TILE = 4096, 256, 64
ERRORS = (0.10, 0.07, 0.05, 0.03)
THRESHOLDS = tuple(1 / n for n in (8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512))
LARGEST = 448.0
"""Largest 8-bit number."""


@dataclass
class Head:
    """Queries of the second half of a text, and clustered keys and values, of one head.

    Attributes:
        q: `[queries, dim]`, scaled.
        k, v: `[tokens, dim]` in their own order.
        groups, values: `[groups, keys, dim]` keys and values of each group.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    groups: Tensor
    values: Tensor

    @cached_property
    def size(self) -> int:
        return self.groups.shape[1]

    @cached_property
    def rows(self) -> Tensor:
        return torch.arange(TOKENS - len(self.q), TOKENS)

    @cached_property
    def visible(self) -> Tensor:
        """Whether each query sees each group through its tree, `[queries, groups]`."""
        return torch.arange(len(self.groups)) * self.size // CHUNK < (self.rows // CHUNK)[:, None]

    @cached_property
    def pooled(self) -> Tensor:
        """Logits of pooled groups."""
        return self.q @ self.groups.mean(1).T + math.log(self.size)

    @cached_property
    def logits(self) -> Tensor:
        """Logits of all keys, `[queries, groups, keys]`."""
        return (self.q @ self.groups.flatten(0, 1).T).unflatten(1, self.groups.shape[:2])

    @cached_property
    def exact(self) -> Tensor:
        """Log-sum-exp of the keys of each group."""
        return self.logits.logsumexp(-1)

    @cached_property
    def own(self) -> Tensor:
        """Logits of the query's own chunk, −∞ for other keys."""
        key, row = torch.arange(TOKENS), self.rows[:, None]
        return (self.q @ self.k.T).masked_fill((key > row) | (key < row // CHUNK * CHUNK), -math.inf)

    @cached_property
    def output(self) -> Tensor:
        """Output of exact attention."""
        later = torch.arange(TOKENS) > self.rows[:, None]
        return (self.q @ self.k.T).masked_fill(later, -math.inf).softmax(1) @ self.v

    def normalizer(self, far: Tensor) -> Tensor:
        """Return the log-sum-exp of the own chunk and of parts of the other chunks, `[queries, parts]`."""
        visible = self.visible[:, :: self.visible.shape[1] // far.shape[1]]
        return torch.logaddexp(self.own.logsumexp(1), far.masked_fill(~visible, -math.inf).logsumexp(1))

    @cached_property
    def nodes(self) -> Tensor:
        """Logits of pooled nodes of 64 keys."""
        return self.q @ self.groups.reshape(-1, 64, self.q.shape[1]).mean(1).T + math.log(64)

    @cached_property
    def directions(self) -> Tensor:
        """Principal directions of each group times the standard deviations along them, `[groups, directions, dim]`."""
        centred = self.groups - self.groups.mean(1, keepdim=True)
        _, deviations, directions = torch.linalg.svd(centred, full_matrices=False)
        return directions * deviations[..., None] / math.sqrt(self.size)

    def spreads(self, number: int = 1) -> Tensor:
        """Return |q · directions| for the first directions, `[directions, queries, groups]`."""
        return torch.stack([(self.q @ self.directions[:, i].T).abs() for i in range(number)])

    def centres(self) -> tuple[Tensor, Tensor]:
        """Return two centres of each group `[groups, 2, dim]`, and which keys belong to the first: 2-means of the keys."""
        centred = self.groups - self.groups.mean(1, keepdim=True)
        first = (centred * self.directions[:, :1]).sum(-1) > 0
        for _ in range(4):
            weights = torch.stack([first, ~first], 1).float()
            means = weights @ self.groups / weights.sum(2, keepdim=True).clamp(min=1)
            first = torch.cdist(self.groups, means).argmin(2) == 0
        return means, first


def _nodes(head: Head) -> Tensor:
    return head.nodes


def _mean_and_spread(head: Head) -> Tensor:
    return head.pooled + head.spreads()[0]


def _in_half(head: Head, weights: Callable[[Tensor], Tensor], eight_bits: bool = False) -> Tensor:
    """Estimate in half of the channels, relative to the mean of the chunk.

    Args:
        head: Queries and keys.
        weights: Weight of each channel for the keys of the first chunk; the pairs with the largest sums are taken.
        eight_bits: Whether to round queries, means and spreads.
    """
    dim = head.q.shape[1]
    pairs = weights(head.k[:CHUNK]).view(2, -1).sum(0).topk(dim // 4).indices
    channels = torch.cat([pairs, pairs + dim // 2])
    chunks = head.k.view(-1, CHUNK, dim).mean(1).repeat_interleave(CHUNK // head.size, 0)  # of each group
    parts = head.q * math.sqrt(dim), (head.groups.mean(1) - chunks) / 4, head.directions[:, 0] / 4
    q, mean, spread = (x[:, channels] for x in parts)
    if eight_bits:
        q, mean, spread = (x.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn).float() for x in (q, mean, spread))
    relative = (q @ mean.T + (q @ spread.T).abs()) * (4 / math.sqrt(dim))
    return head.q @ chunks.T + relative + math.log(head.size)


def _length(k: Tensor) -> Tensor:
    return k.norm(dim=0)


def _deviation(k: Tensor) -> Tensor:
    return (k - k.mean(0)).norm(dim=0)


def _long_and_varying(k: Tensor) -> Tensor:
    return _length(k) * _deviation(k)


def _halves(head: Head) -> Tensor:
    order = (head.groups * head.directions[:, :1]).sum(-1).argsort(1)[..., None].expand_as(head.groups)
    means = head.groups.gather(1, order).unflatten(1, (2, -1)).mean(2)
    return (head.q @ means.flatten(0, 1).T).unflatten(1, (-1, 2)).amax(2) + math.log(head.size / 2)


def _two_centres(head: Head, spread: bool = False) -> Tensor:
    means, first = head.centres()
    counts = torch.stack([first.sum(1), (~first).sum(1)], 1).clamp(min=1)
    masses = (head.q @ means.flatten(0, 1).T).unflatten(1, (-1, 2)) + counts.float().log()
    if spread:  # of the keys of the larger part
        larger = counts.argmax(1)
        members = (first == (larger == 0)[:, None]).float()
        centred = (head.groups - means[torch.arange(len(means)), larger][:, None]) * members[..., None]
        _, deviations, directions = torch.linalg.svd(centred, full_matrices=False)
        scaled = directions[:, 0] * deviations[:, :1] / members.sum(1, keepdim=True).sqrt()
        masses = masses + torch.nn.functional.one_hot(larger, 2) * (head.q @ scaled.T).abs()[..., None]
    return masses.amax(2)


def _with_values(head: Head) -> Tensor:
    """Weigh a group by the standard deviation of its values: pooling loses nothing where they are equal."""
    deviation = (head.values - head.values.mean(1, keepdim=True)).square().sum((1, 2)).sqrt()
    return _mean_and_spread(head) + (deviation / deviation.mean()).log()


def _both_sides(head: Head) -> Tensor:
    """Return the log-sum-exp of a group whose keys lie at its mean plus and minus its spread."""
    spread = head.spreads()[0]
    return head.pooled + torch.logaddexp(spread, -spread) - math.log(2)


Estimate = Callable[[Head], Tensor]
# Name, products per group, keys per group, parts of the normaliser, and estimate.
ESTIMATES: tuple[tuple[str, int, int, Estimate, Estimate], ...] = (
    ("mean and spread", 2, 8, _nodes, _mean_and_spread),
    (
        "in half of the channels, with long and varying keys (`hsa.clustered_attention`)",
        *(1, 8, _nodes, lambda head: _in_half(head, _long_and_varying)),
    ),
    ("the same in 8 bits (its kernels)", 1, 8, _nodes, lambda head: _in_half(head, _long_and_varying, eight_bits=True)),
    ("in half of the channels, with long keys", 1, 8, _nodes, lambda head: _in_half(head, _length)),
    ("in half of the channels, with varying keys", 1, 8, _nodes, lambda head: _in_half(head, _deviation)),
    ("mean", 1, 8, _nodes, lambda head: head.pooled),
    ("mean and two spreads", 3, 8, _nodes, lambda head: head.pooled + head.spreads(2).square().sum(0).sqrt()),
    ("means of two halves", 2, 8, _nodes, _halves),
    ("two centres", 2, 8, _nodes, _two_centres),
    ("two centres and a spread", 3, 8, _nodes, lambda head: _two_centres(head, spread=True)),
    ("mean and spread, groups of 4", 2, 4, _nodes, _mean_and_spread),
    ("mean and spread, weighed by the spread of values", 2, 8, _nodes, _with_values),
    ("mean and spread, normaliser from groups", 2, 8, lambda head: head.pooled, _mean_and_spread),
    ("mean and spread, normaliser from groups with spreads", 2, 8, _both_sides, _mean_and_spread),
    ("exact", 8, 8, _nodes, lambda head: head.exact),
    ("exact, with the exact normaliser", 8, 8, lambda head: head.exact, lambda head: head.exact),
)


def heads_of(layer: dict[str, Tensor], size: int) -> Iterator[Head]:
    """Yield the first query head of every key/value head, with keys in groups of this size."""
    q, k, v = (layer[name][:TOKENS].float() for name in "qkv")
    keys = hsa.cluster(k, v, [TOKENS], branching=(size, 64 // size, 4))
    share = q.shape[1] // k.shape[1]
    for i in range(k.shape[1]):
        tables = (x[i, :, :CHUNK].flatten(0, 1).unflatten(0, (-1, size)) for x in (keys.k, keys.v))
        yield Head(q[TOKENS // 2 :, i * share] / math.sqrt(q.shape[2]), k[:, i], v[:, i], *tables)


def measure(head: Head, estimate: Tensor, normalizer: Tensor) -> Iterator[tuple[float, float]]:
    """Yield the listed keys per tile and the relative error of the output, for all thresholds."""
    share, hidden = estimate - normalizer[:, None], torch.tensor(-math.inf)
    for threshold in THRESHOLDS:
        wanted = (share >= math.log(threshold)) & head.visible
        wanted[:, 0] = head.visible[:, 0]
        opened = wanted.unflatten(0, (-1, TILE)).int().cummax(1).values.bool()
        listed = float(opened[:, -1].sum(-1).float().mean()) * head.size
        is_open = opened.flatten(0, 1)
        keys = torch.where(is_open[..., None], head.logits, hidden).flatten(1)
        pooled = torch.where(head.visible & ~is_open, head.pooled, hidden)
        weights = torch.cat([head.own, keys, pooled], 1).softmax(1)
        out = weights @ torch.cat([head.v, head.values.flatten(0, 1), head.values.mean(1)])
        yield listed, float((out - head.output).norm() / head.output.norm())


def keys_at(wanted: float, keys: np.ndarray, errors: np.ndarray) -> str:
    """Return the number of keys with an error, between measured ones, which fall as the number grows."""
    if not errors.min() <= wanted <= errors.max():
        return f"more than {keys[-1]:,.0f}" if wanted < errors.min() else f"fewer than {keys[0]:,.0f}"
    return f"{np.exp(np.interp(-np.log(wanted), -np.log(errors), np.log(keys))):,.0f}"


@torch.inference_mode()
def main(file: Path, name: str) -> None:
    layers, rows = torch.load(file), []
    for title, products, size, parts, estimate in ESTIMATES:
        results = [
            list(measure(head, estimate(head), head.normalizer(parts(head))))
            for layer in layers.values()
            for head in heads_of(layer, size)
        ]
        listed, errors = np.moveaxis(np.array(results), 2, 0)
        keys, error = listed.mean(0), np.sqrt((errors**2).mean(0))
        rows.append([title, products * 8 // size, *(keys_at(e, keys, error) for e in ERRORS)])
        print(*rows[-1], sep=" · ", flush=True)
    header = ("estimate", "products per 8 keys", *(f"keys at {e:.0%}" for e in ERRORS))
    notes = (
        f"Causal, {TOKENS:,} tokens, queries of the second half, the first query head of every key/value head of layers "
        f"{', '.join(map(str, layers))}; tiles of {TILE} queries, chunks of {CHUNK} keys."
    )
    command = "python -m benchmarks.estimates QKV.pt" + ("" if name == "estimates" else f" --name {name}")
    write_table(name, "Listed keys per tile by estimate and error", [("", header, rows)], notes, command=command)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--name", default="estimates", help="name of the table")
    options = parser.parse_args()
    main(options.file, options.name)
