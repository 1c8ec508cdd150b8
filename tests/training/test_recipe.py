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


def test_what_is_not_said_is_the_default(load):
    assert load("epochs: 3") == Recipe(training=TrainingOptions(epochs=3))
    assert load("data: null\nhead_dim: null") == Recipe()


def test_what_yaml_takes_for_something_else(load):
    result = load("mixed_precision: no\nlabel: 2024\ntext: [1, 2]\nmodels: hierarchical")
    assert (result.training.mixed_precision, result.read.label, result.read.text) == ("no", "2024", ("1", "2"))
    assert result.models == ("hierarchical",)


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_the_recipes_that_come_along_can_be_read(path):
    assert load_recipe(path).models


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epocs: 3", "{path}: given the unknown option 'epocs', expected data, models, batch_size, "),
        ("epocs: 3", "did you mean 'epochs'?"),
        ("7: 3\nzzzz: 1", "{path}: given the unknown option '7', expected data"),
        ("a: [1", "{path}: given no YAML (while parsing a flow sequence in "),
        ("- a\n- b", "{path}: given a list, expected names and values of options"),
        ("", "{path}: given a NoneType, expected names and values of options"),
        (b"\xff\xfe\x00", "{path}: given no YAML ("),
        ("epochs: many", "{path}: epochs: given 'many', expected a value of type int"),
        ("epochs: 2.5", "{path}: epochs: given 2.5, expected a value of type int"),
        ("epochs: true", "{path}: epochs: given True, expected a value of type int"),
        ("epochs: null", "{path}: epochs: given None, expected a value of type int"),
        ("epochs: 0", "{path}: epochs: given 0, expected more than 0"),
        ("warmup: 1", "{path}: warmup: given 1.0, expected a share: 0 or more and less than 1"),
        ("learning_rate: fast", "{path}: learning_rate: given 'fast', expected a value of type float"),
        ("learning_rate: [1]", "{path}: learning_rate: given [1], expected a value of type float"),
        ("learning_rate: .nan", "{path}: learning_rate: given nan, expected more than 0"),
        ("schedule: steep", "{path}: schedule: given 'steep', expected one of linear, cosine, constant"),
        ("pooling: sum", "{path}: pooling: given 'sum', expected one of mean, max, attention, first, last"),
        ("skip_bad: 1", "{path}: skip_bad: given 1, expected a value of type bool"),
        ("windows: [4, x]", "{path}: windows: given 'x', expected a value of type int"),
        ("label: [a]", "{path}: label: given ['a'], expected a value of type str"),
        ("text: [{a: 1}]", "{path}: text: given {{'a': 1}}, expected a value of type str"),
    ],
)
def test_recipes_that_do_not_fit(load, tmp_path, text, message):
    with pytest.raises(InvalidInput) as caught:
        load(text)
    said = str(caught.value)
    assert message.format(path=tmp_path / "recipe.yaml") in said
    assert "\n" not in said


def test_a_recipe_that_is_not_there(tmp_path):
    with pytest.raises(InvalidInput, match=r"a.yaml: given No such file or directory, expected a recipe"):
        load_recipe(tmp_path / "a.yaml")


def test_what_is_named_overrides_even_by_its_default(load):
    recipe = load("data: a.csv\nmodels: [flat]\nepochs: 20\nwidth: 32\nlabel: a\ntext: t")
    given = Recipe(
        Path("recipe.yaml"), ("hierarchical",), DataOptions(label="b"), ModelOptions(width=64), TrainingOptions()
    )
    assert overridden(recipe, given, ()) == recipe
    result = overridden(recipe, given, {"epochs", "label", "resume"})
    assert (result.training.epochs, result.read.label) == (TrainingOptions().epochs, "b")
    assert (result.models, result.model.width, result.data, result.read.text) == (("flat",), 32, recipe.data, ("t",))
    assert overridden(recipe, given, {"models", "width"}).models == ("hierarchical",)


def test_every_option_has_one_meaning():
    names = [f.name for kind in (DataOptions, ModelOptions, TrainingOptions) for f in fields(kind)]
    assert len(names) == len(set(names))
