import json
import re
from dataclasses import asdict

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hsa import Hierarchy
from hsa.attention.flops import flops_flat
from hsa.baselines.han.model import HanConfig, HanEncoder, check_levels
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, count_parameters, equal_parameters
from hsa.models.registry import config_from_dict
from hsa.models.saved import load_model, save_model
from hsa.nn.attention import counting_operations
from hsa.nn.embedding import Modality
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.grouped_linear import Groups
from hsa.signals import Grid, Leaf, Sequence, Set, Signal, Table
from hsa.signals.batch import collate
from hsa.tree.positions import KINDS
from tests.model_inputs import KEYS, MODALITIES, exact, readable

WIDTH, INNER, OUTPUTS = 13, 17, 11
SIZES = {"width": WIDTH, "heads": 3, "head_dim": 5, "feed_forward": INNER, "position_width": 22, "position_dim": 2}
KINDS_OF_LEVELS = ("attention", "gru", "none")


def han(kind="attention", modalities=MODALITIES, kinds=KINDS, seed=3, **changes):
    config = HanConfig(encoder=kind, **{**SIZES, **changes})
    return exact(HanEncoder(config, modalities, kinds, KEYS), seed)


def close(a, b, atol=1e-10):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def document(*sentences):
    return Signal(Sequence(len(sentences)), [Signal.of(words, "text") for words in sentences])


def embedded(model, batch):
    return model.embedding(batch.values, batch.leaves, batch.hierarchy.num_leaves)


def encoded_alone(model, level, rows, members, batch):
    """Apply the encoder of a level to the members of one family."""
    if model.config.encoder == "none":
        return rows
    if model.config.encoder == "gru":
        hidden, _ = level.gru.gru(rows[:, None])  # [steps, 1, width], as PyTorch wants it
        return hidden[:, 0] @ level.gru.output.weight.T + level.gru.output.bias
    for layer, project in zip(level.layers, level.positions or [None] * len(level.layers), strict=True):
        positions = None
        if project is not None:
            row = torch.cat([torch.zeros(1, dtype=torch.int64), batch.positions.row[members]])
            positions = project(model.features(batch.positions), row)
        rows = layer(rows, Hierarchy.flat([len(members)]), Groups((len(members),), None, None), positions)
    return rows


def by_recursion(model, batch):
    """Return a vector per root, and the weight of every other node, computed family by family."""
    x, s, weight = embedded(model, batch), batch.hierarchy.structure, {}

    def vector(node):
        if s.num_children[node] == 0:
            return x[s.first_leaf[node]]
        members = list(range(s.first_child[node], s.first_child[node] + s.num_children[node]))
        level = model.levels[min(s.height[node], model.config.levels) - 1]
        rows = encoded_alone(model, level, torch.stack([vector(m) for m in members]), members, batch)
        inner, _, context = level.score
        alpha = (torch.tanh(rows @ inner.weight.T + inner.bias) @ context.weight[0]).softmax(0)
        weight.update(zip(members, alpha, strict=True))
        return alpha @ rows

    roots = torch.stack([vector(root) for root in range(batch.hierarchy.num_trees)])
    return roots, weight


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("attention", {"levels": 1}),
        ("attention", {"layers": 2}),
        ("attention", {"levels": 3, "position_width": 0}),
        ("gru", {"levels": 1, "layers": 2}),
        ("gru", {"levels": 2, "feed_forward": None}),
        ("gru", {"levels": 3}),
        ("none", {"levels": 2}),
    ],
)
@settings(max_examples=8)
@given(readable(trees=(1, 3)))
def test_equals_recursion_over_the_tree(kind, changes, listed):
    model, batch = han(kind, **changes), collate(listed)
    with torch.no_grad():
        x, roots = model(batch)
        wanted, weight = by_recursion(model, batch)
    assert roots.num_nodes == roots.num_leaves == roots.num_trees == batch.hierarchy.num_trees
    close(x, wanted)
    result = {
        int(node): alpha
        for level in model.weights(batch)
        for node, alpha in zip(level.nodes, level.weights, strict=True)
    }
    assert result.keys() == weight.keys()
    for node, alpha in weight.items():
        close(result[node], alpha)


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
@settings(max_examples=8)
@given(readable(trees=(1, 3)), st.integers(1, 4))
def test_weights_sum_to_one_in_every_family(kind, listed, levels):
    model, batch = han(kind, levels=levels), collate(listed)
    tree, result = batch.hierarchy, model.weights(batch)
    assert [level.height for level in result] == list(range(1, tree.depth + 1))
    seen = []
    for level in result:
        assert level.level == min(level.height, levels)
        assert (level.weights > 0).all()
        assert torch.equal(level.families, tree.parent[level.nodes])
        parents = torch.from_numpy(tree.structure.height == level.height).nonzero()[:, 0]
        sums = level.weights.new_zeros(tree.num_nodes).index_add(0, level.families, level.weights)
        close(sums[parents], torch.ones(len(parents), dtype=torch.float64))
        seen += level.nodes.tolist()
    assert sorted(seen) == list(range(tree.num_trees, tree.num_nodes))


@settings(max_examples=8)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=5))
def test_one_level_of_flat_trees_is_attention_pooling(lengths):
    """Compare with one softmax over all trees, as a masked matrix."""
    model = han("none", {"text": MODALITIES["text"]}, levels=1)
    batch = collate([Signal.of(list(range(n)), "text") for n in lengths])
    x = embedded(model, batch)
    inner, _, context = model.levels[0].score
    logits = torch.tanh(inner(x)) @ context.weight[0]
    tree = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mine = tree == torch.arange(len(lengths))[:, None]
    close(model(batch)[0], logits.expand(len(lengths), -1).masked_fill(~mine, -torch.inf).softmax(1) @ x)


def test_families_of_many_lengths():
    """Cover single words as well as sentences longer than the length buckets of attention."""
    lengths = (1, 5, 70, 3, 64, 65, 2, 11, 1, 13)
    batch = collate([document(*(torch.randperm(499)[:n] for n in lengths)), document([3]), Leaf(1, "text")])
    for kind in KINDS_OF_LEVELS:
        model = han(kind)
        with torch.no_grad():
            close(model(batch)[0], by_recursion(model, batch)[0])


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_zero_context_vector_gives_equal_weights(kind):
    model, batch = han(kind), collate([document([3, 1, 4], [1]), document([5, 9], [2, 6, 5], [3])])
    for level in model.levels:
        nn.init.zeros_(level.score[2].weight)
    for level in model.weights(batch):
        sizes = batch.hierarchy.num_children[level.families]
        close(level.weights, 1 / sizes.double())
    if kind == "none":
        x = embedded(model, batch).split([3, 1, 2, 3, 1])
        wanted = [torch.stack([rows.mean(0) for rows in part]).mean(0) for part in (x[:2], x[2:])]
        close(model(batch)[0], torch.stack(wanted))


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_levels_above_the_last_share_its_weights(kind):
    deep = Signal(Sequence(2), [Signal(Sequence(2), [document([3, 1], [4]), document([1, 5, 9])]), document([2, 6])])
    shared, own, batch = han(kind, levels=1), han(kind, levels=4), collate([deep, document([7, 8])])
    assert batch.hierarchy.depth == 4
    assert (shared(batch)[0] - own(batch)[0]).abs().max() > 1e-3
    state = {name: tensor for name, tensor in shared.state_dict().items() if not name.startswith("levels")}
    first = shared.levels[0].state_dict()
    state |= {f"levels.{i}.{name}": tensor for i in range(4) for name, tensor in first.items()}
    own.load_state_dict(state)
    close(shared(batch)[0], own(batch)[0])


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_each_level_has_its_own_weights(kind):
    model, batch = han(kind), collate([document([3, 1, 4], [1, 5])])
    words, sentences = model.weights(batch)
    with torch.no_grad():
        model.levels[1].score[2].weight.mul_(-1)
    same, other = model.weights(batch)
    assert torch.equal(same.weights, words.weights)
    assert (other.weights - sentences.weights).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
@settings(max_examples=8)
@given(readable(trees=(2, 4)))
def test_a_tree_does_not_depend_on_the_others_in_its_batch(kind, listed):
    model = han(kind)
    with torch.no_grad():
        together = model(collate(listed))[0]
        for signal, row in zip(listed, together, strict=True):
            close(model(collate([signal]))[0][0], row)


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
@settings(max_examples=4)
@given(readable())
def test_prepare_changes_nothing(kind, listed):
    model, prepared = han(kind), collate(listed)
    model.prepare(prepared)
    with torch.no_grad():
        assert torch.equal(model(prepared)[0], model(collate(listed))[0])


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_tree_of_one_leaf_keeps_its_vector(kind):
    model, batch = han(kind), collate([Leaf(3, "text"), document([1, 5])])
    close(model(batch)[0][0], embedded(model, batch)[0])
    only = collate([Leaf(3, "text")])
    close(model(only)[0], embedded(model, only))
    assert model.weights(only) == []


def test_single_word_has_weight_one():
    for kind in KINDS_OF_LEVELS:
        words, sentences = han(kind).weights(collate([document([3])]))
        assert words.weights.tolist() == sentences.weights.tolist() == [1.0]


@pytest.mark.parametrize("kind", ["attention", "none"])
def test_order_of_a_set_does_not_matter(kind):
    model = han(kind)
    ours, theirs = (collate([Signal.of(ids, "text", Set(3))]) for ids in ([3, 1, 4], [4, 3, 1]))
    close(model(ours)[0], model(theirs)[0])


@pytest.mark.parametrize("kind", ["attention", "gru"])
def test_order_of_a_sequence_matters(kind):
    model = han(kind)
    ours, theirs = (collate([Signal.of(ids, "text")]) for ids in ([3, 1, 4], [4, 3, 1]))
    assert (model(ours)[0] - model(theirs)[0]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_gradients(kind):
    sizes = {"width": 3, "heads": 1, "head_dim": 2, "feed_forward": 2, "position_width": 2, "position_dim": 1}
    model = han(kind, {"text": Modality(tokens=5)}, ("sequence",), **sizes)
    batch = collate([document([3, 1, 4], [1]), Leaf(2, "text")])
    names, parameters = zip(*model.named_parameters(), strict=True)

    def run(*values):
        return torch.func.functional_call(model, dict(zip(names, values, strict=True)), (batch,))[0]

    assert torch.autograd.gradcheck(run, parameters, fast_mode=True)
    model(batch)[0].square().sum().backward()
    assert all(parameter.grad.any() for parameter in parameters)


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_mixed_precision_is_near_full_precision(kind):
    model = han(kind).float()
    batch = collate([document(torch.arange(90), [3, 1], [4]), Leaf(7, "text"), Signal.of([9.5, 2.5], "number", Set(2))])
    wanted = model(batch)[0]
    with torch.autocast("cpu", torch.bfloat16):
        x, _ = model(batch)
    assert x.isfinite().all()
    assert (x.float() - wanted).norm() < 0.05 * wanted.norm()
    x.float().square().sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def test_operations_of_encoder_and_pooling_are_counted():
    batch = collate([document([3, 1, 4], [1, 5])])
    entries = {"attention": (9 + 4, 4), "gru": (0, 0), "none": (0, 0)}
    for kind, (words, sentences) in entries.items():
        with counting_operations() as counts:
            han(kind)(batch)
        inside = words * flops_flat(1, 15, 3) + sentences * flops_flat(1, 15, 3)
        assert sum(count.attention for count in counts) == inside + (5 + 2) * flops_flat(1, WIDTH, 1)


@pytest.mark.parametrize("kind", ["gru", "none"])
def test_models_without_positions_never_build_them(kind):
    """A grid of four axes and an unknown key have no positions, and would raise an error."""
    four_axes = Signal.of(torch.arange(30).view(1, 2, 3, 5), "text", Grid((1, 2, 3, 5)))
    for model in (han(kind), han("attention", position_width=0)):
        model(collate([four_axes, Signal.of([0.5], "number", Table(["unheard of"]))]))


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_dropout_only_in_training(kind):
    model, batch = han(kind, dropout=0.5, layers=2).train(), collate([document([3, 1, 4], [1, 5])])
    assert not torch.equal(model(batch)[0], model(batch)[0])
    first, second = model.weights(batch), model.weights(batch)
    assert all(torch.equal(a.weights, b.weights) for a, b in zip(first, second, strict=True))
    assert not first[0].weights.requires_grad
    assert model.training  # mode restored
    assert torch.equal(model.eval()(batch)[0], model(batch)[0])
    assert not model.training


def test_unknown_modalities_keys_and_kinds():
    model = han(modalities={"text": MODALITIES["text"]}, kinds=("sequence", "table"))
    with pytest.raises(InvalidInput, match=r"^values: .*'text'.*'number'"):
        model(collate([Leaf(0.5, "number")]))
    with pytest.raises(InvalidInput, match=r"^table: .*'odd'"):
        model(collate([Signal.of([3, 1], "text", Table(["title", "odd"]))]))
    with pytest.raises(InvalidInput, match=r"^positions: .* grid.*'grid'"):
        model(collate([Signal.of([3, 1], "text", Grid((2, 1)))]))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"encoder": "lstm"}, "encoder: expected one of attention, gru, none, got 'lstm'"),
        ({"levels": 0}, "levels: expected 1 or more, got 0"),
        ({"layers": 0}, "layers: expected 1 or more, got 0"),
        ({"feed_forward": 0}, "feed_forward: expected 1 or more, got 0"),
        ({"position_dim": -1}, "position_dim: expected 0 or more.*, got -1"),
        ({"width": 13, "heads": 2}, "heads: expected .*, got 2 heads .*head_dim"),
        ({"position_width": -2}, "position_width: expected an even number.*, got -2"),
        ({"dropout": 1.0}, "dropout: expected .*, got 1.0"),
    ],
)
def test_invalid_sizes(sizes, message):
    with pytest.raises(InvalidInput, match=message):
        HanConfig(**sizes)


def test_more_levels_than_the_data():
    three = Hierarchy.from_nested([[[3, 2], [4]], [1, 2]])
    for levels in (1, 2, 3):
        check_levels(HanConfig(levels=levels), three)
    deep = "5 leaf families on level 1, 3 families on level 2 and 1 family on level 3"
    for levels, tree, expected in (
        (4, three, f"at most 3, the depth of these trees ({deep})"),
        (2, Hierarchy.flat([5]), "at most 1, the depth of these trees (1 leaf family on level 1)"),
    ):
        message = re.escape(f"levels: expected {expected}, got {levels}. Use fewer levels")
        with pytest.raises(InvalidInput, match=message):
            check_levels(HanConfig(levels=levels), tree)
    leaves = collate([Leaf(3, "text"), Leaf(1, "text")]).hierarchy
    message = "data: expected trees with families to pool, got only trees that are single leaves"
    with pytest.raises(InvalidInput, match=message):
        check_levels(HanConfig(levels=1), leaves)


def classifier(kind="attention", task="classification", **more):
    encoder = HanConfig(encoder=kind, **SIZES)
    return ModelConfig(encoder, MODALITIES, OUTPUTS, kinds=KINDS, keys=KEYS, task=task, **more)


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
@pytest.mark.parametrize("pooling", ["mean", "attention", "last"])
def test_as_a_classifier(kind, pooling, tmp_path):
    """Pooling changes nothing, because a document is one vector already."""
    model = exact(Classifier(classifier(kind, pooling=pooling)))
    batch = collate([document([3, 1, 4], [1]), Leaf(2, "text"), Signal.of([0.5, 1.5], "number", Set(2))])
    logits = model(batch)
    close(logits, model.head(model.norm(model.encoder(batch)[0])))
    model.float()
    save_model(tmp_path, model, ("a",) * OUTPUTS)
    again, _ = load_model(tmp_path)
    assert again.config == model.config
    assert torch.equal(again.eval()(batch), model(batch))


def test_no_classes_per_leaf():
    with pytest.raises(InvalidInput, match=r"^task: expected an encoder that keeps leaves"):
        classifier(task="tokens")


def test_config_survives_json():
    config = HanConfig(levels=5, encoder="gru", feed_forward=7)
    assert config_from_dict(json.loads(json.dumps(asdict(config)))) == config


@pytest.mark.parametrize("kind", KINDS_OF_LEVELS)
def test_as_many_parameters_as_ours(kind):
    ours = ModelConfig(EncoderConfig(width=48, layers=3), MODALITIES, OUTPUTS, kinds=KINDS, keys=KEYS)
    theirs = equal_parameters(ours, HanConfig(width=48, encoder=kind))
    counts = [count_parameters(Classifier(config)) for config in (ours, theirs)]
    assert counts[1] == pytest.approx(counts[0], rel=0.01)
