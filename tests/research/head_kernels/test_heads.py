"""Observation and removal of heads in encoders of hsa."""

import numpy as np
import pytest
import torch

from hsa.errors import InvalidInput, Unsupported
from hsa.research.head_kernels.heads import EncoderHeads, collect
from hsa.research.head_kernels.pruning import accuracy, cosine, pruning_curves, r_squared
from tests.tasks import classifier, data

HEADS, LAYERS = 3, 2


def model_of(kind="hierarchical", **changes):
    """Return a model with large random weights, so that heads differ."""
    model = classifier(kind, width=15, heads=HEADS, layers=LAYERS, **changes).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model


def answer_of(model, examples):
    return lambda chosen: model(examples.select(chosen).batch)


BATCHES = [np.array([4, 1]), np.array([0]), np.array([3, 2])]


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale", "clustered", "flat", "none"])
@pytest.mark.parametrize("fusion", ["concatenation", "talking", "collaborative", "over-heads"])
def test_outputs_are_the_inputs_of_the_output_projection(kind, fusion):
    """They do not depend on the examples in the same batch."""
    if (kind in ("clustered", "none") and fusion == "talking") or (kind == "none" and fusion == "collaborative"):
        pytest.skip("nothing to mix or compare")
    model, examples = model_of(kind, fusion=fusion, near=0), data(5)
    features = collect(EncoderHeads(model.encoder), answer_of(model, examples), BATCHES)
    assert features.heads == [(n, m) for n in range(LAYERS) for m in range(HEADS)]
    torch.testing.assert_close(features.answers, model(examples.batch).float())
    projected = []
    hooks = [
        layer.output.register_forward_pre_hook(
            lambda module, inputs: projected.append(inputs[0].unflatten(1, (HEADS, -1)))
        )
        for layer in model.encoder.layers
    ]
    entered = []
    hooks += [
        layer.register_forward_pre_hook(lambda module, inputs: entered.append(inputs[0]))
        for layer in model.encoder.layers
    ]
    with torch.no_grad():
        for i in range(5):
            model(examples.select([i]).batch)
    for hook in hooks:
        hook.remove()
    for number, (layer, head) in enumerate(features.heads):
        for i in range(5):
            expected = projected[i * LAYERS + layer][:, head]
            if fusion == "over-heads":
                weights = model.encoder.layers[layer].fusion.weights(entered[i * LAYERS + layer])
                expected = expected / weights[:, head, None]
                mean = weights[:, head].mean().double() / LAYERS
                torch.testing.assert_close(features.weights[i, number], mean)
            torch.testing.assert_close(features.outputs[number][i], expected.mean(0), rtol=1e-5, atol=1e-7)
    if fusion == "over-heads":
        torch.testing.assert_close(features.weights.sum(1), torch.ones(5, dtype=torch.float64))
    else:
        assert features.weights is None


@pytest.mark.parametrize("fusion", ["concatenation", "talking", "collaborative"])
def test_similarities_are_those_that_attention_uses(fusion):
    """Their softmax over one example reproduces the outputs."""
    model, examples = model_of("flat", fusion=fusion, position_width=0), data(5)
    longest = int(examples.lengths.argmax())
    one, leaves = [np.array([longest])], int(examples.lengths[longest])
    assert leaves > 3
    seen = {}

    def see(layer, q, k, out, lengths, scale, weights=None):
        seen[layer] = q, k, scale, list(lengths)

    values = []
    hook = model.encoder.layers[0].attention.register_forward_hook(lambda m, i, o: values.append((i[2], o)))
    with torch.no_grad(), EncoderHeads(model.encoder).watching(see):
        answer_of(model, examples)(one[0])
    hook.remove()
    q, k, scale, lengths = seen[0]
    assert lengths == [leaves]
    (v, out), mixing = values[0], model.encoder.layers[0].fusion.mixing
    weights = (scale * torch.einsum("ihd,jhd->hij", q, k)).softmax(-1)
    if mixing is not None:
        weights = mixing.mix_weights(weights)
    torch.testing.assert_close(torch.einsum("hij,jhd->ihd", weights, v), out)
    features = collect(EncoderHeads(model.encoder), answer_of(model, examples), one, tokens=leaves)
    grams, shares = features.similarity_grams()
    assert grams.shape == (LAYERS * HEADS, leaves, leaves)
    order = np.random.default_rng((0, longest)).permutation(leaves)
    logits = scale * torch.einsum("ihd,jhd->hij", q[order], k[order])
    torch.testing.assert_close(grams[:HEADS], (logits + logits.mT) / 2)
    assert all(0 < share < 1 for share in shares)


def test_tokens_are_sampled_from_all_examples():
    model, examples = model_of(), data(5)
    heads, answer = EncoderHeads(model.encoder), answer_of(model, examples)
    result = collect(heads, answer, BATCHES, tokens=10)
    assert len(result.queries[0]) == int(np.minimum(examples.lengths, 2).sum())
    alone = collect(heads, answer, [np.array([i]) for i in (4, 1, 0, 3, 2)], tokens=10)
    for one, other in zip(result.keys, alone.keys, strict=True):
        torch.testing.assert_close(one, other)  # the same tokens, however examples are batched
    other = collect(heads, answer, BATCHES, tokens=10, seed=1)
    assert not torch.equal(other.keys[0], result.keys[0])


@pytest.mark.parametrize("kind", ["hierarchical", "flat", "none"])
def test_removed_heads(kind):
    """Removing heads equals setting their columns of the output projection to 0."""
    model, examples = model_of(kind), data(5)
    heads, every = EncoderHeads(model.encoder), np.arange(5)
    with torch.no_grad():
        whole = answer_of(model, examples)(every)
        with heads.without([(0, 1), (1, 0), (1, 2)]):
            less = answer_of(model, examples)(every)
        torch.testing.assert_close(answer_of(model, examples)(every), whole)
        for layer, head in [(0, 1), (1, 0), (1, 2)]:
            model.encoder.layers[layer].output.weight[:, 5 * head : 5 * head + 5] = 0
        torch.testing.assert_close(answer_of(model, examples)(every), less)
    assert (whole - less).abs().max() > 1e-3


def test_curves():
    model, examples = model_of(), data(5)
    heads, answer = EncoderHeads(model.encoder), answer_of(model, examples)
    features = collect(heads, answer, BATCHES)
    order = np.concatenate(BATCHES)
    done = []
    curves = pruning_curves(
        heads,
        features.heads,
        answer,
        BATCHES,
        {"one": [order], "draws": [order[::-1], order]},
        cosine(features.answers[order]),
        points=6,
        watch=done.append,
    )
    assert [curve.name for curve in curves] == ["one", "draws"]
    assert curves[0].removed == list(range(7))
    assert curves[0].scores[0][0] == pytest.approx(1)
    assert curves[1].scores[1] == curves[0].scores[0]
    assert curves[1].scores[0][-1] == curves[0].scores[0][-1]  # all heads removed
    assert len(done) == 21
    with torch.no_grad(), heads.without([features.heads[i] for i in order[:3]]):
        expected = cosine(features.answers)(answer(np.arange(5)))
    assert curves[0].scores[0][3] == pytest.approx(expected, rel=1e-6)
    assert expected < 0.999


def test_scores():
    answers = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(np.array([1, 0, 0]))(answers) == pytest.approx(2 / 3)
    assert r_squared(np.array([1.0, 2.0, 3.0]))(torch.tensor([[1.0], [2.0], [4.0]])) == pytest.approx(0.5)
    assert cosine(answers)(2 * answers) == pytest.approx(1)
    assert cosine(answers)(-answers) == pytest.approx(-1)


def test_hooks_are_removed_after_an_error():
    model = model_of()
    heads = EncoderHeads(model.encoder)

    def refuse(*_):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        collect(heads, refuse, BATCHES)
    with pytest.raises(RuntimeError, match="no"), heads.without([(0, 0)]):
        refuse()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_unsupported_models():
    with pytest.raises(Unsupported, match="bottom-up"):
        EncoderHeads(model_of("bottom-up").encoder)
    examples = data(5)
    for model, message in [
        (model_of("none"), "compare: expected 'outputs', .* compare a query with a key, got 'similarity'"),
        (model_of(pool="families"), "compare: expected 'outputs', .* pool tokens, got 'similarity'"),
    ]:
        with pytest.raises(InvalidInput, match=message):
            collect(EncoderHeads(model.encoder), answer_of(model, examples), BATCHES, tokens=9)
    model = model_of(pool="families")
    features = collect(EncoderHeads(model.encoder), answer_of(model, examples), BATCHES)
    assert features.outputs[-1].shape == (5, 5)
    with pytest.raises(InvalidInput, match="no queries and keys"):
        features.similarity_grams()
