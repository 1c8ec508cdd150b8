import pytest
import torch
from hypothesis import given, settings

from hsa.errors import InvalidInput
from hsa.nn import Embedding, Modality
from hsa.signals import Leaf, Signal
from hsa.signals.batch import collate
from tests.model_inputs import MODALITIES, exact, readable

WIDTH = 13


def leaves_of(node):
    return [node] if isinstance(node, Leaf) else [leaf for member in node.members for leaf in leaves_of(member)]


@settings(max_examples=20)
@given(readable())
def test_every_leaf_is_embedded_by_its_modality(listed):
    embedding = exact(Embedding(MODALITIES, WIDTH))

    def vector(leaf):
        modality = MODALITIES[leaf.modality]
        if modality.tokens:
            inner = embedding.tables[leaf.modality].weight[leaf.value]
        else:
            inner = (torch.as_tensor(leaf.value, dtype=torch.float64).flatten() - modality.center) / modality.scale
        return embedding.maps[leaf.modality](inner)

    batch = collate(listed)
    result = embedding(batch.values, batch.leaves, batch.hierarchy.num_leaves)
    wanted = torch.stack([vector(leaf) for root in listed for leaf in leaves_of(root)])
    torch.testing.assert_close(result, wanted, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_take_the_dtype_of_the_model(dtype):
    embedding = Embedding(MODALITIES, WIDTH).to(dtype)
    batch = collate([Signal.of([0.5, -0.5], "number"), Signal.of([3, 1], "text")])
    assert embedding(batch.values, batch.leaves, 4).dtype == dtype


def test_tokens_of_the_width_of_the_model_need_no_map():
    embedding = Embedding({"text": Modality(tokens=11)}, WIDTH)
    ids = torch.tensor([3, 1, 3])
    assert torch.equal(embedding({"text": ids}, {"text": torch.arange(3)}, 3), embedding.tables["text"].weight[ids])


def test_frozen_vectors_are_not_trained():
    embedding = Embedding({"text": Modality(tokens=11, width=7, frozen=True)}, WIDTH)
    vectors = torch.randn(11, 7)
    embedding.set_vectors("text", vectors)
    assert torch.equal(embedding.tables["text"].weight, vectors)
    assert {name for name, p in embedding.named_parameters() if p.requires_grad} == {
        "maps.text.weight",
        "maps.text.bias",
    }
    with pytest.raises(InvalidInput, match=r"vectors\['text'\]: expected one row per token.*, got shape \(11, 13\)"):
        embedding.set_vectors("text", torch.randn(11, 13))


@pytest.mark.parametrize("sizes", [{}, {"tokens": 3, "numbers": 5}])
def test_a_modality_is_ids_or_numbers(sizes):
    with pytest.raises(InvalidInput, match=r"modality: expected either tokens or numbers.*, got tokens="):
        Modality(**sizes)


@pytest.mark.parametrize(
    ("listed", "message"),
    [
        (
            [Leaf(1, "audio")],
            r"values: expected some of \('text', 'number', 'patch'\), got leaves of modality 'audio'",
        ),
        (
            [Leaf("cat", "text")],
            r"values\['text'\]: expected one tensor, got leaves of several kinds, or strings.*tokenizer",
        ),
        (
            [Leaf(1, "number"), Leaf(0.5, "number")],
            r"values\['number'\]: expected one tensor, got leaves of several kinds",
        ),
        ([Leaf(torch.ones(5), "patch")], r"values\['patch'\]: expected 18 numbers per leaf, got 5"),
    ],
)
def test_leaves_that_do_not_fit(listed, message):
    batch = collate(listed)
    with pytest.raises(InvalidInput, match=message):
        Embedding(MODALITIES, WIDTH)(batch.values, batch.leaves, batch.hierarchy.num_leaves)
