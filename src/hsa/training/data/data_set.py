"""Data sets: examples in one large batch, each with a target, saved in one file."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hsa.errors import InvalidInput
from hsa.files import load_tensors, parse_json, save_tensors
from hsa.signals import Leaf, Signal
from hsa.signals.batch import Batch, collate
from hsa.signals.domains import Domain, Graph, Grid, Sequence, Set, Table
from hsa.tree.hierarchy import Hierarchy, Structure

CHUNK = 1024
"""Number of signals collated at a time: signals take far more memory than the arrays they become."""


@dataclass(frozen=True, eq=False)
class Example:
    """A signal with its target (a class name, a number, or one class name per leaf) and its origin."""

    signal: Signal | Leaf
    target: str | float | tuple[str, ...]
    where: str


@dataclass(frozen=True, eq=False)
class DataSet:
    """Examples with their targets.

    Attributes:
        batch: Batch with one tree per example.
        targets: Class indices or numbers to predict, `[examples]`; class indices `[leaves]` for the task "tokens".
        classes: Names of the classes; empty for regression.
        names: Origin of each example.
        per_leaf: Whether there is a target per leaf.
    """

    batch: Batch
    targets: Tensor
    classes: tuple[str, ...]
    names: tuple[str, ...]
    per_leaf: bool = False

    def __len__(self) -> int:
        return self.batch.hierarchy.num_trees

    @property
    def lengths(self) -> np.ndarray:
        """Number of leaves per example."""
        return np.diff(self.batch.hierarchy.structure.leaf_offsets)

    @cached_property
    def digest(self) -> str:
        """Hash of everything a model is trained on: trees, values, targets, names of classes."""
        fingerprint = hashlib.blake2b(self.batch.hierarchy.digest.encode(), digest_size=16)
        fingerprint.update(json.dumps([self.classes, list(self.batch.values)]).encode())
        for part in (self.targets, *self.batch.values.values()):
            if isinstance(part, Tensor):
                fingerprint.update(
                    part.cpu().reshape(-1).view(torch.uint8).numpy().data
                )  # as bytes: numpy has no bfloat16
            else:
                fingerprint.update(repr(part).encode())
        return fingerprint.hexdigest()

    def select(self, examples: Any) -> DataSet:
        """Return the examples with these indices, in this order."""
        batch = self.batch.select(examples)  # checks the indices
        indices = np.asarray(examples, np.int64).reshape(-1)
        targets = self.targets[torch.from_numpy(indices)] if not self.per_leaf else self._leaf_targets(indices)
        names = tuple(self.names[i] for i in indices.tolist())
        return replace(self, batch=batch, targets=targets, names=names)

    def _leaf_targets(self, indices: np.ndarray) -> Tensor:
        offsets = self.batch.hierarchy.structure.leaf_offsets
        return torch.cat([self.targets[:0], *(self.targets[offsets[i] : offsets[i + 1]] for i in indices.tolist())])

    def save(self, path: Path) -> None:
        """Save to one safetensors file. An existing file stays intact until the new one is complete."""
        batch, s = self.batch, self.batch.hierarchy.structure
        tensors = {"num_children": torch.from_numpy(s.num_children), "domain_ids": torch.from_numpy(batch.domain_ids)}
        tensors["targets"] = self.targets
        for name, values in batch.values.items():
            if not isinstance(values, Tensor):
                raise InvalidInput(
                    f"values[{name!r}]", got="leaves of several kinds, or strings", expected="one tensor per modality"
                )
            tensors[f"values/{name}"] = values
            if len(values) < batch.hierarchy.num_leaves:
                tensors[f"leaves/{name}"] = batch.leaves[name]
        header = {
            "classes": self.classes,
            "names": self.names,
            "per_leaf": self.per_leaf,
            "modalities": list(batch.values),
            "domains": [_describe(domain) for domain in batch.distinct_domains],
            "wide": [name for name, tensor in tensors.items() if tensor.dtype == torch.int64],
        }
        small = {name: _smallest(tensor) for name, tensor in tensors.items()}
        save_tensors(path, small, {"hsa": json.dumps(header)})

    @staticmethod
    def load(path: Path) -> DataSet:
        """Load a data set that `save` wrote."""
        tensors, metadata = load_tensors(path, "a data set")
        if "hsa" not in metadata or "num_children" not in tensors:
            raise InvalidInput(str(path), got="a safetensors file with other content", expected="a data set of hsa")
        header = parse_json(metadata["hsa"], str(path))
        for name in header["wide"]:
            tensors[name] = tensors[name].to(torch.int64)
        hierarchy = Hierarchy(Structure.from_num_children(tensors["num_children"].numpy()))
        every = torch.arange(hierarchy.num_leaves)
        batch = Batch(
            values={name: tensors[f"values/{name}"] for name in header["modalities"]},
            leaves={name: tensors.get(f"leaves/{name}", every) for name in header["modalities"]},
            hierarchy=hierarchy,
            distinct_domains=tuple(_domain(*description) for description in header["domains"]),
            domain_ids=tensors["domain_ids"].numpy(),
        )
        return DataSet(batch, tensors["targets"], tuple(header["classes"]), tuple(header["names"]), header["per_leaf"])


def build(
    examples: Iterable[Example],
    task: Literal["classification", "regression", "tokens"],
    classes: tuple[str, ...] | None = None,
) -> DataSet:
    """Build a data set, collating a chunk of examples at a time.

    Args:
        examples: Examples.
        task: Task, which determines the kind of targets.
        classes: Known classes, in order; by default those that occur, sorted.

    Raises:
        InvalidInput: There are no examples, or one has an unknown class or the wrong number of labels.
    """
    batches: list[Batch] = []
    targets: list[Any] = []
    names: list[str] = []
    stream = iter(examples)
    while chunk := list(islice(stream, CHUNK)):
        batches.append(collate([example.signal for example in chunk]))
        targets.extend(example.target for example in chunk)
        names.extend(example.where for example in chunk)
    if not batches:
        raise InvalidInput("data", problem="empty", expected="at least one example")
    batch = Batch.join(batches)
    if task == "regression":
        return DataSet(batch, torch.tensor(targets, dtype=torch.float32), (), tuple(names))
    per_leaf = task == "tokens"
    for name, labels, leaves in zip(names, targets, batch.hierarchy.lengths, strict=True):
        if per_leaf and len(labels) != leaves:
            raise InvalidInput(name, got=len(labels), expected=f"{leaves} labels, one per leaf")
    flat: list[Any] = [label for labels in targets for label in labels] if per_leaf else targets
    known = tuple(sorted(set(flat))) if classes is None else classes
    index = {name: i for i, name in enumerate(known)}
    for i, target in enumerate(targets):
        for label in target if per_leaf else (target,):
            if label not in index:
                raise InvalidInput(names[i], got=f"the class {label!r}", expected=f"one of {_listed(known)}")
    return DataSet(batch, torch.tensor([index[label] for label in flat]), known, tuple(names), per_leaf)


def _listed(names: tuple[str, ...], most: int = 10) -> str:
    return ", ".join(names[:most]) + (f", … {len(names) - most} more" if len(names) > most else "")


def batches_by_tokens(lengths: np.ndarray, budget: int, most: int, order: np.ndarray) -> list[np.ndarray]:
    """Split examples in this order into batches of at most `budget` leaves and `most` examples.

    An example longer than the budget is a batch of its own.

    >>> [b.tolist() for b in batches_by_tokens(np.array([3, 3, 3, 9, 1]), 6, 2, np.arange(5))]
    [[0, 1], [2], [3], [4]]
    """
    cuts, held, count = [0], 0, 0
    for index, length in enumerate(lengths[order].tolist()):
        if count and (held + length > budget or count == most):
            cuts.append(index)
            held = count = 0
        held += length
        count += 1
    cuts.append(len(order))
    return [order[begin:end] for begin, end in pairwise(cuts) if begin < end]


def split_at_random(data: DataSet, shares: tuple[float, ...], seed: int) -> Iterator[DataSet]:
    """Yield shuffled parts with these shares of every class (of all examples for regression), to within one example."""
    generator = np.random.default_rng(seed)
    by_class = data.targets.numpy() if data.classes and not data.per_leaf else np.zeros(len(data), np.int64)
    parts: list[list[np.ndarray]] = [[] for _ in shares]
    labels = np.unique(by_class)
    for i, label in enumerate(labels):
        members = generator.permutation(np.flatnonzero(by_class == label))
        # Some classes are rounded up and some down, so that no part is empty if all classes are small.
        bounds = np.floor(np.cumsum(shares)[:-1] * len(members) + (i + 0.5) / len(labels)).astype(int)
        for part, some in zip(parts, np.split(members, bounds), strict=True):
            part.append(some)
    for part in parts:
        yield data.select(generator.permutation(np.concatenate(part)))


def _smallest(tensor: Tensor) -> Tensor:
    """Convert integers to the smallest type that holds them, which shrinks ids and counts to a quarter."""
    if tensor.dtype != torch.int64 or tensor.numel() == 0:
        return tensor
    low, high = (int(bound) for bound in tensor.aminmax())
    for dtype in (torch.uint8, torch.int16, torch.uint16, torch.int32):
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return tensor.to(dtype)
    return tensor


_DOMAINS: dict[str, Any] = {domain.__name__: domain for domain in (Sequence, Grid, Graph, Set, Table)}


def _describe(domain: Domain) -> tuple[str, list[Any]]:
    arguments = {
        Sequence: lambda d: [d.length],
        Grid: lambda d: [d.shape],
        Graph: lambda d: [d.num_nodes, d.edges],
        Set: lambda d: [d.size],
        Table: lambda d: [d.keys],
    }[type(domain)](domain)
    return type(domain).__name__, arguments


def _domain(name: str, arguments: list[Any]) -> Domain:
    return _DOMAINS[name](*arguments)
