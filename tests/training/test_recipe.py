from dataclasses import fields
from pathlib import Path

import pytest

from hsa.errors import InvalidInput
from hsa.models.options import ModelOptions
from hsa.training.options import DataOptions, TrainingOptions
from hsa.training.recipe import Recipe, load_recipe, overridden

CONVERSIONS = (Path(__file__).parents[2] / "recipes").glob("convert_*.yaml")  # tests/fidelity/test_sweep.py reads those
RECIPES = sorted(set((Path(__file__).parents[2] / "recipes").glob("*.yaml")) - set(CONVERSIONS))


@pytest.fixture
def load(tmp_path):
    def write_and_load(text):
        data = text if isinstance(text, bytes) else text.encode()
        (tmp_path / "recipe.yaml").write_bytes(data)
        return load_recipe(tmp_path / "recipe.yaml")

    return write_and_load


def test_options_of_every_kind(load, tmp_path):
    result = load(
        """
        data: reviews.csv
        models: [hierarchical, flat]
        text: [title, body]
        number: stars
        label: label
        test: held_out/test.csv
        word_vectors: glove.txt
        skip_bad: true
        width: 32
        head_dim: 7
        dropout: 0
        windows: [4, 8]
        include_self: true
        pooling: max
        learning_rate: 3e-4
        warmup: 0.1
        mixed_precision: bf16
        """
    )
    assert result == Recipe(
        tmp_path / "reviews.csv",
        ("hierarchical", "flat"),
        DataOptions(
            text=("title", "body"),
            number=("stars",),
            label="label",
            test=tmp_path / "held_out" / "test.csv",
            word_vectors=tmp_path / "glove.txt",
            skip_bad=True,
        ),
        ModelOptions(width=32, head_dim=7, dropout=0.0, windows=(4, 8), include_self=True, pooling="max"),
        TrainingOptions(learning_rate=3e-4, warmup=0.1, mixed_precision="bf16"),
    )
    assert isinstance(result.model.dropout, float)


def test_missing_options_have_their_defaults(load):
    assert load("epochs: 3") == Recipe(training=TrainingOptions(epochs=3))
    assert load("data: null\nhead_dim: null") == Recipe()


def test_values_that_yaml_reads_as_another_type(load):
    result = load("mixed_precision: no\nlabel: 2024\ntext: [1, 2]\nmodels: hierarchical")
    assert (result.training.mixed_precision, result.read.label, result.read.text) == ("no", "2024", ("1", "2"))
    assert result.models == ("hierarchical",)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_of_the_project_are_valid(path):
    assert load_recipe(path).models


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epocs: 3", "{path}: unknown option 'epocs'; expected one of data, models, batch_size, "),
        ("epocs: 3", ", word_vectors. Did you mean 'epochs'?"),
        ("7: 3\nzzzz: 1", "unknown option '7'"),
        ("a: [1", "YAML (while parsing a flow sequence in "),
        ("- a\n- b", "{path}: expected names and values of options, got a list"),
        ("", "{path}: "),
        (b"\xff\xfe\x00", "YAML ("),
        ("epochs: many", "{path}: epochs: expected a value of type int, got 'many'"),
        ("epochs: 2.5", "{path}: epochs: expected a value of type int, got 2.5"),
        ("epochs: true", "{path}: epochs: expected a value of type int, got True"),
        ("epochs: null", "{path}: epochs: expected a value of type int, got None"),
        ("epochs: 0", "{path}: epochs: expected more than 0, got 0"),
        ("warmup: 1", "{path}: warmup: expected a share: 0 or more and less than 1, got 1.0"),
        ("learning_rate: fast", "{path}: learning_rate: expected a value of type float, got 'fast'"),
        ("learning_rate: [1]", "{path}: learning_rate: expected a value of type float, got [1]"),
        ("learning_rate: .nan", "{path}: learning_rate: expected more than 0, got nan"),
        ("schedule: steep", "{path}: schedule: expected one of linear, cosine, constant, got 'steep'"),
        ("pooling: sum", "{path}: pooling: expected one of mean, max, attention, first, last, got 'sum'"),
        ("skip_bad: 1", "{path}: skip_bad: expected a value of type bool, got 1"),
        ("windows: [4, x]", "{path}: windows: expected a value of type int, got 'x'"),
        ("label: [a]", "{path}: label: expected a value of type str, got ['a']"),
        ("text: [{a: 1}]", "{path}: text: expected a value of type str, got {{'a': 1}}"),
    ],
)
def test_invalid_recipes(load, tmp_path, text, message):
    with pytest.raises(InvalidInput) as caught:
        load(text)
    text = str(caught.value)
    assert message.format(path=tmp_path / "recipe.yaml") in text
    assert "\n" not in text


def test_a_missing_recipe(tmp_path):
    with pytest.raises(InvalidInput, match=r"a\.yaml: .*a recipe"):
        load_recipe(tmp_path / "a.yaml")


def test_named_options_override_even_with_their_defaults(load):
    recipe = load("data: a.csv\nmodels: [flat]\nepochs: 20\nwidth: 32\nlabel: a\ntext: t")
    changes = Recipe(
        Path("recipe.yaml"), ("hierarchical",), DataOptions(label="b"), ModelOptions(width=64), TrainingOptions()
    )
    assert overridden(recipe, changes, ()) == recipe
    result = overridden(recipe, changes, {"epochs", "label", "resume"})
    assert (result.training.epochs, result.read.label) == (TrainingOptions().epochs, "b")
    assert (result.models, result.model.width, result.data, result.read.text) == (("flat",), 32, recipe.data, ("t",))
    assert overridden(recipe, changes, {"models", "width"}).models == ("hierarchical",)


def test_option_names_are_unique():
    names = [f.name for kind in (DataOptions, ModelOptions, TrainingOptions) for f in fields(kind)]
    assert len(names) == len(set(names))
