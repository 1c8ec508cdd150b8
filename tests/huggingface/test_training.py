"""Gradients, dropout, checkpoints, precision, and torch.compile in converted models."""

import pytest
import torch

from hsa.huggingface import convert
from hsa.huggingface.sequences import Sequences
from hsa.huggingface.settings import LayerSettings
from tests.huggingface.tiny_models import CLS, SEP, attend_layer, inputs_of, random_ids, run, tiny, word_tokenizer

WAYS = {
    "clustered": {"branching": (4, 2), "top_k": 1},
    "special": {"kind": "multiscale", "branching": (4, 2), "top_k": 1, "sinks": "special"},
    "hierarchical": {"kind": "hierarchical", "branching": (4, 2)},
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}


def batch(seed):
    ids, mask = random_ids([41, 29] if seed % 2 else [33, 38], seed=seed)
    ids[:, 0], ids[:, 10 + seed] = CLS, SEP
    return {"input_ids": ids, "attention_mask": mask}


def gradients(model, *losses):
    """Return the gradients of all losses, computed after all forward passes."""
    model.zero_grad()
    for loss in reversed([loss() for loss in losses]):
        loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def loss_of(model, inputs):
    return lambda: (model(**inputs)[0][inputs["attention_mask"].bool()] ** 3).mean()


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_all_groups_exact_gives_the_gradients_of_the_exact_model(family):
    model = tiny(family, **(STILL if family == "bert" else {})).train()
    inputs, _ = inputs_of(family)
    exact = gradients(model, loss_of(model, inputs))
    convert(model, kind="multiscale", branching=(4, 2), top_k=0, near=99)
    for name, gradient in gradients(model, loss_of(model, inputs)).items():
        torch.testing.assert_close(gradient, exact[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_equal_finite_differences(way):
    """Few groups are exact, and small steps do not change the selection."""
    model = convert(tiny("bert", **STILL).train(), tokenizer=word_tokenizer(), **WAYS[way])
    loss = loss_of(model, batch(1))
    result = gradients(model, loss)
    for name in ("encoder.layer.0.attention.self.query.weight", "encoder.layer.1.attention.self.value.bias"):
        weight = model.get_parameter(name)
        direction = torch.randn_like(weight)
        with torch.no_grad():
            weight += 1e-6 * direction
            above = loss()
            weight -= 2e-6 * direction
            slope = (above - loss()) / 2e-6
            weight += 1e-6 * direction
        torch.testing.assert_close((result[name] * direction).sum(), slope, rtol=1e-4, atol=1e-6)
        assert result[name].abs().max() > 1e-6


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(way, reentrant):
    """Layers run again in the backward pass, after another batch was processed."""
    model = convert(tiny("bert", **STILL).train(), tokenizer=word_tokenizer(), **WAYS[way])
    losses = [loss_of(model, batch(seed)) for seed in (1, 2, 3)]
    expected = gradients(model, *losses)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    result = gradients(model, *losses)
    assert result.keys() == expected.keys()
    for name, gradient in result.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", WAYS)
def test_dropout_is_for_training(way):
    model = tiny("bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.5)
    convert(model, tokenizer=word_tokenizer(), **WAYS[way])
    still = run(model, **batch(1))
    assert torch.equal(run(model, **batch(1)), still)
    model.train()
    assert (run(model, **batch(1)) - run(model, **batch(1))).abs().max() > 1e-3
    torch.manual_seed(3)
    first = run(model, **batch(1))
    torch.manual_seed(3)
    assert torch.equal(run(model, **batch(1)), first)
    assert all(g.isfinite().all() for g in gradients(model, loss_of(model, batch(1))).values())
    assert torch.equal(run(model.eval(), **batch(1)), still)


@pytest.mark.parametrize("way", ["clustered", "hierarchical"])
def test_dropout_is_right_on_average(way):
    settings = LayerSettings(**WAYS[way])
    q, k, v = torch.randn(3, 1, 3, 19, 5, dtype=torch.float64).unbind(0)
    sequences = Sequences(torch.ones(1, 19, dtype=torch.bool), causal=False)
    still = attend_layer(settings, q, k, v, sequences).values
    draws = torch.stack([attend_layer(settings, q, k, v, sequences, dropout_p=0.3).values for _ in range(300)])
    error = draws.std(0) / 300**0.5
    assert ((draws.mean(0) - still).abs() < 5 * error).all()
    assert (draws.std(0) > 0).all()


def test_without_gradients_first():
    """Trees built in inference mode can be used in training."""
    model = convert(tiny("bert", **STILL), tokenizer=word_tokenizer(), **WAYS["special"])
    inputs = {**batch(5), "position_ids": torch.arange(41)[None]}
    with torch.inference_mode():
        expected = model(**inputs)[0]
    torch.testing.assert_close(model(**inputs)[0], expected)
    assert gradients(model, loss_of(model, batch(5)))


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_low_precision(family):
    inputs, counts = inputs_of(family)
    model = tiny(family, initializer_range=0.1)
    exact = run(model, **inputs)[counts]
    windows = {"kind": "multiscale", "branching": (4, 2), "top_k": 0, "near": 99}
    shape = {"branching": (4, 2)} if family == "bert" else {"branching": (4, 2, 2), "tile": 8}
    for settings in (windows, {**shape, "top_k": 9, "sinks": None}):
        half = convert(tiny(family, initializer_range=0.1, dtype=torch.bfloat16), **settings)
        result = run(half, **inputs)
        assert result.dtype == torch.bfloat16
        torch.testing.assert_close(result[counts].double(), exact, rtol=0.1, atol=0.1)
        single = convert(tiny(family, initializer_range=0.1, dtype=torch.float32), **settings)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            torch.testing.assert_close(run(single, **inputs)[counts].double(), exact, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("family", ["bert", pytest.param("llama", marks=pytest.mark.slow)])
def test_compiled(family):
    """Attention runs between compiled parts and still gets the ids of its mask."""
    torch._dynamo.reset()
    way = WAYS["special"] if family == "bert" else {"branching": (4, 2, 2), "tile": 8, "top_k": 1}
    model = convert(tiny(family), [1], tokenizer=word_tokenizer(), **way)
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(model, backend=backend)
    for seed in (1, 3):
        inputs = {**batch(seed), "use_cache": False} if family == "llama" else batch(seed)
        torch.testing.assert_close(run(compiled, **inputs), run(model, **inputs))
    assert graphs
    torch._dynamo.reset()
