"""Match3: is there a pair of numbers that makes three with this one come to 0? A task for which pairs do not suffice.

The task is that of Sanford, Hsu and Telgarsky (2023, arXiv:2306.02896): of numbers x_1 … x_N modulo m, the answer at i is
yes where some j and k, equal or not, have x_i + x_j + x_k ≡ 0. They show that one layer of three-way attention can do it
with a width that does not grow with N, while for one layer of pairwise attention heads · width · bits must, almost linearly.
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
"""Training sequences for a quick look."""


def three_match(numbers: np.ndarray, modulus: int) -> np.ndarray:
    """Whether there are j and k with x_i + x_j + x_k ≡ 0, for every i.

    Args:
        numbers: `[sequences, length]`, each from 0 to modulus − 1.

    >>> three_match(np.array([[1, 5, 7], [1, 5, 11]]), 13).tolist()  # 1 + 5 + 7, and 1 + 1 + 11
    [[True, True, True], [True, False, True]]
    """
    sums = np.zeros((len(numbers), modulus), bool)  # of pairs
    rows = np.arange(len(numbers))[:, None]
    for k in range(numbers.shape[1]):
        sums[rows, (numbers + numbers[:, k, None]) % modulus] = True
    return np.take_along_axis(sums, -numbers % modulus, 1)


def two_match(numbers: np.ndarray, modulus: int) -> np.ndarray:
    """Whether two numbers suffice for a match: x_i + 2·x_j ≡ 0 or 2·x_i + x_j ≡ 0. What pairs can see.

    >>> two_match(np.array([[1, 5, 7], [1, 5, 11]]), 13).tolist()
    [[False, False, False], [True, False, True]]
    """
    x, y = numbers[:, :, None], numbers[:, None, :]
    return (((x + 2 * y) % modulus == 0) | ((2 * x + y) % modulus == 0)).any(2)


def match3_data(options: Match3Options, count: int, shortest: int, seed: tuple[int, int], name: str) -> DataSet:
    """Sequences of uniform random numbers with an answer per number, of lengths drawn from `shortest` to `options.length`.

    >>> data = match3_data(Match3Options(), 5, 3, (0, 0), "train")
    >>> data.lengths.tolist(), data.batch.values["number"].tolist()[:4], data.targets.tolist()[:4]
    ([4, 4, 6, 6, 8], [1, 3, 0, 7], [0, 0, 1, 0])
    """
    draw = np.random.default_rng(seed)
    lengths = np.sort(draw.integers(shortest, options.length, size=count, endpoint=True))  # training shuffles them
    numbers, answers, domain_ids = [], [], []
    for kind, (length, many) in enumerate(zip(*np.unique(lengths, return_counts=True), strict=True)):
        drawn = draw.integers(options.modulus, size=(many, length))
        numbers.append(drawn.ravel())
        answers.append(three_match(drawn, options.modulus).ravel())
        domain_ids.append(np.full(many, kind))
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
    """Three data sets of different seeds. Those to validate and to test have sequences of full length only.

    Args:
        data: None.

    Raises:
        InvalidInput: there are data, or all answers are the same.
    """
    if data is not None:
        raise InvalidInput(
            str(data),
            given="data for the task match3",
            expected="none: its numbers are generated",
            fix="leave DATA out",
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
                given=f"{options.modulus} for sequences of {options.length}, where all answers are {only}",
                expected="answers of both kinds",
                fix=f"a modulus of about 0.65 · length²: {max(5, round(0.65 * options.length**2))}",
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
    """Generate the numbers of a recipe; few if `small`."""
    options: Match3Options = recipe.group("match3")
    if small:
        options = replace(options, sequences=min(options.sequences, _FEW))
    return prepare_match3(recipe.data, options, seed=recipe.training.seed)


def rules(data: PreparedData, modulus: int) -> Mapping[str, float]:
    """Test accuracy of rules that know the task but do not look at three numbers."""
    train, test = data.train, data.test
    answers = test.targets.numpy().astype(bool)
    seen = train.batch.values[MODALITY].numpy(), test.batch.values[MODALITY].numpy()  # type: ignore[union-attr]
    full = np.repeat(train.lengths, train.lengths) == test.lengths[0]  # shorter sequences match less often
    yes, times = (np.bincount(seen[0][full], w, modulus) for w in (train.targets.numpy()[full], None))
    in_pairs = two_match(seen[1].reshape(len(test), -1), modulus).ravel()
    rules = {
        "always the more frequent answer": answers if answers.mean() >= 0.5 else ~answers,
        "by the number itself, its more frequent answer": (2 * yes > times)[seen[1]] == answers,
        "yes where two numbers suffice, x_i + 2·x_j or 2·x_i + x_j": in_pairs == answers,
    }
    return {name: float(correct.mean()) for name, correct in rules.items()}
