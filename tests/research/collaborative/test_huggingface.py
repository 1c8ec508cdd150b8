"""Collaborative heads in pre-trained encoders: exact with all channels, and refused for models without a bilinear form."""

import copy
import pickle

import pytest
import torch

from hsa.errors import InvalidInput, Unsupported
from hsa.huggingface import convert, revert
from hsa.research.collaborative import collaborate, prepare_collaborative
from tests.huggingface.tiny_models import inputs_of, random_ids, run, tiny, transformers

BERT_LIKE = ("bert", "roberta", "electra")
CHANNELS, WIDTH, HEADS, LAYERS = 32, 32, 4, 2


def batches(count=3):
    return [dict(zip(("input_ids", "attention_mask"), random_ids(seed=seed), strict=True)) for seed in range(count)]


def distance(model, changed, inputs, kept):
    """Return the relative distance of outputs, over all tokens but padding."""
    before, after = run(model, **inputs)[kept], run(changed, **inputs)[kept]
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", BERT_LIKE)
def test_all_channels_change_nothing(family, implementation):
    model = tiny(family)
    model.set_attn_implementation(implementation)
    inputs, kept = inputs_of(family)
    changed = copy.deepcopy(model)
    report = collaborate(changed, 1.0)
    assert distance(model, changed, inputs, kept) < 1e-12
    assert all(layer.error < 1e-12 for layer in report.layers)


def test_padding_stays_hidden():
    model = tiny("bert")
    collaborate(model, 0.5)
    (ids, mask), other = random_ids(), random_ids([41] * 3, seed=7)[0]
    kept = mask.bool()
    torch.testing.assert_close(
        run(model, input_ids=torch.where(kept, ids, other), attention_mask=mask)[kept],
        run(model, input_ids=ids, attention_mask=mask)[kept],
    )
    alone = run(model, input_ids=ids[1:2, : int(mask[1].sum())])
    torch.testing.assert_close(run(model, input_ids=ids, attention_mask=mask)[1, : alone.shape[1]], alone[0])


def test_implementations_agree_with_fewer_channels():
    model = tiny("roberta")
    collaborate(model, 19)
    inputs, kept = inputs_of("roberta")
    other = copy.deepcopy(model)
    other.set_attn_implementation("eager")
    assert distance(model, other, inputs, kept) < 1e-12


def test_layer_is_softmax_attention_with_mixed_channels():
    model = tiny("bert")
    collaborate(model, 13)
    layer = model.encoder.layer[0].attention.self
    x = torch.randn(1, 7, WIDTH, dtype=torch.float64)
    queries, keys = layer.query(x)[0], layer.key(x)[0]
    assert queries.shape == (7, 13)
    logits = torch.einsum("hr,ir,jr->hij", layer.mixing, queries, keys) * (CHANNELS // HEADS) ** -0.5
    values = layer.value(x)[0].unflatten(-1, (HEADS, -1))
    expected = torch.einsum("hij,jhd->ihd", logits.softmax(-1), values).flatten(1)
    torch.testing.assert_close(layer(x)[0][0], expected)


def test_error_of_each_layer_falls_with_the_channels():
    model = tiny("bert")
    errors = [[x.error for x in collaborate(copy.deepcopy(model), share).layers] for share in (0.25, 0.5, 0.75, 1.0)]
    for layer in zip(*errors, strict=True):
        assert list(layer) == sorted(set(layer), reverse=True)


@pytest.mark.parametrize("family", BERT_LIKE)
def test_inputs_improve_the_outputs(family):
    model = tiny(family)
    inputs, kept = inputs_of(family, seed=11)
    plain, seen = copy.deepcopy(model), copy.deepcopy(model)
    collaborate(plain, 24)
    report = collaborate(seen, 24, inputs=batches())
    assert distance(model, seen, inputs, kept) < distance(model, plain, inputs, kept)
    assert all(0 < layer.logit_error < layer.error for layer in report.layers)


def test_padding_is_not_used_for_the_fit():
    model = tiny("bert")
    (ids, mask), other = random_ids(), random_ids([41] * 3, seed=7)[0]
    reports = []
    for tokens in (ids, torch.where(mask.bool(), ids, other)):
        inputs = [{"input_ids": tokens, "attention_mask": mask}]
        reports.append(collaborate(copy.deepcopy(model), 11, inputs=inputs))
    for one, two in zip(reports[0].layers, reports[1].layers, strict=True):
        assert one.logit_error == pytest.approx(two.logit_error, rel=1e-6)


def test_report():
    model = tiny("electra")
    before = sum(parameter.numel() for parameter in model.parameters())
    report = collaborate(model, 0.5)
    after = sum(parameter.numel() for parameter in model.parameters())
    assert (report.shared_dim, report.channels) == (16, CHANNELS)
    assert (report.model_parameters_before, report.model_parameters_after) == (before, after)
    assert report.saved == before - after == LAYERS * (2 * (CHANNELS - 16) * (WIDTH + 1) - HEADS * 16)
    assert [layer.parameters_before for layer in report.layers] == [2 * CHANNELS * (WIDTH + 1)] * LAYERS
    assert sum(layer.parameters_before - layer.parameters_after for layer in report.layers) == report.saved
    lines = str(report).splitlines()
    assert lines[0] == "16 shared channels in place of 32"
    assert lines[1].split() == ["layer", "q/k", "before", "q/k", "after", "error", "logit", "error"]
    assert lines[2].split()[:3] == ["0", "2,112", "1,120"]
    assert lines[-3].split() == ["all", "4,224", "2,240"]
    assert lines[-1] == f"saved: {report.saved:,} ({report.saved / before:.1%})"


def test_gradients_reach_every_parameter_and_training_mode_is_kept():
    model = tiny("bert", dtype=torch.float32).train()
    collaborate(model, 0.5, inputs=batches(1))
    assert all(module.training for module in model.modules())
    inputs, _ = inputs_of("bert")
    model(**inputs).last_hidden_state.square().sum().backward()
    layer = model.encoder.layer[1].attention.self
    for parameter in (layer.mixing, layer.query.weight, layer.query.bias, layer.key.weight, layer.value.weight):
        assert float(parameter.grad.abs().max()) > 0


def test_dropout_of_weights_is_kept():
    model = tiny("bert", attention_probs_dropout_prob=0.5, hidden_dropout_prob=0.0)
    collaborate(model, 0.5)
    inputs, _ = inputs_of("bert")
    assert torch.equal(run(model, **inputs), run(model, **inputs))
    model.train()
    assert not torch.equal(run(model, **inputs), run(model, **inputs))


def test_frozen_parameters_stay_frozen():
    model = tiny("bert").requires_grad_(False)
    collaborate(model, 0.5)
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_copies_and_pickles_run():
    model = tiny("roberta")
    collaborate(model, 0.5)
    inputs, _ = inputs_of("roberta")
    expected = run(model, **inputs)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(run(other, **inputs), expected)


def test_attention_weights_can_be_returned():
    """Use new models, because transformers looks up the classes of layers only once."""
    inputs, kept = inputs_of("bert")
    models = tiny("bert"), tiny("bert")
    collaborate(models[1], 1.0)
    attentions = []
    for model in models:
        model.set_attn_implementation("eager")
        attentions.append(model(**inputs, output_attentions=True).attentions)
    assert [len(result) for result in attentions] == [LAYERS, LAYERS]
    for one, two in zip(*attentions, strict=True):
        rows = kept[:, None, :, None].expand_as(one)
        torch.testing.assert_close(one[rows], two[rows])


def test_saved_model_is_loaded(tmp_path):
    from safetensors.torch import load_file

    model = tiny("bert", dtype=torch.float32)
    collaborate(model, 13)
    model.save_pretrained(tmp_path)
    torch.manual_seed(9)
    other = transformers.AutoModel.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).eval()
    prepare_collaborative(other)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    inputs, _ = inputs_of("bert")
    assert torch.equal(run(other, **inputs), run(model, **inputs))


def test_prepare_needs_shared_dim():
    with pytest.raises(InvalidInput, match="shared_dim: not given, and not in the config; expected the number"):
        prepare_collaborative(tiny("bert"))
    model = tiny("bert")
    prepare_collaborative(model, 0.25)
    assert model.encoder.layer[0].attention.self.mixing.shape == (HEADS, 8)


def test_classifier_with_an_encoder():
    torch.manual_seed(1)
    config = tiny("bert").config
    model = transformers.BertForSequenceClassification(config).double().eval()
    inputs, _ = inputs_of("bert")
    expected = run(model, **inputs)
    collaborate(model, 1.0, inputs=batches(1))
    torch.testing.assert_close(run(model, **inputs), expected, atol=1e-10, rtol=0)


def test_model_with_collaborative_heads_can_be_converted():
    model = tiny("bert")
    collaborate(model, 1.0)
    inputs, kept = inputs_of("bert")
    expected = run(model, **inputs)
    convert(model, kind="multiscale", branching=(4, 2), top_k=99)
    torch.testing.assert_close(run(model, **inputs)[kept], expected[kept], atol=1e-10, rtol=0)
    revert(model)
    torch.testing.assert_close(run(model, **inputs)[kept], expected[kept])


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("llama", "LlamaAttention rotates queries and keys"),
        ("modernbert", "ModernBertAttention rotates queries and keys"),
        ("qwen3", "rotates"),
        ("distilbert", "has the parts q_lin, k_lin"),
        ("gpt2", "has the parts c_attn"),
        ("vit", "instead of linear layers named query, key and value|its dropout"),  # before transformers 5.10
        ("bart", "has a decoder"),
    ],
)
def test_other_families_are_refused_and_unchanged(family, reason):
    model = tiny(family)
    names = [name for name, _ in model.named_parameters()]
    with pytest.raises(Unsupported, match=reason):
        collaborate(model, 0.5)
    assert [name for name, _ in model.named_parameters()] == names


def test_layer_that_does_more_is_refused():
    """An unknown layer may change queries and keys without any sign in its signature."""
    model = tiny("bert")
    layer = model.encoder.layer[1].attention.self

    class Sharper(type(layer)):
        def forward(self, hidden_states, attention_mask=None, **kwargs):
            hidden_states = hidden_states * 2
            return super().forward(hidden_states, attention_mask, **kwargs)  # ALL_ATTENTION_FUNCTIONS

    layer.__class__ = Sharper
    with pytest.raises(Unsupported, match="layer 1: Sharper does more than compare its projections"):
        collaborate(model, 0.5)


def test_layer_that_normalises_is_refused():
    model = tiny("bert")
    model.encoder.layer[0].attention.self.q_norm = torch.nn.LayerNorm(8)
    with pytest.raises(Unsupported, match="layer 0: BertSelfAttention normalises queries and keys"):
        collaborate(model, 0.5)


def test_decoders_are_refused():
    model = tiny("bert", is_decoder=True)
    with pytest.raises(Unsupported, match="belongs to a decoder"):
        collaborate(model, 0.5)


def test_other_objects_and_changed_models_are_refused():
    with pytest.raises(Unsupported, match="Linear is not a transformers model"):
        collaborate(torch.nn.Linear(3, 5), 0.5)
    model = tiny("bert")
    collaborate(model, 0.5)
    with pytest.raises(Unsupported, match="already has collaborative heads"):
        collaborate(model, 0.5)
    model = tiny("bert")
    convert(model, kind="multiscale", branching=(4, 2))
    with pytest.raises(InvalidInput, match="model: expected a model with exact attention, got a converted model"):
        collaborate(model, 0.5)


@pytest.mark.parametrize("shared_dim", [0, CHANNELS + 1, 0.0, 1.5, -0.5, True, "half", float("nan")])
def test_shared_dim_out_of_range(shared_dim):
    with pytest.raises(InvalidInput, match=rf"shared_dim: expected 1 to 32 channels .*, got {shared_dim!r}"):
        collaborate(tiny("bert"), shared_dim)


def test_empty_inputs():
    model = tiny("bert")
    with pytest.raises(InvalidInput, match="inputs: empty; expected at least one batch"):
        collaborate(model, 0.5, inputs=[])
    assert not any(module._forward_pre_hooks for module in model.modules())
