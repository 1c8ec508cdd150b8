"""Match3: for each number, is there a pair that brings the sum of the three to 0? A task that needs triples.

The task is that of Sanford, Hsu and Telgarsky (2023, arXiv:2306.02896): for numbers x_1 … x_N modulo m, the answer at i is
yes if x_i + x_j + x_k ≡ 0 for some j and k, equal or not. They show that one layer of three-way attention solves it with a
width independent of N, while in one layer of pairwise attention heads · width · bits must grow almost linearly with N.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from hsa.errors import InvalidInput
from hsa.nn.embedding import Modality
from hsa.research.match3.options import Match3Options
from hsa.signals.batch import Batch
from hsa.signals.domains import Set
from hsa.training.data.data_set import DataSet
from hsa.training.data.prepare import InputSpec, PreparedData
from hsa.training.data.sources import Columns
from hsa.training.recipe import Recipe
from hsa.tree.hierarchy import Hierarchy

CLASSES = ("no", "yes")
MODALITY = "number"
_FEW = 2_000
"""Number of training sequences of a small run."""


def three_match(numbers: np.ndarray, modulus: int) -> np.ndarray:
    """Return, for every i, whether x_i + x_j + x_k ≡ 0 for some j and k, `[sequences, length]`.

    Args:
        numbers: `[sequences, length]` Numbers from 0 to modulus − 1.
        modulus: Modulus of the sums.

    >>> three_match(np.array([[1, 5, 7], [1, 5, 11]]), 13).tolist()  # 1 + 5 + 7, and 1 + 1 + 11
    [[True, True, True], [True, False, True]]
    """
    sums = np.zeros((len(numbers), modulus), bool)  # of pairs
    rows = np.arange(len(numbers))[:, None]
    for k in range(numbers.shape[1]):
        sums[rows, (numbers + numbers[:, k, None]) % modulus] = True
    return np.take_along_axis(sums, -numbers % modulus, 1)


def two_match(numbers: np.ndarray, modulus: int) -> np.ndarray:
    """Return whether two numbers suffice for a match: x_i + 2·x_j ≡ 0 or 2·x_i + x_j ≡ 0. Pairwise attention can see these.

    >>> two_match(np.array([[1, 5, 7], [1, 5, 11]]), 13).tolist()
    [[False, False, False], [True, False, True]]
    """
    x, y = numbers[:, :, None], numbers[:, None, :]
    return (((x + 2 * y) % modulus == 0) | ((2 * x + y) % modulus == 0)).any(2)


def match3_data(options: Match3Options, count: int, shortest: int, seed: tuple[int, int], name: str) -> DataSet:
    """Generate sequences of uniform random numbers with an answer per number, of lengths `shortest` to `options.length`.

    >>> data = match3_data(Match3Options(), 5, 3, (0, 0), "train")
    >>> data.lengths.tolist(), data.batch.values["number"].tolist()[:4], data.targets.tolist()[:4]
    ([4, 4, 6, 6, 8], [1, 3, 0, 7], [0, 0, 1, 0])
    """
    draw = np.random.default_rng(seed)
    lengths = np.sort(draw.integers(shortest, options.length, size=count, endpoint=True))  # training shuffles them
    numbers, answers, domain_ids = [], [], []
    for kind, (length, repeats) in enumerate(zip(*np.unique(lengths, return_counts=True), strict=True)):
        drawn = draw.integers(options.modulus, size=(repeats, length))
        numbers.append(drawn.ravel())
        answers.append(three_match(drawn, options.modulus).ravel())
        domain_ids.append(np.full(repeats, kind))
    values = torch.from_numpy(np.concatenate(numbers))
    batch = Batch(
        values={MODALITY: values},
        leaves={MODALITY: torch.arange(len(values))},
        hierarchy=Hierarchy.flat(lengths.tolist()),
        distinct_domains=tuple(Set(int(length)) for length in np.unique(lengths)),
        domain_ids=np.concatenate(domain_ids),
    )
    targets = torch.from_numpy(np.concatenate(answers)).long()
    return DataSet(batch, targets, CLASSES, tuple(f"{name} {i}" for i in range(count)), per_leaf=True)


def prepare_match3(data: Path | None, options: Match3Options, *, seed: int = 0) -> PreparedData:
    """Generate data for training, validation and test. The latter two have only sequences of full length.

    Args:
        data: Must be None, because the numbers are generated.
        options: Sizes of the data.
        seed: Seed of the numbers.

    Raises:
        InvalidInput: If `data` is not None, or all answers are the same.
    """
    if data is not None:
        raise InvalidInput(
            str(data),
            problem="the task match3 generates its own numbers",
            expected="no data",
            fix="Omit DATA",
        )
    held = max(1, options.sequences // 10)
    train = match3_data(options, options.sequences, options.shortest, (seed, 0), "train")
    validation = match3_data(options, held, options.length, (seed, 1), "validation")
    test = match3_data(options, held, options.length, (seed, 2), "test")
    for part in (train, validation, test):
        if len(part.targets.unique()) < 2:
            only = CLASSES[int(part.targets[0])]
            raise InvalidInput(
                "modulus",
                got=f"{options.modulus}, with which all answers are {only} for sequences of {options.length}",
                expected="a number that leads to both answers",
                fix=f"Use about 0.65 · length², here {max(5, round(0.65 * options.length**2))}",
            )
    return PreparedData(
        train,
        validation,
        test,
        input_spec=InputSpec("generated", Columns(), max_tokens=0, max_family=0),
        modalities={MODALITY: Modality(tokens=options.modulus)},
        kinds=(),
        keys=(),
        task="tokens",
        name=f"Match3: {options.length} numbers modulo {options.modulus}",
    )


def prepare_recipe(recipe: Recipe, small: bool, say: Callable[[str], None]) -> PreparedData:
    """Generate the data of a recipe, with few training sequences if `small`."""
    options: Match3Options = recipe.group("match3")
    if small:
        options = replace(options, sequences=min(options.sequences, _FEW))
    return prepare_match3(recipe.data, options, seed=recipe.training.seed)


def rules(data: PreparedData, modulus: int) -> Mapping[str, float]:
    """Return the test accuracy of simple rules that never combine three numbers."""
    train, test = data.train, data.test
    answers = test.targets.numpy().astype(bool)
    seen = train.batch.values[MODALITY].numpy(), test.batch.values[MODALITY].numpy()  # type: ignore[union-attr]
    full = np.repeat(train.lengths, train.lengths) == test.lengths[0]  # shorter sequences match less often
    yes, times = (np.bincount(seen[0][full], w, modulus) for w in (train.targets.numpy()[full], None))
    in_pairs = two_match(seen[1].reshape(len(test), -1), modulus).ravel()
    rules = {
        "always the more frequent answer": answers if answers.mean() >= 0.5 else ~answers,
        "the more frequent answer for this number": (2 * yes > times)[seen[1]] == answers,
        "yes if two numbers suffice (x_i + 2·x_j ≡ 0 or 2·x_i + x_j ≡ 0)": in_pairs == answers,
    }
    return {name: float(correct.mean()) for name, correct in rules.items()}
