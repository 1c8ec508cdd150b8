from dataclasses import replace

import pytest
import torch

from hsa.errors import InvalidInput
from hsa.research.listops.data import SIZES, listops_data, prepare_recipe
from hsa.research.listops.example import preset
from hsa.research.listops.generator import END, expressions
from hsa.training.recipe import Recipe


def test_tokens_are_written_expressions_with_their_values_as_classes():
    prepared = prepare_recipe(preset(None, True), True, lambda message: None)
    data, tokenizer = prepared.test, prepared.input_spec.tokenizer
    assert (len(prepared.train), len(prepared.validation), len(data)) == (2000, 500, 500)
    offsets = [0, *data.lengths.cumsum().tolist()]
    ids = data.batch.values["text"]
    for i, expression in enumerate(expressions(20, 2, **SIZES)):  # the seed of the test data
        written = tokenizer.decode(ids[offsets[i] : offsets[i + 1]].tolist())
        assert written.startswith("[")
        assert written.endswith("]")
        assert tokenizer.encode(written).ids == ids[offsets[i] : offsets[i + 1]].tolist()
        assert len(written.split()) == expression.length
        assert data.classes[int(data.targets[i])] == str(expression.value)
    assert int(ids.max()) == END < prepared.modalities["text"].tokens
    assert prepared.kinds == ("sequence",)


def test_parts_and_seeds_have_their_own_expressions():
    def first(seed):
        recipe = preset(None, True)
        recipe = replace(recipe, training=replace(recipe.training, seed=seed))
        prepared = prepare_recipe(recipe, True, lambda message: None)
        return [part.digest for part in (prepared.train, prepared.validation, prepared.test)]

    digests = [*first(0), *first(1)]
    assert len(set(digests)) == 6
    assert digests[:3] == first(0)
    assert not torch.equal(listops_data(5, 0, "a").targets, listops_data(5, 1, "a").targets)


def test_pre_trained_tokenizers_are_refused(monkeypatch):
    monkeypatch.setattr("hsa.research.listops.data.required_tokenizer", lambda *arguments: object())
    with pytest.raises(InvalidInput, match=r"models: .* pre-trained tokenizer"):
        prepare_recipe(Recipe(None, ("hat",)), True, lambda message: None)
