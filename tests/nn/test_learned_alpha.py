"""Learned α: always in range, in float32 whatever the dtype of the model, without weight decay, and used by attention."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hsa import Entmax, Hierarchy, hierarchical_attention
from hsa.attention.hierarchical.entmax import entries as sparse_entries
from hsa.errors import InvalidInput
from hsa.models.options import ModelOptions
from hsa.nn import attention as attentions
from hsa.nn.attention import Hierarchical, Multiscale
from hsa.nn.encoder_config import EncoderConfig
from hsa.nn.learned_alpha import LOWEST, LearnedAlpha
from hsa.signals.batch import collate
from hsa.training.loop import parameter_groups
from hsa.training.options import TrainingOptions
from tests.forests import forests, random_inputs
from tests.model_inputs import encoder, readable
from tests.tasks import classifier, data, trainer

TREE = Hierarchy.from_nested([[[[3, 2], 4], [2, 1, 5]], [7]])  # trees of heights 4 and 1
EXTREMES = (1e4, -1e4, 1e30, -1e30, 3.4e38)


def filled(value, levels=2, heads=3, dtype=torch.float32):
    alpha = LearnedAlpha(levels, heads).to(dtype)
    with torch.no_grad():
        alpha.raw.copy_(
            torch.full_like(alpha.raw, value, dtype=torch.float64)
        )  # may overflow to infinity in half precision
    return alpha


def attend(alpha, dtype=torch.float32, **options):
    q, k, v = random_inputs(TREE, 5, heads=3, kv_heads=3, dtype=dtype)
    return Hierarchical(alpha=alpha, **options)(q, k, v, TREE, None)


# The range


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@given(raw=st.one_of(st.floats(-30, 30), st.sampled_from(EXTREMES)))
def test_alpha_cannot_leave_its_range(dtype, raw):
    result = filled(raw, dtype=dtype)
    alpha = result()
    assert alpha.shape == (2, 3)
    assert alpha.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert bool(((alpha >= LOWEST) & (alpha <= 2)).all())
    Entmax(alpha)  # raises no error
    alpha.sum().backward()
    assert bool(result.raw.grad.isfinite().all())


def test_alpha_starts_at_one_and_a_half_and_reaches_both_ends():
    torch.testing.assert_close(LearnedAlpha(5, 7)(), torch.full((5, 7), 1.5))
    assert (filled(1e4)() == 2).all()
    assert (filled(-1e4)() == LOWEST).all()
    assert LOWEST > 1


@pytest.mark.parametrize("raw", EXTREMES)
def test_attention_at_the_ends(raw):
    """Check that rows sum to one and that results and gradients are finite."""
    alpha = filled(raw)
    q, k, v = random_inputs(TREE, 5, heads=3, kv_heads=3, dtype=torch.float32, requires_grad=True)
    layer = Hierarchical(alpha=alpha, include_self=True)
    ones = layer(q, k, torch.ones_like(v), TREE, None)
    torch.testing.assert_close(ones, torch.ones_like(ones), atol=1e-5, rtol=0)
    layer(q, k, v, TREE, None).square().sum().backward()
    assert all(bool(x.grad.isfinite().all()) for x in (q, k, v, alpha.raw))


def test_gradcheck():
    alpha = LearnedAlpha(2, 3).double()
    q, k, v = random_inputs(TREE, 5, heads=3, kv_heads=3)

    def attended(raw):
        result = torch.func.functional_call(alpha, {"raw": raw}, ())
        return hierarchical_attention(q, k, v, TREE, normalizer=Entmax(result))

    raw = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) / 10
    assert torch.autograd.gradcheck(attended, raw.requires_grad_())


# Attention


def test_a_fixed_alpha_and_a_learned_one_of_equal_value_agree():
    for layer in (Hierarchical, lambda **options: Multiscale(3, **options)):
        q, k, v = random_inputs(TREE, 5, heads=3, kv_heads=3, dtype=torch.float32)
        outs = [layer(alpha=alpha)(q, k, v, TREE, None) for alpha in (1.5, LearnedAlpha(3, 3), None)]
        torch.testing.assert_close(outs[0], outs[1], atol=1e-5, rtol=0)
        assert (outs[0] - outs[2]).abs().max() > 0.01


def test_taller_families_share_the_last_row():
    alpha = LearnedAlpha(2, 3)
    with torch.no_grad():
        alpha.raw.copy_(torch.tensor([[0.1, -0.1, 0.0], [-0.2, 0.3, 0.05]]))
    rows = alpha().detach()
    q, k, v = random_inputs(TREE, 5, heads=3, kv_heads=3, dtype=torch.float32)
    wanted = hierarchical_attention(q, k, v, TREE, normalizer=Entmax(rows[[0, 1, 1, 1]]))
    torch.testing.assert_close(Hierarchical(alpha=alpha)(q, k, v, TREE, None), wanted, atol=1e-5, rtol=0)


@settings(max_examples=15)
@given(forests(), st.sampled_from(["hierarchical", "multiscale"]))
def test_alpha_1_is_softmax(hierarchy, kind):
    q, k, v = random_inputs(hierarchy, 3)
    layers = {"hierarchical": Hierarchical, "multiscale": lambda **options: Multiscale(6, **options)}
    softmax, one = (layers[kind](alpha=alpha)(q, k, v, hierarchy, None) for alpha in (None, 1.0))
    assert torch.equal(softmax, one)


def seen_by_operators(monkeypatch, model, example):
    """Run the model and record the dtype of the queries and the normalizer of each operator call."""
    seen = []
    for name in ("hierarchical_attention", "multiscale_attention"):
        operator = getattr(attentions, name)

        def watch(q, *arguments, operator=operator, normalizer, **options):
            seen.append((q.dtype, normalizer))
            return operator(q, *arguments, normalizer=normalizer, **options)

        monkeypatch.setattr(attentions, name, watch)
    out = model(example)
    return out, seen


@pytest.mark.parametrize("kind", ["hierarchical", "multiscale"])
def test_alpha_stays_in_float32_under_autocast(monkeypatch, kind):
    model = classifier(kind, layers=2, entmax="learned").eval()
    for layer in model.encoder.layers:
        with torch.no_grad():
            layer.attention.alpha.raw.fill_(0.1234)
    batch = data(5).batch
    exact = model(batch)
    with torch.autocast("cpu", torch.bfloat16):
        out, seen = seen_by_operators(monkeypatch, model, batch)
    assert len(seen) == 2
    for dtype, normalizer in seen:
        assert dtype == torch.bfloat16
        assert normalizer.alpha.dtype == torch.float32
        torch.testing.assert_close(normalizer.alpha, model.encoder.layers[0].attention.alpha(), atol=0, rtol=0)
    torch.testing.assert_close(out.float(), exact, atol=0.05, rtol=0)


def test_every_layer_level_and_head_has_its_own_alpha():
    model = classifier("hierarchical", layers=3, entmax="learned", entmax_levels=4)
    shapes = [tuple(p.shape) for name, p in model.named_parameters() if name.endswith("alpha.raw")]
    assert shapes == [(4, 2)] * 3
    loss = model(data(9).batch).square().sum()
    loss.backward()
    for layer in model.encoder.layers:
        moved = layer.attention.alpha.raw.grad.abs().sum(1) > 0
        assert moved.tolist() == [True, True, False, False]  # the data have sentences and documents


@settings(max_examples=10)
@given(readable(names=("text",), kinds=("sequence",), trees=(1, 3)))
def test_the_encoder_starts_as_with_a_fixed_alpha(listed):
    learned, number = encoder(entmax="learned"), encoder(entmax=1.5)
    weights = learned.state_dict()
    number.load_state_dict({name: weight for name, weight in weights.items() if not name.endswith("alpha.raw")})
    for layer in learned.layers:
        with torch.no_grad():
            layer.attention.alpha.raw.copy_(LearnedAlpha(3, 3).raw)
    torch.testing.assert_close(learned(collate(listed))[0], number(collate(listed))[0], atol=1e-6, rtol=0)


def test_prepare_builds_the_entries_of_entmax(monkeypatch):
    model = classifier("hierarchical", entmax="learned", include_self=True)
    batch = data(7).batch
    model.encoder.prepare(batch)
    monkeypatch.setattr(sparse_entries, "_bucket_entries", None)  # a call would fail
    model(batch)


# Training


def test_alpha_has_no_weight_decay():
    model = classifier("hierarchical", entmax="learned", layers=2)
    decayed, others = parameter_groups(model, TrainingOptions(weight_decay=0.3))
    raws = {id(layer.attention.alpha.raw) for layer in model.encoder.layers}
    assert len(raws) == 2
    assert raws <= {id(p) for p in others["params"]}
    assert not raws & {id(p) for p in decayed["params"]}
    assert (decayed["weight_decay"], others["weight_decay"]) == (0.3, 0.0)


def test_training_changes_alpha():
    model = classifier("hierarchical", entmax="learned")
    trainer(TrainingOptions(epochs=2, learning_rate=1e-2, batch_size=5, patience=0), model=model).fit()
    alpha = model.encoder.layers[0].attention.alpha()[:2]
    assert (alpha - 1.5).abs().min() > 1e-4
    assert (alpha - 1.5).abs().max() < 0.5


# Errors


@pytest.mark.parametrize("alpha", [0.5, 2.1, float("nan"), True, "leaned", -1])
@pytest.mark.parametrize("make", [EncoderConfig, ModelOptions])
def test_invalid_alpha(make, alpha):
    with pytest.raises(
        InvalidInput, match=r"entmax: expected 'learned', or a number from 1 .softmax. to 2 .sparsemax., got "
    ):
        make(entmax=alpha)


@pytest.mark.parametrize("kind", ["flat", "clustered", "bottom-up", "none", "trilinear", "hierarchical-trilinear"])
def test_kinds_without_entmax(kind):
    with pytest.raises(
        InvalidInput, match=f"entmax: expected one of the kinds .*, got 1.5 for attention of the kind '{kind}'"
    ):
        EncoderConfig(kind=kind, entmax=1.5)


def test_options_that_do_not_fit_entmax():
    config = EncoderConfig(entmax="learned")
    with pytest.raises(InvalidInput, match=r"entmax: expected a fusion .*, got learned with talking heads"):
        replace(config, fusion="talking")
    with pytest.raises(InvalidInput, match=r"entmax_levels: expected 1 or more, got 0"):
        replace(config, entmax_levels=0)
