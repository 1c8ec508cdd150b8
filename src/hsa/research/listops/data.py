"""Data sets of generated expressions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING

from hsa.errors import InvalidInput, MissingExtra
from hsa.models.registry import required_tokenizer
from hsa.nn.embedding import Modality
from hsa.research.listops.generator import VOCABULARY, WORDS, expressions
from hsa.training.data.data_set import DataSet, Example, build
from hsa.training.data.prepare import InputSpec, PreparedData
from hsa.training.data.sources import Columns
from hsa.training.options import DataOptions
from hsa.training.recipe import Recipe

if TYPE_CHECKING:
    from tokenizers import Tokenizer

COUNTS = {"train": 8_000, "validation": 500, "test": 2_000}
"""Number of expressions. A small run has a quarter of those for training and testing."""
SIZES = {"shortest": 20, "longest": 100, "operands": 5, "depth": 5}
"""Sizes of the expressions, with which a CPU learns in a minute; those of the Long Range Arena are 20 times as long."""


def prepare_recipe(recipe: Recipe, small: bool, say: Callable[[str], None]) -> PreparedData:
    """Generate the data of a recipe, with fewer expressions if `small`."""
    _check_options(recipe.read)
    if required_tokenizer(recipe.models, recipe.extra, say) is not None:
        raise InvalidInput(
            "models",
            got=f"{', '.join(recipe.models)}, one of them with a pre-trained tokenizer",
            expected="models that are trained from scratch, because expressions have tokens of their own",
            fix="Pass your own DATA or --example python",
        )
    say("generating expressions")
    seed = 3 * recipe.training.seed
    shares = {name: count // 4 if small and name != "validation" else count for name, count in COUNTS.items()}
    train, validation, test = (listops_data(count, seed + i, name) for i, (name, count) in enumerate(shares.items()))
    return PreparedData(
        train,
        validation,
        test,
        input_spec=InputSpec("generated", Columns(), max_tokens=0, max_family=0, tokenizer=tokenizer()),
        modalities={"text": Modality(tokens=VOCABULARY)},
        kinds=("sequence",),
        keys=(),
        task="classification",
        name="ListOps: values of nested expressions",
    )


def listops_data(count: int, seed: int, name: str) -> DataSet:
    """Generate expressions with their values as classes.

    >>> data = listops_data(3, 0, "test")
    >>> len(data), data.classes[:3], data.names[0]
    (3, ('0', '1', '2'), 'test 0')
    """
    generated = enumerate(expressions(count, seed, **SIZES))
    examples = (Example(expression.signal(), str(expression.value), f"{name} {i}") for i, expression in generated)
    return build(examples, "classification", tuple(WORDS[:10]))


def tokenizer() -> Tokenizer:
    """Return a tokenizer of written expressions, one token per word."""
    try:
        from tokenizers import Tokenizer, models, pre_tokenizers
    except ImportError:
        raise MissingExtra("tokenizers", "text", "the tokens of expressions") from None
    result = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=WORDS[-1]))
    result.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return result


def _check_options(read: DataOptions) -> None:
    """Raise an error for options of data that generated expressions do not have."""
    usual = DataOptions(example=read.example)
    for field in fields(DataOptions):
        if (value := getattr(read, field.name)) != getattr(usual, field.name):
            shown = ", ".join(map(str, value)) if isinstance(value, tuple) else value
            raise InvalidInput(
                field.name,
                got=f"{shown} with --example listops",
                expected="no such option, because the expressions are generated",
                fix="Omit it, or pass DATA or --example python",
            )
