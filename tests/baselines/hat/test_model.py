"""HAT compared with its definition, segment by segment, and with a plain transformer."""

import json
from dataclasses import asdict, replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Hierarchy, collate
from hsa.baselines.hat.layouts import PUBLISHED, STYLES, layout_pattern
from hsa.baselines.hat.model import HatConfig, HatEncoder, check_levels
from hsa.errors import InvalidInput
from hsa.models.classifier import Classifier, ModelConfig, count_parameters
from hsa.nn.attention import counting_operations
from hsa.nn.embedding import Modality
from hsa.signals import Leaf, Sequence, Signal
from tests.model_inputs import MODALITIES, exact, readable

SIZES = {"width": 15, "heads": 3, "feed_forward": 17, "segment": 5}
TEXT = {"text": Modality(tokens=499)}


def encoder(modalities=MODALITIES, **changes):
    """Return an encoder whose parameters are all random, so that layers across segments are not the identity."""
    return exact(HatEncoder(HatConfig(**{**SIZES, **changes}), modalities))


def fresh(modalities=TEXT, **changes):
    return HatEncoder(HatConfig(**{**SIZES, **changes}), modalities).double().eval()


def text(*lengths, seed=1):
    """Return documents without repeated tokens."""
    ids = torch.randperm(499, generator=torch.Generator().manual_seed(seed))[: sum(lengths)]
    return [Signal.of(part, "text") for part in ids.split(lengths)]


def layer_by_hand(layer, x, positions=None):
    """Apply one layer to the rows of one sequence, `[rows, width]`."""
    norm, heads = layer.norm_attention, layer.heads
    inputs = norm(x) if layer.norm_first else x
    inputs = inputs if positions is None else inputs + positions
    q, k, v = (part.unflatten(-1, (heads, -1)).transpose(0, 1) for part in layer.project(inputs).chunk(3, -1))
    attended = ((q @ k.mT) * q.shape[-1] ** -0.5).softmax(-1) @ v
    x = x + layer.output(attended.transpose(0, 1).flatten(1))
    if not layer.norm_first:
        x = norm(x)
    fed = layer.outer(F.gelu(layer.inner(layer.norm_feed_forward(x) if layer.norm_first else x)))
    return x + fed if layer.norm_first else layer.norm_feed_forward(x + fed)


def document_by_hand(model, leaves, lengths):
    """Return the rows of every segment of one document after all layers, `[[1 + leaves (+ 1), width], …]`."""
    config, result = model.config, []
    for part in leaves.split(lengths):
        marks = model.marks.weight
        rows = torch.cat([marks[:1], part, marks[1:]])
        result.append(model.norm(rows + model.positions.weight[: len(rows)]))
    for letter, layer in zip(config.pattern, model.layers, strict=True):
        if letter == "S":
            result = [layer_by_hand(layer, rows) for rows in result]
            continue
        phases = torch.arange(len(result)).double()[:, None] * model.numbers.frequencies
        numbers = torch.cat([phases.sin(), phases.cos()], -1)[:, : config.width]
        firsts = layer_by_hand(layer, torch.stack([rows[0] for rows in result]), numbers)
        result = [torch.cat([first[None], rows[1:]]) for first, rows in zip(firsts, result, strict=True)]
    return result


@settings(max_examples=25)
@given(
    signals=readable(),
    layout=st.sampled_from([*STYLES, "SSCSC", "CS", "SS"]),
    layers=st.integers(1, 2),
    norm=st.sampled_from(["pre", "post"]),
    separator=st.booleans(),
)
def test_windows_match_the_definition(signals, layout, layers, norm, separator):
    batch = collate(signals)
    options = {"layout": layout, "layers": layers, "norm": norm, "separator": separator, "segment": 3}
    model = encoder(returns="leaves", **options)
    x, hierarchy = model(batch)
    assert hierarchy is batch.hierarchy
    leaves = model.embedding(batch.values, batch.leaves, batch.hierarchy.num_leaves)
    wanted = []
    for document in leaves.split(batch.hierarchy.lengths):
        n = len(document)
        wanted.append(document_by_hand(model, document, [min(3, n - i) for i in range(0, n, 3)]))
    inner = torch.cat([rows[1 : len(rows) - separator] for document in wanted for rows in document])
    torch.testing.assert_close(x, inner, rtol=1e-10, atol=1e-10)
    model.config = replace(model.config, returns="segments")
    x, hierarchy = model(batch)
    assert hierarchy == Hierarchy.flat([len(document) for document in wanted])
    firsts = torch.stack([rows[0] for document in wanted for rows in document])
    torch.testing.assert_close(x, firsts, rtol=1e-10, atol=1e-10)


def test_sentences_and_paragraphs_as_segments():
    sentences = text(4, 3, 7, 1)
    document = Signal(Sequence(2), [Signal(Sequence(2), sentences[:2]), Signal(Sequence(2), sentences[2:])])
    batch = collate([document])
    for level, lengths in ((1, [4, 3, 5, 2, 1]), (2, [5, 2, 5, 3]), (3, [5, 5, 5])):
        model = encoder(TEXT, segment_level=level)
        leaves = model.embedding(batch.values, batch.leaves, 15)
        wanted = torch.stack([rows[0] for rows in document_by_hand(model, leaves, lengths)])
        x, documents = model(batch)
        assert documents.lengths == [len(lengths)]
        torch.testing.assert_close(x, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("layout", [*STYLES, "SCCSCC"])
def test_one_segment_starts_as_a_plain_transformer(layout, norm):
    documents = text(5, 1, 3)
    model = fresh(layout=layout, layers=2, norm=norm, returns="leaves")
    plain = fresh(layout="S" * model.config.layers, norm=norm, returns="leaves")
    inside = [layer for letter, layer in zip(model.config.pattern, model.layers, strict=True) if letter == "S"]
    plain.load_state_dict(
        {k: v for k, v in model.state_dict().items() if not k.startswith(("layers.", "numbers."))}
        | {f"layers.{i}.{k}": v for i, layer in enumerate(inside) for k, v in layer.state_dict().items()}
    )
    assert torch.equal(model(collate(documents))[0], plain(collate(documents))[0])


def test_segments_start_independent():
    (document,) = text(13)
    alone = [Signal.of(part, "text") for part in document.values.split(5)]
    model = fresh(layers=2)
    torch.testing.assert_close(model(collate([document]))[0], model(collate(alone))[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("layout", "crosses"), [("SC", False), ("SCS", True), ("SS", False)])
def test_layer_across_segments_reaches_tokens_through_the_next_layer_inside(layout, crosses):
    """A token of the last segment changes tokens of the first if S follows C."""
    (document,) = text(11)
    other = document.values.clone()
    other[-1] = next(i for i in range(499) if i not in document.values.tolist())
    model = encoder(TEXT, layout=layout, returns="leaves")
    x, y = (model(collate([Signal.of(ids, "text")]))[0] for ids in (document.values, other))
    assert (not torch.equal(x[:5], y[:5])) == crosses
    model = encoder(TEXT, layout=layout)
    x, y = (model(collate([Signal.of(ids, "text")]))[0] for ids in (document.values, other))
    assert (not torch.equal(x[0], y[0])) == ("C" in layout)


def test_layers_across_segments_use_the_order_of_segments():
    (document,) = text(10)
    swapped = Signal.of(document.values.roll(5), "text")
    model = encoder(TEXT, layout="SC")
    (x, _), (y, _) = (model(collate([signal])) for signal in (document, swapped))
    assert (x.mean(0) - y.mean(0)).abs().max() > 1e-3
    plain = encoder(TEXT, layout="S")
    (x, _), (y, _) = (plain(collate([signal])) for signal in (document, swapped))
    torch.testing.assert_close(x.mean(0), y.mean(0), rtol=1e-10, atol=1e-10)


@settings(max_examples=25)
@given(signals=readable(trees=(2, 5)), level=st.integers(0, 3), returns=st.sampled_from(["segments", "leaves"]))
def test_a_document_does_not_depend_on_its_batch(signals, level, returns):
    model = encoder(segment_level=level, segment=2, returns=returns)
    together = model(collate(signals))[0]
    alone = torch.cat([model(collate([signal], MODALITIES))[0] for signal in signals])
    torch.testing.assert_close(together, alone, rtol=1e-10, atol=1e-10)


def test_many_segments():
    """Use many segments, in a batch large enough that attention pads segments of similar length."""
    documents = [Signal.of(torch.arange(n) % 499, "text") for n in (1201, 1, 77)]
    model = encoder(TEXT, segment=2)
    together, forest = model(collate(documents))
    assert forest.lengths == [601, 1, 39]
    torch.testing.assert_close(together[601:602], model(collate(documents[1:2]))[0], rtol=1e-10, atol=1e-10)
    assert together.isfinite().all()


@pytest.mark.parametrize("returns", ["segments", "leaves"])
def test_documents_of_one_token_and_no_documents(returns):
    model = encoder(TEXT, returns=returns)
    assert model(collate([Leaf(7, "text"), Signal.of([7], "text")]))[0].isfinite().all()
    none = torch.empty(0, dtype=torch.int64)
    x, hierarchy = model(replace(collate([]), values={"text": none}, leaves={"text": none}))
    assert x.shape == (0, 15)
    assert hierarchy.num_trees == 0


def test_prepare_changes_nothing():
    model, signals = encoder(TEXT), text(13, 2)
    ahead = collate(signals)
    model.prepare(ahead)
    assert torch.equal(model(ahead)[0], model(collate(signals))[0])


def test_every_parameter_has_a_gradient():
    model = encoder(TEXT, layout="SSCS", separator=True, returns="leaves")
    model(collate(text(13)))[0].pow(3).sum().backward()
    idle = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0]
    assert not idle


def test_gradients():
    model, batch = encoder({"number": Modality(numbers=2)}, layers=1), None
    values = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def out(values):
        return model(replace(batch, values={"number": values}))[0]

    batch = collate([Signal.of(part, "number") for part in values.detach().split([6, 1])])
    assert torch.autograd.gradcheck(out, (values,))


def test_operations_of_all_layers_are_counted():
    model = encoder(TEXT, layout="SSC", separator=True)
    with counting_operations() as counts:
        model(collate(text(13)))
    inside, across = 2 * 7**2 + 5**2, 3**2  # segments of 5, 5 and 3 leaves with two rows more
    assert [count.attention for count in counts] == [(4 * 15 + 3) * pairs for pairs in (inside, inside, across)]


def test_layouts():
    assert layout_pattern("interleaved", 3) == "SCSCSC"
    assert layout_pattern("early", 9) == "SCSCSC" + "S" * 6
    assert layout_pattern("late", 9) == PUBLISHED["LC1"]
    assert layout_pattern("ad-hoc", 12) == "S" * 12 + "CCCC"
    assert layout_pattern("interleaved", 6) == layout_pattern("I1", 1)
    assert all(layout_pattern(style, 1) == "SC" for style in STYLES)
    assert all(layout_pattern(style, n).count("S") == n for style in STYLES for n in range(1, 14))


def test_published_layouts_are_those_of_the_authors():
    authors = {  # github.com/coastalcph/hierarchical-transformers, README; D: across segments
        "I1": "SD|SD|SD|SD|SD|SD",
        "I2": "S|SD|D|S|SD|D|S|SD|D",
        "I3": "S|SD|S|SD|S|SD|S|SD",
        "LC1": "S|S|S|S|S|S|SD|SD|SD",
        "LC2": "S|S|S|S|S|SD|D|S|SD|D",
        "EC1": "S|S|SD|D|S|SD|D|S|S|S",
        "EC2": "S|S|SD|SD|SD|S|S|S|S",
    }
    assert {name: layout.replace("|", "").replace("D", "C") for name, layout in authors.items()} == PUBLISHED


def test_pattern_determines_the_number_of_layers():
    assert HatConfig(layout="SSCSC", layers=7).layers == 3
    assert HatConfig(layout="EC2").layers == 9


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"layout": "SXC"}, "layout"),
        ({"layout": "CC"}, "layout"),
        ({"layout": ""}, "layout"),
        ({"layout": "interleavd"}, "layout"),
        ({"segment": 0}, "segment"),
        ({"segment_level": -1}, "segment_level"),
        ({"layers": 0}, "layers"),
        ({"feed_forward": 0}, "feed_forward"),
        ({"heads": 4}, "heads"),
        ({"dropout": 1.0}, "dropout"),
        ({"norm": "middle"}, "norm"),
        ({"returns": "words"}, "returns"),
        ({"activation": "sine"}, "activation"),
    ],
)
def test_invalid_sizes(changes, where):
    with pytest.raises(InvalidInput) as caught:
        HatConfig(**{**SIZES, **changes})
    assert caught.value.where == where


def test_segment_level_above_the_data():
    sentences = Hierarchy.from_nested([[3, 2], 4])
    check_levels(HatConfig(segment_level=2), sentences)
    check_levels(HatConfig(segment_level=0), Hierarchy.from_parents([-1, -1]))
    check_levels(HatConfig(segment_level=5), Hierarchy.flat([]))
    with pytest.raises(InvalidInput, match="segment_level: expected at most 2, the depth of these trees, got 3"):
        check_levels(HatConfig(segment_level=3), sentences)
    with pytest.raises(InvalidInput, match="at most 0"):
        check_levels(HatConfig(segment_level=1), Hierarchy.from_parents([-1, -1]))


def test_classifier_config_survives_json():
    config = ModelConfig(HatConfig(**SIZES, layout="SSC"), TEXT, outputs=7)
    again = ModelConfig.from_dict(json.loads(json.dumps(config.to_dict())))
    assert again == config
    assert Classifier(again)(collate(text(13, 1))).shape == (2, 7)


def test_parameters_grow_with_the_feed_forward_networks():
    def count(inner):
        return count_parameters(HatEncoder(HatConfig(**{**SIZES, "feed_forward": inner}), TEXT))

    assert [count(inner) - count(8) for inner in (9, 10)] == [4 * 31, 8 * 31]  # two layers of each kind


def test_a_class_per_leaf_needs_leaves():
    ModelConfig(HatConfig(**SIZES, returns="leaves"), TEXT, outputs=7, task="tokens")
    with pytest.raises(InvalidInput, match="expected an encoder that keeps leaves"):
        ModelConfig(HatConfig(**SIZES), TEXT, outputs=7, task="tokens")


def test_start_from_pretrained_weights():
    model, other = fresh(layout="SSC"), fresh(layout="SSC")
    inside = {k: v for k, v in other.state_dict().items() if not k.startswith(("layers.2.", "numbers."))}
    across = {k: v.clone() for k, v in model.state_dict().items() if k not in inside}
    model.start_from(inside)
    assert all(torch.equal(v, {**inside, **across}[k]) for k, v in model.state_dict().items())
    for weights, match in (
        ({k: v for k, v in inside.items() if k != "layers.1.inner.bias"}, "layers.1.inner.bias: missing"),
        ({**inside, "marks.weight": torch.zeros(2, 15)}, r"marks.weight: expected shape \(1, 15\), got \(2, 15\)"),
        ({**inside, "layers.3.inner.bias": torch.zeros(17)}, "layers.3.inner.bias: unknown weight"),
    ):
        with pytest.raises(InvalidInput, match=match):
            model.start_from(weights)


def test_config_names_its_architecture():
    assert asdict(HatConfig())["architecture"] == "hat"
    assert not HatConfig().keeps_leaves
    assert HatConfig(returns="leaves").keeps_leaves
