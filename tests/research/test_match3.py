"""Match3: correct answers, balanced data, options, costs and training."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hsa.analysis.cost_plots import cost_table
from hsa.cli.runs import NAMED
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, count_parameters
from hsa.models.options import ModelOptions
from hsa.nn.attention import Flat
from hsa.research.match3.data import CLASSES, MODALITY, match3_data, prepare_match3, rules, three_match, two_match
from hsa.research.match3.options import Match3Options
from hsa.research.match3.task import preset
from hsa.research.trilinear import costs as trilinear_costs
from hsa.research.trilinear.costs import BRANCHING, WINDOW, costs
from hsa.research.trilinear.counts import flops_trilinear
from hsa.research.trilinear.module import HierarchicalTrilinear, Trilinear
from hsa.training.accelerator import make_accelerator
from hsa.training.experiment import model_config
from hsa.training.loop import Trainer
from hsa.training.options import TrainingOptions
from hsa.training.recipe import Recipe, load_recipe, overridden
from hsa.tree.hierarchy import Hierarchy

RECIPE = Path(__file__).parents[2] / "recipes" / "match3.yaml"
SMALL = Match3Options(sequences=300)


@given(
    st.integers(2, 13).flatmap(lambda m: st.tuples(st.just(m), st.lists(st.integers(0, m - 1), min_size=1, max_size=6)))
)
def test_labels_match_the_definition(case):
    modulus, x = case
    everything = list(product(x, x))
    wanted = [any((a + b + c) % modulus == 0 for b, c in everything) for a in x]
    in_two = [any((a + 2 * b) % modulus == 0 or (2 * a + b) % modulus == 0 for b in x) for a in x]
    numbers = np.array([x, x[::-1]])
    assert three_match(numbers, modulus).tolist() == [wanted, wanted[::-1]]
    assert two_match(numbers, modulus)[0].tolist() == in_two
    assert not (two_match(numbers, modulus) & ~three_match(numbers, modulus)).any()


@pytest.fixture(scope="module")
def prepared():
    return prepare_match3(None, Match3Options(sequences=20_000), seed=3)


def test_data_sets_hold_numbers_and_answers(prepared):
    for part in (prepared.train, prepared.validation, prepared.test):
        offsets = part.batch.hierarchy.structure.leaf_offsets
        numbers = part.batch.values[MODALITY].numpy()
        assert (numbers.min(), numbers.max(), len(part.targets)) == (0, 40, offsets[-1])
        for i in (0, len(part) // 2, len(part) - 1):
            of = slice(offsets[i], offsets[i + 1])
            assert three_match(numbers[None, of], 41)[0].tolist() == part.targets[of].bool().tolist()
            assert part.batch.domains[i].size == part.lengths[i]
    assert (len(prepared.train), len(prepared.validation), len(prepared.test)) == (20_000, 2_000, 2_000)
    assert sorted(set(prepared.train.lengths)) == [3, 4, 5, 6, 7, 8]
    assert set(prepared.test.lengths) == set(prepared.validation.lengths) == {8}
    assert prepared.task == "tokens"
    assert prepared.test.classes == CLASSES


def test_about_half_of_the_answers_are_yes_and_simple_rules_fail(prepared):
    assert 0.4 < float(prepared.test.targets.float().mean()) < 0.62
    result = list(rules(prepared, 41).values())
    assert all(0.5 <= accuracy < 0.63 for accuracy in result[:2]), result
    assert 0.65 < result[2] < 0.8  # the rule of two numbers
    for modulus, length in ((23, 6), (59, 9), (101, 12), (181, 16)):  # about 0.65 · length², as the options advise
        data = match3_data(Match3Options(modulus, length), 2_000, length, (0, 0), "test")
        assert 0.4 < float(data.targets.float().mean()) < 0.62


@pytest.mark.parametrize("modulus", [5, 11])  # the more frequent answer is yes for 5, no for 11
def test_rules_are_measured_on_the_test_data(modulus):
    data = prepare_match3(None, Match3Options(modulus=modulus, length=2, shortest=2, sequences=2_000))
    numbers = data.test.batch.values[MODALITY].numpy()
    answers = data.test.targets.numpy()
    rate = np.array(
        [data.train.targets.numpy()[data.train.batch.values[MODALITY].numpy() == v].mean() for v in range(modulus)]
    )
    assert list(rules(data, modulus).values()) == pytest.approx(
        [max(answers.mean(), 1 - answers.mean()), ((rate > 0.5)[numbers] == answers).mean(), 1.0]
    )


def test_seed_determines_the_data_and_parts_differ():
    first, again, other = (prepare_match3(None, SMALL, seed=seed) for seed in (0, 0, 1))
    assert first.train.digest == again.train.digest
    assert first.test.digest == again.test.digest
    digests = [part.digest for data in (first, other) for part in (data.train, data.validation, data.test)]
    assert len(set(digests)) == 6


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modulus": 1}, "modulus: expected 2 or more, got 1"),
        ({"length": 0}, "length: expected 1 or more, got 0"),
        ({"shortest": 0}, "shortest: expected 1 or more, got 0"),
        ({"shortest": 9}, "shortest: expected at most 8, the length, got 9"),
        ({"sequences": 9}, "sequences: expected 10 or more, got 9"),
    ],
)
def test_invalid_options(options, message):
    with pytest.raises(InvalidInput) as caught:
        Match3Options(**options)
    assert message in str(caught.value)


def test_modulus_with_only_one_answer():
    message = r"modulus: expected .*, got 3, with which all answers are yes for sequences of 40\. .*1040"
    with pytest.raises(InvalidInput, match=message):
        prepare_match3(None, Match3Options(modulus=3, length=40, shortest=40, sequences=20))


def test_data_are_refused():
    with pytest.raises(
        InvalidInput, match=r"numbers\.csv: the task match3 generates its own numbers; expected no data"
    ):
        prepare_match3(Path("numbers.csv"), SMALL)


# Models


def test_models_match_the_parameters_of_the_reference(prepared):
    sizes = ModelOptions(width=16, heads=2, head_dim=8, position_width=0)
    reference = model_config(prepared, sizes, "trilinear", "trilinear")
    assert reference.encoder.feed_forward is None
    assert (reference.task, reference.outputs, reference.modalities[MODALITY].tokens) == ("tokens", 2, 41)
    wanted = count_parameters(Classifier(reference))
    for name, kind in (("flat", "flat"), ("deepsets", "none"), ("hierarchical", "hierarchical")):
        config = model_config(prepared, sizes, name, "trilinear")
        assert (config.encoder.kind, config.encoder.position_input) == (kind, False)
        assert abs(count_parameters(Classifier(config)) - wanted) < 33
    assert model_config(prepared, sizes, "hierarchical").encoder.feed_forward is None


def test_recipe_equals_the_preset_of_the_command():
    NAMED.set(frozenset())  # forget options of commands that ran in this process
    recipe = load_recipe(RECIPE)
    assert replace(recipe, extra={"match3": recipe.group("match3")}) == preset(None, quick=False)
    assert recipe.group("match3") == Match3Options()
    assert recipe.read.task == "match3"
    changed = overridden(recipe, Recipe(extra={"match3": Match3Options(modulus=53, length=9)}), {"modulus"})
    assert changed.group("match3") == Match3Options(modulus=53)


def test_costs_by_length(monkeypatch):
    lengths, timed = (8, 64, 512), []
    seconds = trilinear_costs._seconds
    monkeypatch.setattr(trilinear_costs, "_seconds", lambda *args: timed.append(args) or seconds(*args))
    result = costs(2, 12, lengths, most=2_000_000, repeats=1)
    used = {(type(attention), getattr(attention, "window", None)) for attention, *_ in timed}
    assert used == {(Flat, None), (Trilinear, None), (Trilinear, WINDOW), (HierarchicalTrilinear, None)}
    by_kind = {kind: [c for c in result if c.kind == kind] for kind in dict.fromkeys(c.kind for c in result)}
    pairs, exact, window, tree = by_kind.values()
    assert [c.operations for c in exact] == [flops_trilinear(Hierarchy.flat([n]), 12, 2).total for n in lengths]
    assert exact[2].operations / exact[1].operations > 0.98 * 8**3
    assert pairs[2].operations / pairs[1].operations == 8**2
    assert 8 <= window[2].operations / window[1].operations < 10
    assert 7 < tree[2].operations / tree[1].operations < 9
    for kind in by_kind.values():
        assert all((c.seconds is not None) == (c.operations <= 2_000_000) for c in kind)
        assert all(c.seconds is None or c.seconds > 0 for c in kind)
    header, rows = cost_table(result)
    assert header == [
        "length",
        "pairs",
        "three-way",
        f"three-way, window {WINDOW}",
        f"three-way on a tree of {BRANCHING}s",
    ]
    assert [row[0] for row in rows] == ["8", "64", "512"]
    assert rows[2][2] == f"{exact[2].operations / 1e6:,.1f} M, –"
    assert rows[0][1].endswith(" ms")


def test_order_of_a_set_does_not_matter():
    data = prepare_match3(None, replace(SMALL, modulus=7, length=3, shortest=3, sequences=600))
    sizes = ModelOptions(width=16, heads=2, head_dim=16, dropout=0.0, position_width=0)
    config = model_config(data, sizes, "trilinear", "trilinear")
    model = Classifier(config)
    out = model(data.test.batch)
    assert out.shape == (len(data.test.targets), 2)
    order = torch.tensor([2, 0, 1])
    turned = replace(
        data.test.batch, values={MODALITY: data.test.batch.values[MODALITY].view(-1, 3)[:, order].reshape(-1)}
    )
    assert torch.allclose(model(turned).view(-1, 3, 2), out.view(-1, 3, 2)[:, order], atol=1e-6)


@pytest.mark.slow
def test_three_way_attention_learns_more_than_pairwise():
    data = prepare_match3(None, Match3Options(modulus=13, length=4, shortest=3, sequences=6_000))
    sizes = ModelOptions(width=32, head_dim=16, dropout=0.0, position_width=0)
    options = TrainingOptions(epochs=15, learning_rate=3e-3, batch_size=128, patience=0)
    reached = {}
    for name in ("trilinear", "flat"):
        torch.manual_seed(0)
        model = Classifier(model_config(data, sizes, name, "trilinear"))
        trainer = Trainer(model, data.train, data.validation, options, accelerator=make_accelerator(options, cpu=True))
        trainer.fit()
        reached[name] = trainer.evaluate(data.test).scores.accuracy
    assert reached["trilinear"] > 0.98
    assert reached["flat"] < reached["trilinear"] - 0.05
