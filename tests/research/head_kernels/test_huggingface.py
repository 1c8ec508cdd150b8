"""Observation and removal of heads in transformers encoders."""

import numpy as np
import pytest
import torch

from hsa.errors import HsaError, InvalidInput, Unsupported
from hsa.huggingface import convert, revert
from hsa.research.head_kernels.heads import collect
from hsa.research.head_kernels.huggingface import NAME, TransformerHeads, load_encoder
from tests.huggingface.fidelity.small import classifier, language_model, save
from tests.huggingface.tiny_models import LENGTHS, inputs_of, random_ids, run, tiny, transformers

ENCODERS = ("bert", "roberta", "distilbert", "electra", "modernbert", "vit")
PROJECTIONS = {  # output projection of a layer
    "bert": lambda m, n: m.encoder.layer[n].attention.output.dense,
    "roberta": lambda m, n: m.encoder.layer[n].attention.output.dense,
    "distilbert": lambda m, n: m.transformer.layer[n].attention.out_lin,
    "electra": lambda m, n: m.encoder.layer[n].attention.output.dense,
    "modernbert": lambda m, n: m.layers[n].attn.Wo,
}


@pytest.mark.parametrize("family", ENCODERS)
def test_watching_changes_nothing(family):
    model = tiny(family)
    inputs, mask = inputs_of(family)
    before = run(model, **inputs)
    seen = []
    heads = TransformerHeads(model)
    with heads.watching(lambda *some: seen.append(some)):
        torch.testing.assert_close(run(model, **inputs)[mask], before[mask])
    assert [some[0] for some in seen] == list(range(len(heads.counts)))
    assert heads.counts == (4,) * model.config.num_hidden_layers
    for _, q, k, out, lengths, scale in seen:
        assert q.shape == k.shape == out.shape == (int(mask.sum()), 4, 8)
        assert lengths == mask.sum(1).tolist()
        assert scale == pytest.approx(8**-0.5)
    assert model.config._attn_implementation == "sdpa"
    torch.testing.assert_close(run(model, **inputs), before)
    assert len(seen) == len(heads.counts)


@pytest.mark.parametrize("family", PROJECTIONS)
def test_heads_are_columns_of_the_output_projection(family):
    model = tiny(family)
    inputs, mask = inputs_of(family)
    got, seen = [], []
    hook = PROJECTIONS[family](model, 1).register_forward_pre_hook(lambda module, some: got.append(some[0]))
    heads = TransformerHeads(model)
    with heads.watching(lambda layer, q, k, out, lengths, scale: seen.append(out)):
        run(model, **inputs)
    hook.remove()
    torch.testing.assert_close(seen[1].flatten(1), got[0].reshape(*mask.shape, 32)[mask])
    with heads.without([(0, 3), (1, 1), (1, 2)]):
        less = run(model, **inputs)[mask]
    assert (less - run(model, **inputs)[mask]).abs().max() > 1e-3
    with torch.no_grad():
        for layer, head in [(0, 3), (1, 1), (1, 2)]:
            PROJECTIONS[family](model, layer).weight[:, 8 * head : 8 * head + 8] = 0
    torch.testing.assert_close(run(model, **inputs)[mask], less)


def test_queries_and_keys_are_those_of_the_attention():
    """The softmax of their products over one text gives the attention weights."""
    for family in ("bert", "modernbert"):
        model = tiny(family, attn_implementation="eager", output_attentions=True)
        ids, mask = random_ids()
        with torch.no_grad():
            attentions = model(input_ids=ids, attention_mask=mask).attentions
        seen = []
        with TransformerHeads(model).watching(
            lambda layer, q, k, out, lengths, scale, to=seen: to.append((q, k, scale))
        ):
            run(model, input_ids=ids, attention_mask=mask, output_attentions=False)
        q, k, scale = seen[0]
        first = slice(0, LENGTHS[0])
        weights = (scale * torch.einsum("ihd,jhd->hij", q[first], k[first])).softmax(-1)
        torch.testing.assert_close(weights, attentions[0][0, :, first, first], rtol=1e-5, atol=1e-6)
        assert model.config._attn_implementation == "eager"


def test_positional_and_missing_masks():
    model = tiny("bert")
    ids, mask = random_ids()
    seen = []
    with TransformerHeads(model).watching(lambda *some: seen.append(some[4])), torch.no_grad():
        model(ids, mask)
        model(ids)
    assert seen == [LENGTHS] * 2 + [[max(LENGTHS)] * 3] * 2


def test_converted_models():
    model = convert(tiny("bert"), kind="multiscale", branching=(4, 2), top_k=0)
    ids, mask = random_ids()
    before = run(model, input_ids=ids, attention_mask=mask)
    with TransformerHeads(model).watching(lambda *some: None):
        torch.testing.assert_close(run(model, input_ids=ids, attention_mask=mask), before)
    assert model.config._attn_implementation == "hsa"
    exact = run(revert(model), input_ids=ids, attention_mask=mask)
    assert (exact - before)[mask.bool()].abs().max() > 1e-3


def test_features_do_not_depend_on_batches():
    model = tiny("bert")
    ids, mask = random_ids()

    def answer(chosen):
        width = max(LENGTHS[i] for i in chosen)
        return model(input_ids=ids[chosen, :width], attention_mask=mask[chosen, :width]).last_hidden_state[:, 0]

    one = collect(TransformerHeads(model), answer, [np.array([2, 0]), np.array([1])], tokens=30)
    other = collect(TransformerHeads(model), answer, [np.array([2]), np.array([0]), np.array([1])], tokens=30)
    for name in ("outputs", "queries", "keys"):
        for a, b in zip(getattr(one, name), getattr(other, name), strict=True):
            torch.testing.assert_close(a, b)
    torch.testing.assert_close(one.answers, other.answers)
    assert one.queries[0].shape == (30, 8)


def test_model_is_restored_after_an_error():
    model = tiny("bert")
    heads = TransformerHeads(model)
    with pytest.raises(IndexError), heads.without([(0, 4)]):  # there are four heads
        run(model, input_ids=random_ids()[0])
    assert model.config._attn_implementation == "sdpa"
    assert not model._forward_pre_hooks
    with heads.without([]), pytest.raises(InvalidInput, match="already being watched"), heads.without([]):
        pass


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_decoders(family):
    with pytest.raises(Unsupported, match="is a causal decoder; pass an encoder"):
        TransformerHeads(tiny(family))


def test_other_models():
    with pytest.raises(Unsupported, match="has a decoder, which attends to an encoder"):
        TransformerHeads(tiny("bart"))
    with pytest.raises(Unsupported, match="Linear is not a transformers model"):
        TransformerHeads(torch.nn.Linear(2, 2))
    config = transformers.FNetConfig(vocab_size=59, hidden_size=32, num_hidden_layers=1, intermediate_size=8)
    with pytest.raises(Unsupported, match="computes its attention itself"):
        TransformerHeads(transformers.FNetModel(config))
    model = tiny("bert")
    model.config._attn_implementation = NAME
    with pytest.raises(InvalidInput, match=r"attn_implementation: expected .*, got 'hsa-heads'"):
        run(model, input_ids=random_ids()[0])


def test_loading(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    save(tmp_path / "classification", classifier())
    save(tmp_path / "embedding", classifier().bert)
    save(tmp_path / "write", language_model())
    save(tmp_path / "both", tiny("bart"))
    for name, labelled, task, kind in [
        ("classification", True, "classification", "BertForSequenceClassification"),
        ("classification", False, "embedding", "BertModel"),
        ("embedding", True, "embedding", "BertModel"),
    ]:
        model, _, result = load_encoder(str(tmp_path / name), labelled=labelled)
        assert (result, type(model).__name__) == (task, kind)
    with pytest.raises(Unsupported, match="both is a bart, which has a decoder"):
        load_encoder(str(tmp_path / "both"), labelled=True)
    with pytest.raises(HsaError, match="no such folder"):
        load_encoder(str(tmp_path / "none"), labelled=True)
