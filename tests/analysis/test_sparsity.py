"""Tests of sparsity: counts, table and plot."""

from dataclasses import replace

import pytest
import torch

from hsa.analysis.sparsity import (
    LevelSparsity,
    has_entmax,
    measure_sparsity,
    plot_sparsity,
    rows,
    visited_fraction,
)
from hsa.attention.hierarchical.entmax.zeros import zeros
from hsa.errors import InvalidInput
from hsa.nn.learned_alpha import normalizer_of
from tests.analysis.test_plots import check_picture
from tests.tasks import classifier, data


def sharp(kind="hierarchical", **changes):
    """Return a model with logits that are far apart and a different α for every head and level."""
    model = classifier(kind, **{"layers": 2, "entmax": "learned", "entmax_levels": 2, **changes})
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for layer in model.encoder.layers:
            layer.norm_q.weight.mul_(3)
            if hasattr(layer.attention.alpha, "raw"):
                layer.attention.alpha.raw.copy_(torch.randn(2, 2, generator=generator) / 10)
    return model


@pytest.mark.parametrize("include_self", [False, True])
def test_levels_are_those_of_the_layers(include_self):
    model, examples = sharp(include_self=include_self), data(11)
    result = measure_sparsity(model, [examples.batch])
    assert [(level.layer, level.level) for level in result] == [(1, 1), (1, 2), (2, 1), (2, 2)]
    caught = []
    hook = model.encoder.layers[1].attention.register_forward_pre_hook(lambda _, inputs: caught.append(inputs))
    model.eval()(examples.batch)
    hook.remove()
    q, k, _, hierarchy, positions, _ = caught[0]
    alpha = model.encoder.layers[1].attention.alpha
    options = {"positions": positions, "normalizer": normalizer_of(alpha), "include_self": include_self}
    counted = zeros(q, k, hierarchy, **options)
    for i, level in enumerate(result[2:]):
        assert level.alpha == pytest.approx(alpha()[i].tolist())
        assert level.zeros == pytest.approx(counted.zeros[i] / counted.entries[i])
        assert level.visited == pytest.approx(counted.visited[i] / counted.families[i])
        assert level.families == int((hierarchy.structure.height == i + 1).sum())
    assert 0 < result[2].zeros < 1
    assert visited_fraction(result[2:]) == pytest.approx(counted.visited_fraction)


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale"])
def test_batches_add_up(kind):
    model, examples = sharp(kind), data(12)
    whole = measure_sparsity(model.train(), [examples.batch])
    assert model.training
    parts = measure_sparsity(model, (examples.select([3 * i, 3 * i + 1, 3 * i + 2]).batch for i in range(4)))
    for a, b in zip(whole, parts, strict=True):
        assert (a.layer, a.level, a.families) == (b.layer, b.level, b.families)
        assert a.zeros == pytest.approx(b.zeros, abs=0.01)  # a weight on the edge may round to either side
        assert (a.visited is None) == (b.visited is None) == (kind == "multiscale")
    assert visited_fraction(whole) is None or kind == "hierarchical"


def test_models_without_entmax():
    for changes in ({}, {"entmax": 1.0}):
        model = classifier("hierarchical", **changes)
        assert not has_entmax(model.config)
        with pytest.raises(InvalidInput, match=r"model: expected a model with entmax, got one with softmax"):
            measure_sparsity(model, [data(2).batch])
    assert has_entmax(sharp().config)
    assert not has_entmax(classifier("none").config)


LEVELS = [
    LevelSparsity(1, 1, (1.25, 1.75), 0.5, 0.25, 30),
    LevelSparsity(1, 2, (1.5, 1.5), 0.0, 1.0, 10),
    LevelSparsity(2, 1, (1.9, 2.0), 0.998, 0.5, 30),
    LevelSparsity(2, 2, (1.1, 1.3), 0.2, 1.0, 10),
]


def test_the_table():
    assert rows(LEVELS)[:3] == [
        ["1", "1 (30 families)", "1.500 (1.250–1.750)", "50.0 %", "25.0 %"],
        ["1", "2 (10 families)", "1.500", "0.0 %", "100.0 %"],
        ["1", "all", "", "", "43.8 %"],  # (30 · 0.25 + 10) / 40
    ]
    own_rows = [replace(level, visited=None) for level in LEVELS]
    assert [row[-1] for row in rows(own_rows)] == ["–"] * 6


@pytest.mark.parametrize("models", [1, 3])
def test_the_plot(tmp_path, models):
    result = {f"model {i}": LEVELS if i else [replace(level, visited=None) for level in LEVELS] for i in range(models)}
    plot_sparsity(tmp_path / "a.png", result)
    check_picture(tmp_path / "a.png")
