import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hsa import Hierarchy
from hsa.errors import InvalidInput
from hsa.nn import EncoderConfig, HierarchicalEncoder, Modality
from hsa.nn.attention import counting_operations
from hsa.signals import Graph, Grid, Leaf, Sequence, Set, Signal, Table
from hsa.signals.batch import Batch, collate
from hsa.tree.positions import KINDS, NodePositions
from tests.model_inputs import ENCODERS, MODALITIES, encoder, encoder_named, num_leaves, readable

WIDTH = 13
TEXT = {"text": MODALITIES["text"]}


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def per_tree(encoded):
    x, hierarchy = encoded
    return x.split(hierarchy.lengths)


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=10)
@given(readable(trees=(2, 4)))
def test_a_tree_does_not_depend_on_the_others_in_its_batch(name, listed):
    model = encoder_named(name)
    with torch.no_grad():
        together = per_tree(model(collate(listed)))
        for signal, rows in zip(listed, together, strict=True):
            close(rows, model(collate([signal]))[0])


@pytest.mark.parametrize("name", ["flat", "clustered"])
def test_a_tree_does_not_depend_on_more_than_eight_others(name):
    lengths = (1, 5, 70, 3, 64, 65, 2, 11, 1, 13)
    listed = [Signal.of(torch.randperm(499)[:n], "text") for n in lengths]
    model = encoder_named(name)
    with torch.no_grad():
        for signal, rows in zip(listed, per_tree(model(collate(listed))), strict=True):
            close(rows, model(collate([signal]))[0])


def shuffled(node, generator, leaves):
    """Return the node with the members of every set shuffled, and the old index of each leaf in the new order."""
    if isinstance(node, Leaf):
        return node, [next(leaves)]
    pairs = [shuffled(member, generator, leaves) for member in node.members]
    if isinstance(node.domain, Set):
        generator.shuffle(pairs)
    return Signal(node.domain, [member for member, _ in pairs]), [i for _, part in pairs for i in part]


@pytest.mark.parametrize(
    "name", ["hierarchical", "hierarchical with self", "multiscale", "none", "none with positions"]
)
@settings(max_examples=10)
@given(readable(kinds=("set", "set", "sequence", "table"), trees=(1, 2)), st.integers(0, 99))
def test_leaf_vectors_do_not_depend_on_the_order_of_a_set(name, listed, seed):
    leaves = iter(range(sum(map(num_leaves, listed))))
    reordered, old = zip(*(shuffled(signal, random.Random(seed), leaves) for signal in listed), strict=True)
    model = encoder_named(name)
    with torch.no_grad():
        close(model(collate(reordered))[0], model(collate(listed))[0][[i for part in old for i in part]])


@pytest.mark.parametrize("name", ["bottom-up", "hierarchical pooled"])
@settings(max_examples=10)
@given(readable(kinds=("set", "set", "sequence"), trees=(1, 2), depth=2), st.integers(0, 99))
def test_root_vectors_do_not_depend_on_the_order_of_a_set(name, listed, seed):
    reordered = [shuffled(signal, random.Random(seed), iter(range(99)))[0] for signal in listed]
    model = encoder_named(name)
    with torch.no_grad():
        x, forest = model(collate(listed))
        assert forest.depth == 0
        close(model(collate(reordered))[0], x)


def test_leaf_vectors_depend_on_the_order_of_a_sequence():
    model = encoder(modalities=TEXT)
    ours, theirs = (model(collate([Signal.of(ids, "text")]))[0] for ids in ([3, 1, 4], [4, 1, 3]))
    assert (ours - theirs.flip(0)).abs().max() > 1e-3


def leaves_of(node):
    return [node] if isinstance(node, Leaf) else [leaf for member in node.members for leaf in leaves_of(member)]


@settings(max_examples=8)
@given(readable())
def test_flat_is_hierarchical_with_self_on_flattened_signals(listed):
    flattened = [Signal(Sequence(num_leaves(signal)), leaves_of(signal)) for signal in listed]
    flat = encoder("flat", position_input=True)
    tree = encoder("hierarchical", include_self=True, kinds=("sequence",), position_input=True)
    tree.load_state_dict(flat.state_dict())
    with torch.no_grad():
        wanted, forest = tree(collate(flattened))
        for signals in (listed, flattened):
            x, flat_forest = flat(collate(signals))
            assert flat_forest == forest
            close(x, wanted)


@dataclass
class Bare:
    """Inputs that are not an `hsa.Batch`."""

    values: dict
    leaves: dict
    hierarchy: Hierarchy
    positions: NodePositions


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale", "bottom-up"])
@settings(max_examples=8)
@given(readable())
def test_windows_replace_the_tree(kind, listed):
    batch = collate(listed)
    regular = Hierarchy.regular(batch.hierarchy.lengths, (3, 2))
    inputs = Bare(batch.values, batch.leaves, regular, NodePositions.of_sequences(regular))
    windows = encoder(kind, windows=(3, 2), position_input=True)
    plain = encoder(kind, kinds=("sequence",), position_input=True)
    plain.load_state_dict(windows.state_dict())
    with torch.no_grad():
        (x, forest), (wanted, same) = windows(batch), plain(inputs)
    assert forest == same
    assert torch.equal(x, wanted)


@settings(max_examples=15)
@given(readable())
def test_the_position_of_a_leaf_can_be_added_to_it(listed):
    batch = collate(listed)
    model = encoder("none", position_input=True)
    model.layers = nn.ModuleList()
    leaf = batch.hierarchy.tensor("leaf_nodes")
    embedded = model.embedding(batch.values, batch.leaves, batch.hierarchy.num_leaves)
    position = model.input_position(model.features(batch.positions), batch.positions.row)[leaf, 0]
    close(model(batch)[0], embedded + position)
    assert not position[batch.positions.row[leaf] == 0].any()


def test_positions_can_stay_out_of_the_logits():
    model = encoder("multiscale", position_input=True, position_dim=0)
    assert model.input_position is not None
    assert not model.positions
    bare = encoder("multiscale", position_dim=0)
    assert bare.features is None  # no parameters that would never be trained


@pytest.mark.parametrize("name", ENCODERS)
def test_no_position_parameters_without_positions(name):
    model = encoder_named(name, position_width=0)
    assert model.features is model.input_position is None
    assert len(model.positions) == 0
    four_axes = Signal.of(torch.arange(30).view(1, 2, 3, 5), "text", Grid((1, 2, 3, 5)))
    model(collate([four_axes, Signal.of([0.5], "number", Table(["unheard of"]))]))


@pytest.mark.parametrize("name", ENCODERS)
@settings(max_examples=3)
@given(readable())
def test_prepare_does_not_change_results(name, listed):
    model = encoder_named(name)
    prepared = collate(listed)
    model.prepare(prepared)
    with torch.no_grad():
        (x, forest), (wanted, same) = model(prepared), model(collate(listed))
    assert forest == same
    assert torch.equal(x, wanted)


def page():
    """Build a signal of text, an image in patches of uint8, and numbers."""
    image = Signal.of(torch.randint(0, 256, (2, 3, 2, 3, 3), dtype=torch.uint8), "patch", Grid((2, 3)))
    links = Signal.of([0.5, 1.5, 2.5], "number", Graph(3, [(0, 1), (1, 2)]))
    text = Signal(Sequence(2), [Signal.of([3, 1], "text"), Signal.of([4, 1, 5], "text")])
    return Signal(Table(["title", "body", "price"]), [image, text, links])


@pytest.mark.parametrize("name", ENCODERS)
def test_texts_images_and_numbers_together(name):
    model = encoder_named(name)
    batch = collate([page(), Leaf(7, "text"), Signal.of([9.5, 2.5], "number", Set(2)), page()])
    x, forest = model(batch)
    assert x.shape == (forest.num_leaves, WIDTH)
    assert forest.num_trees == 4
    x.square().sum().backward()
    used = {n for n, p in model.named_parameters() if p.grad is not None and p.grad.any()}
    assert {"embedding.tables.text.weight", "embedding.maps.patch.weight", "embedding.maps.number.weight"} <= used
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ENCODERS)
def test_mixed_precision_is_near_full_precision(name):
    model = encoder_named(name).float()
    batch = collate([page(), Signal.of(torch.arange(300), "text"), Leaf(7, "text")])
    with torch.no_grad():
        wanted, _ = model(batch)
        with torch.autocast("cpu", torch.bfloat16):
            x, _ = model(batch)
    assert x.isfinite().all()
    if name not in ("clustered", "multiscale refined"):  # their selections differ if scores are close
        assert (x.float() - wanted).norm() < 0.05 * wanted.norm()


@pytest.mark.parametrize("name", ENCODERS)
def test_one_count_for_every_layer_or_family_height(name):
    model, batch = encoder_named(name), collate([page()])
    with counting_operations() as counts:
        model(batch)
    layers = len(model.layers)
    wanted = 0 if name.startswith("none") else layers * (batch.hierarchy.depth if name == "bottom-up" else 1)
    assert len(counts) == wanted


@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("known", [("text",), ("text", "number")])
def test_an_unknown_modality(name, known):
    model = encoder_named(name, modalities={modality: MODALITIES[modality] for modality in known})
    listed = [Signal(Sequence(3), [Leaf(1, "text"), Leaf(1.5, "audio"), Leaf(2.5, "number")]), Leaf(1.5, "audio")]
    for signals in (listed, listed[1:]):
        with pytest.raises(InvalidInput, match=r"values: expected some of \('text'.*\), got leaves of modality '\w+'"):
            model(collate(signals))


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale", "bottom-up"])
def test_unknown_keys_and_kinds(kind):
    model = encoder(kind, kinds=("sequence", "table"))
    with pytest.raises(InvalidInput, match=r"table: expected one of.*, got the key 'odd'"):
        model(collate([Signal.of([3, 1], "text", Table(["title", "odd"]))]))
    with pytest.raises(
        InvalidInput, match=r"positions: expected only .*, got members of a grid. Add 'grid' to the kinds"
    ):
        model(collate([Signal.of([3, 1], "text", Grid((2, 1)))]))
    with pytest.raises(InvalidInput, match=r"kinds: expected some of .*, got \['line'\]"):
        encoder(kind, kinds=("line",))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"kind": "dense"}, "kind: expected one of hierarchical.*, got 'dense'"),
        ({"layers": 0}, "layers: expected 1 or more, got 0"),
        ({"width": 13, "heads": 2}, "heads: expected heads that divide the width, got 2 heads for a width of 13"),
        ({"position_width": 7}, "position_width: expected an even number.*, got 7"),
        ({"dropout": 1.0}, "dropout: expected 0 or more and less than 1, got 1.0"),
    ],
)
def test_sizes_that_do_not_fit(sizes, message):
    with pytest.raises(InvalidInput, match=message):
        EncoderConfig(**sizes)


def test_pooled_leaves_have_projections_of_their_own():
    """Pool a tree of one leaf too, so that its result does not depend on the depth of the other trees."""
    for modalities, groups in ((TEXT, 1), (MODALITIES, 4)):
        model = HierarchicalEncoder(EncoderConfig(width=WIDTH, heads=1, pool="families"), modalities, KINDS)
        assert len(model.layers[0].project.weight) == groups
    model = encoder_named("hierarchical pooled")
    alone, deep = Leaf(3, "text"), page()
    close(model(collate([alone]))[0][0], per_tree(model(collate([alone, deep])))[0][0])


def test_dropout_only_in_training():
    batch = collate([page()])
    model = encoder(dropout=0.5)
    assert torch.equal(model(batch)[0], model(batch)[0])
    assert not torch.equal(model.train()(batch)[0], model(batch)[0])


def test_selected_and_joined_batches_are_encoded_alike():
    listed = [page(), Leaf(7, "text"), Signal.of([3, 1], "text"), page()]
    whole, model = collate(listed), encoder()
    parts = per_tree(model(whole))
    close(model(whole.select([2, 0]))[0], torch.cat([parts[2], parts[0]]))
    close(model(Batch.join([whole, whole.select([1])]))[0], torch.cat([*parts, parts[1]]))


def test_a_token_outside_the_vocabulary():
    model = encoder(modalities={"text": Modality(tokens=3)})
    with pytest.raises((IndexError, InvalidInput)):
        model(collate([Signal.of([1, 3], "text")]))
