"""Costs of models by document length: attention operations and the time of a forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import torch

from hsa.analysis.cost_plots import Cost
from hsa.analysis.timing import median_seconds
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier
from hsa.models.saved import load_model
from hsa.nn.attention import counting_operations
from hsa.signals import Leaf, Signal
from hsa.signals import Sequence as Row
from hsa.signals.batch import Batch, collate, uncollate
from hsa.signals.windows import in_windows
from hsa.training.data.prepare import PreparedData
from hsa.training.failures import OutOfMemory, catch_oom

LENGTHS = (256, 512, 1024, 2048, 4096, 8192, 16_384)
LONGEST_PASS = 1.0
"""Seconds of a forward pass; a model that takes longer is not measured at greater lengths."""
_REPEATS = 5
_AT_ONCE = 64  # documents read from the data set at a time


def length_costs(
    folders: Mapping[str, Path],
    prepared: PreparedData,
    accelerator: Any,
    *,
    lengths: Sequence[int] = LENGTHS,
    longest_pass: float = LONGEST_PASS,
    watch: Callable[[str, int], None] | None = None,
) -> list[Cost]:
    """Measure every model on one document of each length, where the data suffice for it.

    Args:
        folders: Folders of saved models, by name.
        prepared: Data that the documents are made of.
        accelerator: Result of `make_accelerator`.
        lengths: Numbers of leaves, ascending.
        longest_pass: Seconds of a forward pass; a model that takes longer is not measured at greater lengths.
        watch: Callback that receives the model and the length to be measured next.
    """
    longest = _row_of_parts(prepared, max(lengths, default=1))
    documents = {length: document for length in lengths if (document := _cut(longest, length, prepared)) is not None}
    costs = []
    for name, folder in folders.items():
        model, _ = load_model(folder, accelerator.device)
        for length, document in documents.items():
            if watch is not None:
                watch(name, length)
            try:
                cost = _cost(name, model, document, prepared, accelerator)
            except OutOfMemory:
                break
            costs.append(cost)
            if cost.seconds is not None and cost.seconds > longest_pass:
                break
    return costs


@catch_oom
@torch.no_grad()
def _cost(name: str, model: Classifier, document: Batch, prepared: PreparedData, accelerator: Any) -> Cost:
    batch = document.to(accelerator.device)
    if prepared.input_spec.transform is not None:
        batch = prepared.input_spec.transform(batch)

    def run() -> None:
        with accelerator.autocast():
            model(batch)

    with counting_operations() as counts:
        run()  # also builds and caches everything that depends on the tree only
    run()
    seconds = median_seconds(run, _REPEATS, most=2.0, device=accelerator.device)
    return Cost(name, batch.hierarchy.num_leaves, sum(count.attention for count in counts), seconds)


def document_of(prepared: PreparedData, length: int) -> Batch | None:
    """Return a batch with one document of the given length, concatenated from the training data.

    Documents that are sequences of parts, such as paragraphs, contribute their parts; other documents are parts themselves.
    The result is cut to the length, and its families obey `max_family`. If the data have no sequences (so that models
    could not embed one), a single example is cut; the result is None if no example is long enough.

    Args:
        prepared: Data.
        length: Number of leaves.

    Raises:
        InvalidInput: The length is not above 0.
    """
    if length < 1:
        raise InvalidInput("length", got=length, expected="1 or more")
    return _cut(_row_of_parts(prepared, length), length, prepared)


def _row_of_parts(prepared: PreparedData, length: int) -> Signal | Leaf:
    """Concatenate documents up to the given number of leaves; return the longest one if the data have no sequences."""
    data = prepared.train
    if "sequence" not in prepared.kinds:
        (only,) = uncollate(data.batch.select([int(data.lengths.argmax())]))
        return only
    parts: list[Signal | Leaf] = []
    leaves = 0
    for first in cycle(range(0, len(data), _AT_ONCE)):
        for signal in uncollate(data.batch.select(range(first, min(first + _AT_ONCE, len(data))))):
            own = _parts(signal)
            parts += own
            leaves += sum(map(_size, own))
            if leaves >= length:
                return Signal(Row(len(parts)), parts)
    raise AssertionError("unreachable: the cycle never ends")


def _size(signal: Signal | Leaf) -> int:
    return signal.num_leaves if isinstance(signal, Signal) else 1


def _parts(signal: Signal | Leaf) -> tuple[Signal | Leaf, ...]:
    if isinstance(signal, Leaf) or not isinstance(signal.domain, Row) or signal.values is not None:
        return (signal,)
    members = tuple(signal.members)
    return (signal,) if any(isinstance(member, Leaf) for member in members) else members


def _cut(signal: Signal | Leaf, length: int, prepared: PreparedData) -> Batch | None:
    """Return a batch of the first leaves; None if there are fewer, or if a grid cannot be cut there."""
    if _size(signal) < length:
        return None
    cut = signal.first(length) if isinstance(signal, Signal) and signal.num_leaves > length else signal
    if cut is None:
        return None
    most = prepared.input_spec.max_family
    return collate([in_windows(cut, most) if most else cut])
